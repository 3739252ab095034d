"""A real broker, workers with engines in threads, and a router that follows what their caches hold."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.bus.nats import NatsBus
from moonpool.config.process import router_config
from moonpool.config.schema import ClusterConfig, RouterSettings
from moonpool.config.secret import load_or_create_secret
from moonpool.ids import WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.service.life import ReadyFacts, StopPolicy, running
from moonpool.telemetry.names import Metric
from moonpool_router.app import RouterService, build
from support.eventually import eventually
from support.lossy_bus import LossyBus
from support.nats_server import NatsServer, nats_server
from support.router_client import RouterClient
from support.thread_engine import Gate, ThreadEngines, write_fake_model
from support.workers import RunningWorker, running_worker, worker_config

_WAIT_S = 20.0


class IndexedWorker:
    """A worker and a session with it, which gives it work."""

    def __init__(
        self, worker: RunningWorker, client: RouterClient, bus: LossyBus, stack: AsyncExitStack
    ) -> None:
        self.worker = worker
        self.client = client
        self.bus = bus
        self._stack = stack

    @property
    def key(self) -> WorkerKey:
        return self.client.key

    async def answer(self, *requests: InferenceRequest) -> None:
        """Have these answered, and wait until nothing is held."""
        for request in requests:
            self.client.decode(request)
        for request in requests:
            await self.client.answer(request)
        await self.worker.until_quiet()

    async def num_cached(self) -> int:
        """Blocks in its cache, as its core counts them; nothing may be held."""
        ledger = (await self.worker.ledger()).ledger
        assert ledger.num_referenced == 0, ledger
        return ledger.num_cached

    def metric(self, metric: Metric, **labels: str) -> float:
        return self.worker.service.metrics.value(metric, **labels)

    async def stop(self) -> None:
        await self._stack.aclose()


class IndexedRouter:
    """A router of which a test looks at the index."""

    def __init__(self, service: RouterService, secret: bytes, facts: ReadyFacts) -> None:
        self._service = service
        self._secret = secret
        self.address = str(facts["grpc_address"])
        self.http_url = str(facts["http_url"])

    def metric(self, metric: Metric, **labels: str) -> float:
        return self._service.metrics.value(metric, **labels)

    def matcher(self, worker: IndexedWorker) -> PrefixMatcher:
        """Over the router's index, in this worker's namespace."""
        matcher = PrefixMatcher(self._service.index, self._secret)
        matcher.adopt(worker.worker.service.shell.hello.namespace)
        return matcher

    def render_metrics(self) -> str:
        return self._service.render_metrics().decode()

    async def meets(self, *workers: IndexedWorker) -> None:
        """These workers have joined, and no other is left."""
        keys = {worker.key for worker in workers}
        await eventually(
            lambda: set(self._service.index.workers) == keys,
            timeout_s=_WAIT_S,
            what="the router knows its workers",
        )

    async def follows(self, *workers: IndexedWorker) -> None:
        """The index says of these workers, and of no other, what their caches hold."""

        async def is_true() -> bool:
            index = self._service.index
            if set(index.workers) != {worker.key for worker in workers}:
                return False
            for worker in workers:
                snapshot = await worker.worker.service.shell.kv.snapshot()
                keys = np.sort(snapshot.keys)
                if len(keys) != await worker.num_cached():
                    return False
                if not np.array_equal(index.keys_of(worker.key), keys):
                    return False
            return not any(index.needs_snapshot(worker.key) for worker in workers)

        await eventually(is_true, timeout_s=_WAIT_S, what="the index is true")
        self._service.index.validate()


class IndexedCluster:
    """Made by `indexed_cluster`."""

    def __init__(self, data_dir: Path, nats: NatsServer, stack: AsyncExitStack) -> None:
        self.nats = nats
        self.data_dir = data_dir
        self._stack = stack
        self._model = write_fake_model(data_dir / "model")

    @property
    def rpc_key(self) -> str:
        return load_or_create_secret(self.data_dir).rpc_key

    async def start_worker(
        self,
        worker_id: str = "d0",
        *,
        role: str = "both",
        gate: Gate | None = None,
        policy: StopPolicy | None = None,
        **settings: Any,
    ) -> IndexedWorker:
        config = worker_config(self.data_dir, self._model, worker_id, role, **settings)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        bus = LossyBus(NatsBus(self.nats.url, name=worker_id))
        worker = await stack.enter_async_context(
            running_worker(config, bus, start_engine=ThreadEngines(gate), policy=policy)
        )
        client = await stack.enter_async_context(worker.router("hands"))
        return IndexedWorker(worker, client, bus, stack)

    async def start_router(
        self, *, local_prefill_tokens: int = 256, **settings: Any
    ) -> IndexedRouter:
        """`settings` are RouterSettings'."""
        config = router_config(
            ClusterConfig(
                name="test",
                data_dir=self.data_dir,
                model=str(self._model),
                dtype="float32",
                local_prefill_tokens=local_prefill_tokens,
                router=RouterSettings(http_port=0, grpc_port=0, **settings),
            ),
            nats_url=self.nats.url,
        )
        service = build(config)
        assert isinstance(service, RouterService)
        life = await self._stack.enter_async_context(running(service))
        secret = load_or_create_secret(self.data_dir).value
        return IndexedRouter(service, secret, life.facts)


@contextlib.asynccontextmanager
async def indexed_cluster(data_dir: Path) -> AsyncIterator[IndexedCluster]:
    """A broker that runs; what a test starts is stopped in reverse order."""
    run_dir = data_dir / "nats"
    run_dir.mkdir()
    with nats_server(run_dir) as nats:
        async with AsyncExitStack() as stack:
            yield IndexedCluster(data_dir, nats, stack)
