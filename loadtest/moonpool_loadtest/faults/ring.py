"""Ring: a lab whose stores find each other on Redis, requests that run while it breaks, and what lies where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moonpool.cluster.local_cluster import LocalCluster
from moonpool.config.process import router_config
from moonpool.config.secret import load_or_create_secret
from moonpool.errors import MoonpoolError
from moonpool.hub.model_dir import resolve
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.kv.block_hash import (
    ModelNamespace,
    Namespace,
    NamespaceSeed,
    hash_blocks,
    namespace_seed,
)
from moonpool.rpc.admin import fetch_snapshot
from moonpool.tiering.homes import home_key, home_of, ramp_weight
from moonpool.tiering.offloader import OffloaderConfig
from moonpool_loadtest.faults.lab import FaultLab, FaultReport
from moonpool_loadtest.faults.redis_server import RedisServer
from moonpool_loadtest.faults.store_cluster import BLOCK_SIZE
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Case, Client, Outcome, num_shared_tokens

#: Comes when the others have been there for a while.
JOINS = "store-2"
#: Of what families share, what must come from stores before any fault, ...
MIN_SHARE = 0.9
#: ... and of that share, what must come from them after each.
MIN_RECOVERED = 0.95
#: Between two looks at what takes several calls to know.
LOOK_S = 0.1

#: Earlier families of which the load asks again.
_NUM_AGAIN = 2
#: On a machine that is short of time a read may be given up, and what it was for is computed.
_MAX_PASSES = 3
_RUNNING_S = 10.0
_ROUND_S = 300.0
_FOLLOWED_S = 15.0
_RAMP_S = OffloaderConfig().ramp_s


class Load:
    """Requests that are asked in turn, again and again, so many at a time. Made by `Ring.load`.

    What is wrong with it is among its problems.
    """

    def __init__(self, client: Client, cases: Sequence[Case], *, num_at_once: int) -> None:
        self._client = client
        self._cases = cases
        self._num_at_once = num_at_once
        self._num_asked = 0
        self._is_ended = False
        self._num_before = 0
        self.started = asyncio.get_running_loop().time()
        self.num_in_flight = 0
        #: In flight at the end of `running`.
        self.num_struck = 0
        self.outcomes: list[Outcome] = []
        #: Of the scenario that it belongs to.
        self.problems: list[str] = []

    async def run(self) -> None:
        """Until `end` was called and what is in flight is answered; or until one fails."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._num_at_once):
                tasks.create_task(self._ask())

    def end(self) -> None:
        """Ask nothing more."""
        self._is_ended = True

    async def running(self, cluster: LocalCluster) -> None:
        """Until workers are at requests that are not answered: the fault is to happen."""

        async def is_running() -> bool:
            return self.num_in_flight > 0 and (await cluster.status()).num_running > 0

        self.problems += await within(
            _RUNNING_S, "requests run when the fault is to happen", is_running
        )
        self.num_struck, self._num_before = self.num_in_flight, len(self.outcomes)

    @property
    def num_since(self) -> int:
        """Answered since `running`."""
        return len(self.outcomes) - self._num_before

    async def once_more(self) -> None:
        """Until all are asked, and answered, from here on."""
        num_answered = len(self.outcomes) + self.num_in_flight + len(self._cases)

        async def are_answered() -> bool:
            return self._is_ended or len(self.outcomes) >= num_answered

        self.problems += await within(
            _ROUND_S, f"{len(self._cases)} requests answered", are_answered
        )

    async def _ask(self) -> None:
        while not self._is_ended:
            case = self._cases[self._num_asked % len(self._cases)]
            self._num_asked += 1
            self.num_in_flight += 1
            outcome = await self._client.ask(case)
            self.num_in_flight -= 1
            self.outcomes.append(outcome)
            self._is_ended |= bool(outcome.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What came back when workers held nothing (`Ring.recall_until`)."""

    outcomes: list[Outcome]
    #: Of what families share, what came from stores in the last pass.
    share: float
    num_passes: int
    problems: list[str]


@dataclass(slots=True, kw_only=True)
class Ring:
    """The lab's stores, and what is known of them. Made by `open_ring`."""

    lab: FaultLab
    redis: RedisServer
    #: Loop time before the cluster was started.
    began: float
    #: Where chains of this cluster begin.
    seed: NamespaceSeed
    rpc_key: str
    #: Requests that must belong to a node that has come, before it is looked for what it has of them.
    num_at_home: int
    #: Requests of a load.
    num_at_once: int
    #: Asked before, oldest first.
    families: list[tuple[Case, ...]] = field(default_factory=list)
    #: Of what families share, how much came from stores before any fault (`recall`).
    share_before: float = 0.0

    @property
    def cluster(self) -> LocalCluster:
        return self.lab.cluster

    def take(self) -> list[Case]:
        """What the next scenario asks: a new family and some earlier ones."""
        again = self.families[-_NUM_AGAIN:]
        self.families.append(self.lab.take())
        return [case for family in (self.families[-1], *again) for case in family]

    @asynccontextmanager
    async def load(self, cases: Sequence[Case]) -> AsyncIterator[Load]:
        """Ask these while the context lasts, and until all that were asked are answered."""
        load = Load(self.lab.client, cases, num_at_once=self.num_at_once)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            try:
                yield load
            finally:
                load.end()

    @asynccontextmanager
    async def struck(self) -> AsyncIterator[Load]:
        """A load of what the next scenario asks, that runs: the fault is to happen."""
        async with self.load(self.take()) as load:
            await load.running(self.cluster)
            yield load

    # -- what lies where --

    def chain(self, case: Case) -> tuple[BlockHash, ...]:
        """The full blocks of a request and its answer, whose last token is not computed."""
        tokens = [*case.prompt, *self.lab.expected[case.name][:-1]]
        return tuple(hash_blocks(self.seed, tokens, BLOCK_SIZE))

    async def held(self, *node_ids: str) -> set[int]:
        """The keys of all blocks that these nodes say they hold.

        Raises:
            MoonpoolError: One does not answer.
        """
        keys: set[int] = set()
        for node_id in node_ids:
            part = self.cluster.part(node_id)
            key = WorkerKey(WorkerId(node_id), Incarnation(str(part.fact("incarnation"))))
            address = str(part.fact("grpc_address"))
            snapshot = await fetch_snapshot(address, key, key=self.rpc_key, deadline_s=5.0)
            keys.update(map(int, snapshot.keys))
        return keys

    async def holds(self, store_id: str, keys: set[int]) -> bool:
        """Whether a store says that it holds all of these; False while it does not answer."""
        try:
            return keys <= await self.held(store_id)
        except MoonpoolError:
            return False

    async def has_written(self, store_id: str) -> bool:
        """Whether all that a store holds lies on its disk."""
        stats = (await self.cluster.store_report(store_id)).stats
        return stats.num_unwritten_blocks == 0 and stats.num_disk_blocks >= stats.num_host_blocks

    async def is_followed(self) -> bool:
        """Whether the router believes of every node what it holds."""
        try:
            believed = {
                cache.worker_id: cache.num_published_blocks
                for cache in (await self.cluster.cache_stats()).workers
                if cache.is_live
            }
            held = {node_id: len(await self.held(node_id)) for node_id in self.cluster.node_ids}
        except MoonpoolError:
            return False
        return believed == held

    async def is_listed(self) -> bool:
        """Whether Redis has a record of every store, and of none else."""
        # An optional extra: only whoever has several stores needs it.
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        key = f"moonpool.{self.cluster.config.name}.stores"
        try:
            async with Redis.from_url(self.redis.url) as client:
                listed = await client.smembers(key)
        except (OSError, RedisError):
            return False
        # The client gives bytes, as it is set up; its types allow both.
        names = [name if isinstance(name, str) else name.decode() for name in listed]
        return {name.partition("@")[0] for name in names} == set(self.cluster.store_ids)

    def at_home(self, store_id: str, *, joined: float) -> list[Case]:
        """Requests asked before whose chains belong to a store that joined then, whoever is asked.

        Nodes differ a little in when they heard of each other. It counts as younger here, and the others as
        older, than they can be to anyone: what belongs to it all the same belongs to it for all.
        """
        now = asyncio.get_running_loop().time()
        weights = {
            other: ramp_weight(now - self.began, _RAMP_S) for other in self.cluster.store_ids
        }
        weights[WorkerId(store_id)] = ramp_weight(now - joined, _RAMP_S)
        cases = [case for family in self.families for case in family]
        return [case for case in cases if home_of(weights, home_key(self.chain(case))) == store_id]

    # -- the last part of each scenario --

    async def settle(self) -> list[str]:
        """All are back, nobody holds anything, the router believes what is true; else what is wrong."""
        problems = await self.lab.settle()
        return problems + await within(
            _FOLLOWED_S, "the router knows who holds what", self.is_followed, poll_s=LOOK_S
        )

    async def forget(self) -> list[str]:
        """The workers hold nothing, and the router knows; else what is wrong."""
        try:
            for worker_id in self.cluster.worker_ids:
                await self.cluster.clear_worker(worker_id)
        except MoonpoolError as error:
            return [error.message]
        return []

    async def recall(self) -> tuple[list[Outcome], float, list[str]]:
        """One request of each family, asked of workers that hold nothing.

        Beyond what a family shares, the router may name a store that holds less and is nearer.

        Returns:
            The answers, what share of all that families share came from stores, and what is wrong.
        """
        problems = await self.forget()
        cases = [family[number % len(family)] for number, family in enumerate(self.families)]
        outcomes = await self.lab.client.ask_all(cases)
        num_shared = [num_shared_tokens(family, BLOCK_SIZE) for family in self.families]
        num_found = [
            min(outcome.done.usage.num_store_tokens, num_tokens) if outcome.done else 0
            for outcome, num_tokens in zip(outcomes, num_shared, strict=True)
        ]
        return outcomes, sum(num_found) / sum(num_shared), problems + await self.settle()

    async def recall_until(self, least: float) -> Recalled:
        """Recall until so large a share came from stores, three times at most."""
        outcomes: list[Outcome] = []
        problems: list[str] = []
        share, num_passes = 0.0, 0
        while share < least and num_passes < _MAX_PASSES:
            num_passes += 1
            answered, share, found = await self.recall()
            outcomes += answered
            problems += found
        return Recalled(outcomes=outcomes, share=share, num_passes=num_passes, problems=problems)

    async def judge(self, fault: str, load: Load, *, note: str) -> FaultReport:
        """Whole, quiet, and as much is found as before any fault; the row."""
        problems = [*load.problems, *await self.settle()]
        least = MIN_RECOVERED * max(self.share_before, MIN_SHARE)
        recalled = await self.recall_until(least)
        problems += recalled.problems
        if recalled.share < least:
            problems.append(
                f"{recalled.share:.0%} of what families share came from stores, "
                f"{self.share_before:.0%} before any fault; at least {least:.0%} must"
            )
        return self.lab.judge(
            fault,
            [*load.outcomes, *recalled.outcomes],
            problems=problems,
            started=load.started,
            note=f"{note}; from stores: {recalled.share:.0%} of what earlier families share "
            f"({self.share_before:.0%} before any fault) at pass {recalled.num_passes}",
        )


async def open_ring(
    lab: FaultLab, redis: RedisServer, *, began: float, num_at_home: int = 4, num_at_once: int = 4
) -> Ring:
    """A ring of two of the lab's three stores.

    Args:
        redis: That of the configuration; it runs.
        began: Loop time before the lab was opened.
        num_at_home: Of requests; the more, the longer it takes until a store that has come is home of so many.
        num_at_once: Requests of a load that are in flight.
    """
    config = lab.cluster.config
    secret = load_or_create_secret(config.data_dir)
    model = ModelNamespace(
        model_fingerprint=resolve(config.model, data_dir=config.data_dir).fingerprint,
        compute_dtype=router_config(config, nats_url="").common.computed_as,
        kv_dtype=config.dtype,
        block_size=BLOCK_SIZE,
    )
    await lab.cluster.remove_store(JOINS)
    return Ring(
        lab=lab,
        redis=redis,
        began=began,
        seed=namespace_seed(Namespace(model=model, tenant=DEFAULT_TENANT), secret.value),
        rpc_key=secret.rpc_key,
        num_at_home=num_at_home,
        num_at_once=num_at_once,
    )
