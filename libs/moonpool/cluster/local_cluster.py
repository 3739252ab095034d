"""LocalCluster: a broker, a router, workers and stores as processes of this machine.

    async with LocalCluster(config) as cluster:
        cluster.endpoints.grpc_address ...

Used by `moonpool up`, the demo, benchmarks and end-to-end tests alike.

Rules
- Everything lives in one run directory (mode 0700): configurations, logs, the broker's port. The
  configurations go when the cluster ends, the logs stay; old run directories are removed.
- Ports are chosen by the processes and reported; nothing is guessed and then bound.
- The order of a stop is router, workers, stores, broker: whoever is still asked is still there.
- However this process ends, its children end with it. Nothing is left: no process, port or memory.

Enter it in the main thread: the death signal of the children follows the thread that starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from moonpool.cluster.cores import CorePlan, plan_cores
from moonpool.cluster.nats_server import NatsServer
from moonpool.cluster.part import Part, PartEvent, PartSpec, PartState, RestartPolicy
from moonpool.cluster.process import ChildProcess
from moonpool.config.process import (
    KvStoreConfig,
    RouterConfig,
    WorkerConfig,
    router_config,
    store_configs,
    worker_configs,
)
from moonpool.config.schema import ClusterConfig
from moonpool.config.secret import load_or_create_secret
from moonpool.errors import MoonpoolError, UnavailableError
from moonpool.failpoints import forget_claims
from moonpool.ids import WorkerId
from moonpool.rpc.admin import clear_cache, fetch_ledger, fetch_snapshot, fetch_status, fetch_steps
from moonpool.rpc.cache import fetch_cache_stats
from moonpool.rpc.store import fetch_store_report
from moonpool.service.life import StopPolicy
from moonpool.wire.admin import RouterSnapshot
from moonpool.wire.cache_stats import CacheStats
from moonpool.wire.steps import StepRecord
from moonpool.wire.store import StoreReport
from moonpool.wire.worker import LedgerReport

ROUTER = "router"
NATS = "nats"

_NUM_KEPT_RUNS = 10
_POLL_S = 0.05
#: Beyond all that a service gives itself for a stop, before it is killed: one that is late ends itself.
_KILL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How the supervisor behaves; what the cluster is, says ClusterConfig."""

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    #: Give parts cores of their own (cores.py); explicit ones in the configuration win.
    is_pinned: bool = True
    has_nats: bool = True
    has_router: bool = True
    #: Else each one is started by `start_store`.
    has_stores: bool = True
    #: Entering returns when requests can be served; else when the processes have been started.
    waits_ready: bool = True
    ready_timeout_s: float = 120.0
    #: Failpoints by part, for its first life only (Part.arm).
    failpoints: Mapping[str, str] = field(default_factory=dict)
    #: Beside this process's own.
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a client finds the cluster."""

    grpc_address: str
    #: Empty if the router opens no HTTP door.
    http_url: str
    #: With the broker's credentials, if it has any: not to be shown.
    nats_url: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockSet:
    """A set of cached blocks, by their keys."""

    num_blocks: int
    #: Tells it from any other.
    digest: int


_NOTHING = _BlockSet(num_blocks=0, digest=0)


class LocalCluster:
    """See the file's head.

    Args:
        on_event: Told of every change of a part's state; must return at once.
        run_dir: Made if missing; below the data directory if None.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        options: ClusterOptions | None = None,
        run_dir: Path | None = None,
        on_event: Callable[[PartEvent], None] = lambda _event: None,
    ) -> None:
        self.config = config
        self._options = options or ClusterOptions()
        self._given_run_dir = run_dir
        self._on_event = on_event
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._run_dir: Path | None = None
        self._nats: NatsServer | None = None
        self._nats_url = config.nats.url or ""
        self._parts: dict[str, Part] = {}
        self._key = ""

    # -- what it is --

    @property
    def run_dir(self) -> Path:
        assert self._run_dir is not None, "not entered"
        return self._run_dir

    @property
    def endpoints(self) -> Endpoints:
        """Raises UnavailableError while the router is not up."""
        router = self.part(ROUTER)
        http_url = ""
        with contextlib.suppress(KeyError):
            http_url = str(router.fact("http_url"))
        return Endpoints(
            grpc_address=str(router.fact("grpc_address")),
            http_url=http_url,
            nats_url=self._nats_url,
        )

    @property
    def door_key(self) -> str | None:
        """With it whoever runs the cluster comes in at its doors; None: they take everyone."""
        router = self.config.router
        return router.api_key or (self._key if router.has_keys else None)

    @property
    def nats_process(self) -> ChildProcess | None:
        """The broker's, if it is ours and has been started."""
        return self._nats.process if self._nats is not None else None

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        return tuple(map(WorkerId, self._names_of(WorkerConfig)))

    @property
    def store_ids(self) -> tuple[WorkerId, ...]:
        return tuple(map(WorkerId, self._names_of(KvStoreConfig)))

    @property
    def node_ids(self) -> tuple[WorkerId, ...]:
        """All that hold KV: workers, then stores."""
        return self.worker_ids + self.store_ids

    @property
    def router_names(self) -> tuple[str, ...]:
        """Those that have been started, the configured one first."""
        return self._names_of(RouterConfig)

    def _names_of(
        self, kind: type[RouterConfig] | type[WorkerConfig] | type[KvStoreConfig]
    ) -> tuple[str, ...]:
        parts = self._parts.items()
        return tuple(name for name, part in parts if isinstance(part.spec.document, kind))

    def part(self, name: str) -> Part:
        """A router's name, or the id of a worker or a store. KeyError for another name."""
        return self._parts[name]

    # -- starting and stopping --

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def start_nats(self) -> None:
        """Start the broker, on the port that it had or was to have."""
        assert self._nats is not None, "the broker is not ours"
        self._on_event(PartEvent(part=NATS, state=PartState.STARTING))
        await self._nats.start()
        self._on_event(PartEvent(part=NATS, state=PartState.READY, detail=self._nats.address))

    async def kill_nats(self) -> None:
        assert self._nats is not None, "the broker is not ours"
        await self._nats.kill()
        self._on_event(PartEvent(part=NATS, state=PartState.STOPPED))

    def start_router(self, name: str = ROUTER) -> None:
        """Start the router, or another one beside it: same settings, ports of its own."""
        self._start_part(self._router_spec(name))

    def start_store(self, store_id: str) -> None:
        """Start a store of the configuration that has not been started, or was removed."""
        specs = {spec.name: spec for spec in self._store_specs(self._core_plan())}
        self._start_part(specs[store_id])

    async def remove_store(self, store_id: str) -> None:
        """Drain a store; without it the cluster is whole. What lies on its disk stays there."""
        await self.stop_part(store_id)
        del self._parts[store_id]
        (self.run_dir / f"{store_id}.json").unlink(missing_ok=True)

    async def stop_part(self, name: str) -> None:
        """Drain one part and leave it stopped."""
        part = self._parts[name]
        await part.stop(timeout_s=self._stop_timeout_s(part))

    async def kill(self, name: str) -> None:
        """SIGKILL one part; the restart policy says whether it comes back."""
        await self._parts[name].kill()

    def force(self) -> None:
        """Kill everything now (a second Ctrl-C); leaving the cluster then takes no time."""
        for part in self._parts.values():
            part.force()

    async def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Return when every router serves, and every worker and store has joined it.

        Raises:
            UnavailableError: Says which part is missing, and why.
        """
        timeout_s = timeout_s or self._options.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        for part in self._parts.values():
            await part.wait_ready(timeout_s=max(deadline - time.monotonic(), 0.0))
        reason = "the router did not answer"
        last_told = ""
        while True:
            try:
                statuses = [await self.status(name) for name in self.router_names]
            except MoonpoolError as error:
                reason = error.message
            else:
                reason = next(filter(None, map(self._missing, statuses)), "")
                if not reason:
                    return
            if reason != last_told:
                self._on_event(PartEvent(part=ROUTER, state=PartState.STARTING, detail=reason))
                last_told = reason
            if time.monotonic() >= deadline:
                raise UnavailableError(f"Not ready after {timeout_s:g} s: {reason}")
            await asyncio.sleep(_POLL_S)

    # -- asking --

    async def status(self, router: str = ROUTER) -> RouterSnapshot:
        """What a router says of itself and its workers."""
        address = str(self._parts[router].fact("grpc_address"))
        return await fetch_status(address, key=self.door_key, deadline_s=5.0)

    async def cache_stats(self, router: str = ROUTER) -> CacheStats:
        """What a router has counted of the reuse of KV, and believes of its workers' caches."""
        address = str(self._parts[router].fact("grpc_address"))
        return await fetch_cache_stats(address, key=self.door_key, deadline_s=5.0)

    async def ledger(self, worker_id: str) -> LedgerReport:
        """The block ledger and open streams of a worker or a store."""
        address = str(self._parts[worker_id].fact("grpc_address"))
        return await fetch_ledger(address, key=self._key, deadline_s=5.0)

    async def steps(self, worker_id: str, *, after_step: int = 0) -> tuple[StepRecord, ...]:
        """The last steps of a worker's engine, those after number `after_step`."""
        address = str(self._parts[worker_id].fact("grpc_address"))
        return await fetch_steps(address, after_step=after_step, key=self._key, deadline_s=5.0)

    async def store_report(self, store_id: str) -> StoreReport:
        """What a store says of its tiers."""
        address = str(self._parts[store_id].fact("grpc_address"))
        return await fetch_store_report(address, key=self._key, deadline_s=5.0)

    async def wait_quiet(self, *, timeout_s: float = 10.0) -> None:
        """Return when no worker and no store holds anything for anyone.

        Raises:
            UnavailableError: With the ledgers that are not quiet.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ledgers = [await self.ledger(node_id) for node_id in self.node_ids]
            busy = [ledger for ledger in ledgers if not ledger.is_quiet]
            if not busy:
                return
            if time.monotonic() >= deadline:
                raise UnavailableError(f"Not quiet after {timeout_s:g} s: {busy}")
            await asyncio.sleep(_POLL_S)

    async def wait_followed(self, *, timeout_s: float = 15.0) -> None:
        """Return when the workers are quiet, and every router believes of each what its cache holds.

        Raises:
            UnavailableError: Not in time; with the numbers of blocks held and believed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                held = {name: await self._held(name) for name in self.worker_ids}
                believed = {router: await self._believed(router) for router in self.router_names}
            except MoonpoolError as error:
                reason = error.message
            else:
                if all(sets == held for sets in believed.values()):
                    return
                reason = f"held {held}, believed {believed}"
            if time.monotonic() >= deadline:
                raise UnavailableError(f"Not followed after {timeout_s:g} s: {reason}")
            await asyncio.sleep(_POLL_S)

    async def clear_worker(self, worker_id: str, *, timeout_s: float = 15.0) -> None:
        """Have a worker forget what it holds; return when it has, and every router knows.

        Raises:
            UnavailableError: Not in time: something is held.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            address = str(self._parts[worker_id].fact("grpc_address"))
            # Again each time: what somebody references is not forgotten.
            await clear_cache(address, key=self._key, deadline_s=5.0)
            believed = [await self._believed(router) for router in self.router_names]
            if all(sets.get(worker_id) == _NOTHING for sets in believed):
                return
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"{worker_id} is not empty after {timeout_s:g} s: blocks believed {believed}"
                )
            await asyncio.sleep(_POLL_S)

    async def _held(self, worker_id: str) -> _BlockSet | None:
        """What the cache of a worker holds; None while the worker is not quiet."""
        report = await self.ledger(worker_id)
        if not report.is_quiet:
            return None
        address = str(self._parts[worker_id].fact("grpc_address"))
        snapshot = await fetch_snapshot(address, report.worker, key=self._key, deadline_s=5.0)
        return _BlockSet(num_blocks=snapshot.head.count, digest=snapshot.head.digest)

    async def _believed(self, router: str) -> dict[str, _BlockSet]:
        """What a router believes that each worker holds."""
        return {
            one.worker_id: _BlockSet(
                num_blocks=one.num_published_blocks, digest=one.published_digest
            )
            for one in (await self.cache_stats(router)).workers
            if one.is_live and one.worker_id in self.worker_ids
        }

    # -- parts --

    async def _start(self) -> None:
        self._run_dir = self._make_run_dir()
        self._stack.callback(self._remove_documents)
        self._key = load_or_create_secret(self.config.data_dir).rpc_key
        forget_claims(self.config.data_dir)
        plan = self._core_plan()
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        if self.config.nats.is_embedded:
            self._nats = NatsServer(
                run_dir=self.run_dir, port=self.config.nats.port, cores=plan.others
            )
            self._stack.push_async_callback(self._nats.stop)
            if self._options.has_nats:
                await self.start_nats()
            else:
                self._nats.reserve_port()
            self._nats_url = self._nats.url
        self._stack.push_async_callback(self._stop_parts)
        if self._options.has_router:
            self.start_router()
        # Stores first: a worker that begins to serve has where to put what it computes.
        stores = self._store_specs(plan) if self._options.has_stores else []
        for spec in (*stores, *self._worker_specs(plan)):
            self._start_part(spec)
        if self._options.waits_ready:
            await self.wait_ready()

    def _start_part(self, spec: PartSpec) -> None:
        assert self._tasks is not None, "not entered"
        part = self._parts[spec.name] = Part(
            spec,
            run_dir=self.run_dir,
            restart=self._options.restart,
            ready_timeout_s=self._options.ready_timeout_s,
            on_event=self._on_event,
        )
        part.arm(self._options.failpoints.get(spec.name, ""))
        self._tasks.create_task(part.run(), name=spec.name)

    async def _stop_parts(self) -> None:
        for name in self.router_names:
            await self.stop_part(name)
        for names in (self.worker_ids, self.store_ids):
            async with asyncio.TaskGroup() as stopping:
                for name in names:
                    stopping.create_task(self.stop_part(name))

    def _stop_timeout_s(self, part: Part) -> float:
        policy = StopPolicy(drain_timeout_s=part.spec.document.drain_timeout_s)
        return policy.total_s + _KILL_AFTER_S

    def _router_spec(self, name: str) -> PartSpec:
        document = router_config(self.config, nats_url=self._nats_url)
        if name != ROUTER:
            ports = {"grpc_port": 0, "http_port": 0}
            document = document.model_copy(
                update={"router_id": name, "router": document.router.model_copy(update=ports)}
            )
        return PartSpec(
            name=name,
            module="moonpool_router",
            document=document,
            cores=self.config.router.cpus or self._core_plan().others,
            environment=self._options.environment,
        )

    def _worker_specs(self, plan: CorePlan) -> list[PartSpec]:
        decode_cores = iter(plan.decode_engines)
        prefill_cores = iter(plan.prefill_engines)
        specs = []
        for document in worker_configs(self.config, nats_url=self._nats_url):
            is_prefill = document.role == "prefill"
            engine_cores = next(prefill_cores if is_prefill else decode_cores)
            specs.append(
                PartSpec(
                    name=document.worker_id,
                    module="moonpool_prefill" if is_prefill else "moonpool_decode",
                    document=_pinned(document, engine_cores, plan.others),
                    cores=document.worker.service_cpus or plan.others,
                    environment=self._options.environment,
                )
            )
        return specs

    def _store_specs(self, plan: CorePlan) -> list[PartSpec]:
        return [
            PartSpec(
                name=document.store_id,
                module="moonpool_kvstore",
                document=document,
                cores=document.store.cpus or plan.others,
                environment=self._options.environment,
            )
            for document in store_configs(self.config, nats_url=self._nats_url)
        ]

    def _core_plan(self) -> CorePlan:
        roles = [group.role for group in self.config.workers for _ in range(group.count)]
        available = sorted(os.sched_getaffinity(0)) if self._options.is_pinned else ()
        return plan_cores(
            available,
            num_decode_engines=sum(role != "prefill" for role in roles),
            num_prefill_engines=roles.count("prefill"),
        )

    def _missing(self, status: RouterSnapshot) -> str:
        """Why requests cannot be served as configured; empty if they can."""
        if not status.is_ready:
            return status.not_ready_because
        joined = {worker.worker_id for worker in status.workers if worker.is_live}
        missing = [name for name in self.node_ids if name not in joined]
        refusals = [
            f"{worker.worker_id}: {worker.because}" for worker in status.workers if worker.because
        ]
        if not missing:
            return ""
        return f"waiting for {', '.join(missing)}" + "".join(f"; {line}" for line in refusals)

    # -- the run directory --

    def _make_run_dir(self) -> Path:
        if self._given_run_dir is not None:
            self._given_run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._given_run_dir
        runs = self.config.data_dir / "run"
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(runs.iterdir())[: -(_NUM_KEPT_RUNS - 1)]:
            if not Path("/proc", old.name.rpartition("-")[2]).exists():
                shutil.rmtree(old, ignore_errors=True)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        run_dir = runs / f"{moment}-{self.config.name}-{os.getpid()}"
        run_dir.mkdir(mode=0o700)
        return run_dir

    def _remove_documents(self) -> None:
        for name in self._parts:
            (self.run_dir / f"{name}.json").unlink(missing_ok=True)


def _pinned(
    document: WorkerConfig, engine_cores: tuple[int, ...], service_cores: tuple[int, ...]
) -> WorkerConfig:
    """The worker's document with the plan's cores where the operator named none."""
    settings = document.worker
    return document.model_copy(
        update={
            "worker": settings.model_copy(
                update={
                    "engine_cpus": settings.engine_cpus or engine_cores,
                    "service_cpus": settings.service_cpus or service_cores,
                }
            )
        }
    )
