"""Faults of a ring of stores: nodes come, leave and die, Redis and the broker go and come back, under load.

Two workers that prefill and decode, with pools so small that requests push each other out, and stores with
disks that find each other on Redis. Each scenario

1. asks the requests of a new family and of earlier ones, again and again, some at a time;
2. lets the fault happen while they run, and has all of them asked once more;
3. ends them, and waits until the cluster is whole and quiet and the router believes what is true;
4. has the workers forget all they hold and asks one request of each family: what is reused of these comes
   from the stores. It must be `MIN_RECOVERED` of what it was before any fault.

Each leaves one row in the lab's reports. They follow each other in the order of SCENARIOS: one ring lives
through all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.cluster.local_cluster import LocalCluster
from moonpool.config.schema import ClusterConfig
from moonpool.config.secret import load_or_create_secret
from moonpool.errors import MoonpoolError
from moonpool.hub.model_dir import resolve
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.inference.generation import TokenPrompt, Usage
from moonpool.kv.block_hash import ModelNamespace, Namespace, hash_blocks, namespace_seed
from moonpool.kv.block_key import block_key
from moonpool.rpc.admin import fetch_snapshot
from moonpool.tiering.homes import home_key, home_of, ramp_weight
from moonpool.tiering.offloader import OffloaderConfig
from moonpool.tiering.protocol import DEFAULT_TENANT
from moonpool_loadtest.faults.lab import FaultLab, FaultReport
from moonpool_loadtest.faults.log_mark import LogMark
from moonpool_loadtest.faults.redis_server import RedisServer
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Case, Client, Outcome

#: Comes later; leaves again; dies.
JOINS = "store-2"
LEAVES = "store-0"
DIES = "store-1"

#: Of the families that all scenarios take together: these before any fault, and one for each.
NUM_FIRST_FAMILIES = 4
#: Share of the reuse before any fault that there must be after each.
MIN_RECOVERED = 0.95

_BLOCK_SIZE = 16
_NUM_AT_ONCE = 6
#: Earlier families of which the load asks again.
_NUM_AGAIN = 2
#: Requests that belong to a node that has come, looked for before they are checked, and checked at most.
_NUM_AT_HOME = 4
_RUNNING_S = 10.0
_ROUND_S = 300.0
_JOIN_S = 60.0
_RING_S = 15.0
#: The broker's clients try every quarter of a second.
_BUS_S = 5.0
_RAMP_S = OffloaderConfig().ramp_s


def ring_config(
    model: str,
    *,
    data_dir: Path,
    ssd_dir: Path,
    redis_url: str,
    dtype: str,
    is_checked: bool = False,
    host_bytes: str = "256MiB",
) -> ClusterConfig:
    """Two workers of role both with 48 blocks each, and three stores. The router takes the workers in turn.

    Args:
        host_bytes: Memory of each store.
    """
    return ClusterConfig.model_validate(
        {
            "name": "ring",
            "data_dir": data_dir,
            "model": model,
            "dtype": dtype,
            "local_prefill_tokens": 512,
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "placement": {"disagg": "threshold", "mode": "round_robin"},
            },
            "worker": {
                "num_blocks": 48,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 4,
                "max_queued_steps": 64,
                "max_model_len": 512,
                # What is faster does not matter here.
                "kv_peer_reads": "always",
                "is_checked": is_checked,
            },
            "workers": [
                {"role": "both", "name": "left", "transports": ["shm", "grpc"]},
                {"role": "both", "name": "right", "transports": ["grpc"]},
            ],
            "store": {
                "host_bytes": host_bytes,
                "ssd_dir": ssd_dir,
                "ssd_bytes": "1GiB",
                "ssd_admission": "all",
                "ssd_write_bytes_per_day": 0,
                "is_ssd_strict": True,
                "redis_url": redis_url,
                "is_checked": is_checked,
            },
            "stores": 3,
        }
    )


class Load:
    """Requests that are asked in turn, again and again, so many at a time. Made by `Ring.load`."""

    def __init__(self, client: Client, cases: Sequence[Case]) -> None:
        self._client = client
        self._cases = cases
        self._num_asked = 0
        self._is_ended = False
        self.num_in_flight = 0
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Until `end` was called and what is in flight is answered; or until one fails."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_AT_ONCE):
                tasks.create_task(self._ask())

    def end(self) -> None:
        """Ask nothing more."""
        self._is_ended = True

    async def once_more(self) -> list[str]:
        """All are asked, and answered, from here on; else what is wrong."""
        num_answered = len(self.outcomes) + self.num_in_flight + len(self._cases)

        async def are_answered() -> bool:
            return self._is_ended or len(self.outcomes) >= num_answered

        return await within(_ROUND_S, f"{len(self._cases)} requests answered", are_answered)

    async def _ask(self) -> None:
        while not self._is_ended:
            case = self._cases[self._num_asked % len(self._cases)]
            self._num_asked += 1
            self.num_in_flight += 1
            outcome = await self._client.ask(case)
            self.num_in_flight -= 1
            self.outcomes.append(outcome)
            self._is_ended |= bool(outcome.problem)


@dataclass(slots=True, kw_only=True)
class Ring:
    """The lab's stores, and what is known of them. Made by `open_ring`."""

    lab: FaultLab
    redis: RedisServer
    #: Loop time before the cluster was started.
    began: float
    #: Asked before, oldest first.
    families: list[tuple[Case, ...]] = field(default_factory=list)
    #: Reused of one request of each family, with empty workers, before any fault.
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
        load = Load(self.lab.client, cases)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            try:
                yield load
            finally:
                load.end()

    # -- what lies where --

    def chain(self, case: Case) -> tuple[BlockHash, ...]:
        """The full blocks of a request and its answer, whose last token is not computed."""
        config = self.cluster.config
        secret = load_or_create_secret(config.data_dir)
        model = ModelNamespace(
            model_fingerprint=resolve(config.model, data_dir=config.data_dir).fingerprint,
            compute_dtype=config.dtype,
            kv_dtype=config.dtype,
            block_size=_BLOCK_SIZE,
        )
        seed = namespace_seed(Namespace(model=model, tenant=DEFAULT_TENANT), secret.value)
        tokens = [*case.prompt, *self.lab.expected[case.name][:-1]]
        return tuple(hash_blocks(seed, tokens, _BLOCK_SIZE))

    async def held(self, *node_ids: str) -> set[int]:
        """The keys of all blocks that these nodes say they hold.

        Raises:
            MoonpoolError: One does not answer.
        """
        rpc_key = load_or_create_secret(self.cluster.config.data_dir).rpc_key
        keys: set[int] = set()
        for node_id in node_ids:
            part = self.cluster.part(node_id)
            key = WorkerKey(WorkerId(node_id), Incarnation(str(part.fact("incarnation"))))
            address = str(part.fact("grpc_address"))
            snapshot = await fetch_snapshot(address, key, key=rpc_key, deadline_s=5.0)
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

        names = f"moonpool.{self.cluster.config.name}.stores"
        try:
            async with Redis.from_url(self.redis.url, decode_responses=True) as client:
                listed = await client.smembers(names)
        except (OSError, RedisError):
            return False
        return {name.partition("@")[0] for name in listed} == set(self.cluster.store_ids)

    def at_home(self, store_id: str, *, joined: float) -> list[Case]:
        """Requests asked before whose chains belong to a store that joined then, whoever is asked.

        Nodes differ a little in when they heard of each other. It counts as younger here, and the others as
        older, than they can be to anyone: what belongs to it all the same belongs to it for all.
        """
        now = asyncio.get_running_loop().time()
        weights = {other: ramp_weight(now - self.began, _RAMP_S) for other in self.cluster.store_ids}
        weights[WorkerId(store_id)] = ramp_weight(now - joined, _RAMP_S)
        cases = [case for family in self.families for case in family]
        return [case for case in cases if home_of(weights, home_key(self.chain(case))) == store_id]

    # -- the last part of each scenario --

    async def settle(self) -> list[str]:
        """All are back, nobody holds anything, the router believes what is true; else what is wrong."""
        problems = await self.lab.settle()
        return problems + await within(_RING_S, "the router knows who holds what", self.is_followed)

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

        Returns:
            The answers, what share of all that could be reused came from stores, and what is wrong.
        """
        problems = await self.forget()
        cases = [family[number % len(family)] for number, family in enumerate(self.families)]
        outcomes = await self.lab.client.ask_all(cases)
        num_reusable = sum((len(case.prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE for case in cases)
        share = sum(usage.num_store_tokens for usage in _usages(outcomes)) / num_reusable
        return outcomes, share, problems + await self.settle()

    async def judge(
        self,
        fault: str,
        outcomes: list[Outcome],
        problems: list[str],
        *,
        started: float,
        note: str,
    ) -> FaultReport:
        """Whole, quiet, and as much is found as before any fault; the row."""
        problems += await self.settle()
        recalled, share, found = await self.recall()
        problems += found
        if share < MIN_RECOVERED * self.share_before:
            problems.append(
                f"{share:.0%} of earlier families found in stores, {self.share_before:.0%} before "
                f"any fault; at least {MIN_RECOVERED:.0%} of that must be"
            )
        return self.lab.judge(
            fault,
            [*outcomes, *recalled],
            problems=problems,
            started=started,
            note=f"{note}; found in stores: {share:.1%}, before any fault {self.share_before:.1%}",
        )


def _usages(outcomes: Sequence[Outcome]) -> list[Usage]:
    return [outcome.done.usage for outcome in outcomes if outcome.done]
