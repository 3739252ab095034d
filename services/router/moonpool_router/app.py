"""The router's composition root: the only file that names concrete adapters.

Life
  1. The model's tokenizer is read; the doors listen, health NOT_SERVING; the bus is tried for ever.
  2. Workers that announce themselves (and seeds) are connected to; with the first that can decode the
     router serves. Without one it says why, in status and in errors.
  3. Drain: health NOT_SERVING; new requests are refused; streams that run end as they would.
  4. Abort: what still runs fails with UNAVAILABLE. Links close: workers drop what was ours.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from moonpool import __version__, native
from moonpool.api.v1 import admin_pb2_grpc, inference_pb2_grpc
from moonpool.bus.nats import NatsBus
from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.clock import Clock, SystemClock
from moonpool.config.api_keys import ApiKeys
from moonpool.config.process import RouterConfig
from moonpool.config.secret import load_or_create_secret
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.index_follower import IndexFollower
from moonpool.dispatch.membership import Membership, MembershipConfig
from moonpool.dispatch.reuse_books import ReuseBooks
from moonpool.errors import UnavailableError
from moonpool.failpoints import Failpoints
from moonpool.kv.asked_keys import AskedKeys
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.rpc.options import PUBLIC_MESSAGE_BYTES
from moonpool.rpc.server import RpcServer
from moonpool.service.http_server import HttpServer
from moonpool.service.life import Life, ReadyFacts, Service
from moonpool.service.loop_lag import watch_loop_lag
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.otlp import OtlpExport
from moonpool.telemetry.spans import Span, Tracer, TraceRing
from moonpool.wire.admin import RouterSnapshot, WorkerSnapshot
from moonpool.wire.cache_stats import CacheStats
from moonpool.wire.worker import RouterHello
from moonpool_router import admin_door, inference_door
from moonpool_router.admin_door import AdminDoor
from moonpool_router.books import ROUTER_METRICS, FleetCounts, RouterBooks
from moonpool_router.bus_listener import BusListener
from moonpool_router.cache_stats import cache_stats
from moonpool_router.compatibility import Compatibility
from moonpool_router.dispatch_loop import DispatchLoop
from moonpool_router.http_door import HttpDoor, HttpSettings
from moonpool_router.index_feed import IndexFeed
from moonpool_router.inference_door import InferenceDoor
from moonpool_router.limits import pipeline_limits, tenant_part
from moonpool_router.pipeline import PipelineLimits, RequestPipeline
from moonpool_router.placement_config import routing_config
from moonpool_router.served_model import ServedModel
from moonpool_router.worker_links import WorkerLinks

#: Calls of the gRPC door beside those of requests: health, status, models.
_NUM_OTHER_CALLS = 256
#: Streams that run are cut this long after the abort at the latest.
_STOP_GRACE_S = 1.0


def build(config: RouterConfig, *, bus: Bus | None = None, clock: Clock | None = None) -> Service:
    """The router as a service.

    Args:
        bus, clock: In place of NATS and the machine's clocks, for tests.

    Raises:
        ConfigError: Failpoints that are not allowed.
    """
    return RouterService(config, bus=bus, clock=clock or SystemClock())


class RouterService:
    """Implements Service; see the file's head."""

    def __init__(self, config: RouterConfig, *, bus: Bus | None, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        common = config.common
        self._bus = bus or NatsBus(common.nats_url, name=f"{common.cluster} {config.router_id}")
        self._failpoints = Failpoints.parse(
            common.failpoints, is_allowed=common.unsafe_failpoints, state_dir=common.data_dir
        )
        self._changed = asyncio.Event()
        self._is_draining = False
        self._server: RpcServer | None = None
        self._http: HttpServer | None = None
        self._model: ServedModel | None = None
        self._pipeline: RequestPipeline | None = None
        self._loop: DispatchLoop | None = None
        self._books: RouterBooks | None = None
        self._feed: IndexFeed | None = None
        self._keys: ApiKeys | None = None

    @property
    def name(self) -> str:
        return self._config.router_id

    # -- Service --

    async def start(self, life: Life) -> ReadyFacts:
        config, common = self._config, self._config.common
        secret = await asyncio.to_thread(load_or_create_secret, common.data_dir)
        self._keys = config.router.door_keys(secret.rpc_key)
        model = self._model = await asyncio.to_thread(
            ServedModel.load,
            common.model,
            data_dir=common.data_dir,
            served_name=config.router.served_model_name,
        )
        life.stack.callback(model.close)
        traces = TraceRing(
            max_traces=common.telemetry.num_kept_traces, export=await self._exporter(life)
        )
        compatibility = Compatibility(
            model_fingerprint=model.facts.fingerprint, secret_fingerprint=secret.fingerprint
        )
        links = WorkerLinks(
            hello=lambda: RouterHello(
                router_id=config.router_id,
                namespace=compatibility.namespace,
                secret_fingerprint=secret.fingerprint,
            ),
            key=secret.rpc_key,
        )
        books = self._books = RouterBooks(Metrics(ROUTER_METRICS), model=model.facts.name)
        books.metrics.set(names.BUILD_INFO, 1, version=__version__, process=self.name)
        subjects = Subjects(common.cluster)
        follower = IndexFollower(PrefixIndex(native.kernels().key_table()))
        matcher = PrefixMatcher(follower.index, secret.value)
        feed = self._feed = IndexFeed(
            follower,
            matcher,
            ReuseBooks(AskedKeys(native.kernels().key_table())),
            bus=self._bus,
            subjects=subjects,
            key=secret.rpc_key,
            clock=self._clock,
            books=books,
        )
        tracer = Tracer(clock=self._clock, sink=traces.add, process=self.name, rng=random.Random())
        loop = self._loop = DispatchLoop(
            Dispatcher(self._dispatch_config(), match=matcher),
            Membership(MembershipConfig(seeds=config.router.seeds)),
            links=links,
            watcher=feed,
            compatibility=compatibility,
            traces=traces,
            clock=self._clock,
            failpoints=self._failpoints,
            on_change=self._changed.set,
        )
        links.listen(loop)
        limits = pipeline_limits(config.router)
        pipeline = self._pipeline = RequestPipeline(
            model,
            loop,
            feed,
            limits=limits,
            tracer=tracer,
            traces=traces,
            books=books,
            clock=self._clock,
        )
        await life.enter(self._bus)
        await life.enter(links)
        server = await self._listen(life, pipeline, traces, limits)
        http = await self._listen_http(life, pipeline, books)
        loop.start()
        listener = BusListener(self._bus, subjects, loop, feed, books, router_id=config.router_id)
        listener.watch_connection()
        life.spawn(loop.run(), name="dispatch")
        life.spawn(feed.run(), name="prefix index")
        life.spawn(listener.listen(), name="announcements")
        life.spawn(listener.ask(), name="who")
        life.spawn(watch_loop_lag(books.loop_lag), name="loop lag")
        life.spawn(self._follow_readiness(server, loop), name="readiness")
        return {
            "grpc_address": server.address,
            "grpc_port": server.port,
            "http_url": http.url,
            "http_port": http.port,
        }

    async def announce_drain(self) -> None:
        assert self._server is not None
        self._is_draining = True
        await self._server.set_serving(False)

    async def drain(self) -> None:
        assert self._pipeline is not None
        self._pipeline.drain()
        await self._pipeline.wait_idle()

    async def abort(self) -> None:
        assert self._pipeline is not None
        assert self._server is not None
        assert self._http is not None
        self._pipeline.abort(
            UnavailableError("The server shut down while it answered.", code="shutting_down")
        )
        await self._pipeline.wait_idle()
        await self._http.stop(grace_s=_STOP_GRACE_S)
        await self._server.stop(grace_s=_STOP_GRACE_S)

    @property
    def metrics(self) -> Metrics:
        """After `start`."""
        assert self._books is not None, "start() has not returned"
        return self._books.metrics

    @property
    def index(self) -> PrefixIndex:
        """What workers are believed to hold. After `start`; to be read."""
        assert self._feed is not None, "start() has not returned"
        return self._feed.index

    # -- for doors --

    def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, with gauges as of now."""
        assert self._loop is not None
        assert self._books is not None
        assert self._feed is not None
        self._feed.set_gauges()
        num_workers = Counter(
            (member.role.value if member.role else "unknown", member.state.value)
            for member in self._loop.members()
        )
        self._books.fleet(
            FleetCounts(
                num_queued=self._loop.num_queued,
                num_running=self._loop.num_running,
                is_bus_connected=self._bus.is_connected,
                num_unsent=self._bus.num_unsent,
                num_dropped=self._bus.num_dropped,
                num_workers=dict(num_workers),
            )
        )
        return self._books.metrics.render()

    # -- parts --

    async def _listen(
        self, life: Life, pipeline: RequestPipeline, traces: TraceRing, limits: PipelineLimits
    ) -> RpcServer:
        assert self._loop is not None
        settings = self._config.router
        max_calls = limits.max_requests + _NUM_OTHER_CALLS
        server = self._server = RpcServer(
            host=settings.host,
            port=settings.grpc_port,
            key=self._keys,
            operator_services=(admin_door.SERVICE,),
            max_message_bytes=PUBLIC_MESSAGE_BYTES,
            max_calls=max_calls,
            max_calls_per_tenant=tenant_part(max_calls, settings.max_tenant_share),
        )
        server.add(
            inference_pb2_grpc.add_InferenceServicer_to_server,
            InferenceDoor(pipeline, keys=self._keys),
            inference_door.SERVICE,
        )
        server.add(
            admin_pb2_grpc.add_RouterAdminServicer_to_server,
            AdminDoor(
                self._snapshot,
                traces,
                placements=self._loop.placements,
                cache_stats=self._cache_stats,
                now=self._clock.now,
            ),
            admin_door.SERVICE,
        )
        await server.start()
        life.stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        return server

    async def _listen_http(
        self, life: Life, pipeline: RequestPipeline, books: RouterBooks
    ) -> HttpServer:
        settings = self._config.router
        door = HttpDoor(
            pipeline,
            settings=HttpSettings(
                keys=self._keys,
                is_strict=settings.is_strict,
                max_body_bytes=settings.max_body_bytes,
            ),
            not_ready_because=self._not_ready_because,
            render_metrics=self.render_metrics,
            on_refused=lambda error, endpoint: books.failed(
                error, endpoint=endpoint, is_rejected=True
            ),
        )
        http = self._http = HttpServer(door, host=settings.host, port=settings.http_port)
        await http.start()
        life.stack.push_async_callback(http.stop, grace_s=_STOP_GRACE_S)
        return http

    async def _follow_readiness(self, server: RpcServer, loop: DispatchLoop) -> None:
        """The health service says what `missing` says, at every change of the membership."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await server.set_serving(not self._is_draining and not loop.missing())

    async def _exporter(self, life: Life) -> Callable[[Span], None]:
        endpoint = self._config.common.telemetry.otlp_traces_endpoint
        if endpoint is None:
            return lambda _span: None
        export = OtlpExport(endpoint, version=__version__)
        life.stack.push_async_callback(asyncio.to_thread, export.close)
        return export

    def _dispatch_config(self) -> DispatchConfig:
        router = self._config.router
        return DispatchConfig(
            routing=routing_config(
                router.placement, local_prefill_tokens=self._config.common.local_prefill_tokens
            ),
            max_queued_requests=router.max_queued_requests,
            max_queued_per_tenant=tenant_part(router.max_queued_requests, router.max_tenant_share),
            num_kept_decisions=router.placement.num_kept_decisions,
        )

    def _not_ready_because(self) -> str:
        if self._loop is None:
            return "The router is starting."
        return "The router is draining." if self._is_draining else self._loop.missing()

    def _cache_stats(self) -> CacheStats:
        assert self._loop is not None
        assert self._model is not None
        assert self._feed is not None
        return cache_stats(
            self._feed.reuse,
            self._feed.index,
            self._loop,
            router_id=self._config.router_id,
            model=self._model.facts.name,
        )

    def _snapshot(self) -> RouterSnapshot:
        assert self._loop is not None
        assert self._model is not None
        loop = self._loop
        return RouterSnapshot(
            router_id=self._config.router_id,
            model=self._model.facts.name,
            not_ready_because=self._not_ready_because(),
            is_bus_connected=self._bus.is_connected,
            num_queued=loop.num_queued,
            num_running=loop.num_running,
            workers=tuple(
                WorkerSnapshot(
                    address=member.address,
                    state=member.state.value,
                    key=member.key,
                    role=member.role,
                    load=loop.load(member.key) if member.key is not None else None,
                    because=member.because,
                )
                for member in loop.members()
            ),
        )
