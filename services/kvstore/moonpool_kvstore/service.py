"""StoreService: the life of a store node's process.

Life
  1. Secret and model are read (config, no weights); the arena is made and sealed; the gRPC server
     listens, its methods answer UNAVAILABLE, health NOT_SERVING.
  2. The SSD directory is opened and its segments are scanned: what lies there is found again, as chains. Without
     it the node starts with memory alone and says why, or does not start (`is_ssd_strict`).
  3. Peers may map the arena, workers may offer, routers may come: methods answer, health SERVING,
     announced on the bus each second, with the digest of all that lies here. Other nodes of the ring are
     told, and told of.
  4. Drain: announced as leaving; if there are other nodes, they are asked to take what was used last. Then
     offers are refused, readers find nothing any more; what is being read, lent or written ends.
  5. Abort: streams end, what the disk does ends, the log is closed, the memory is freed.

kill -9 at any moment loses what lies in memory only, and nothing that was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from moonpool.api.v1 import store_pb2_grpc
from moonpool.clock import Clock
from moonpool.config.process import KvStoreConfig
from moonpool.core.protocol import Command
from moonpool.errors import ConfigError
from moonpool.ids import BlockHash
from moonpool.kv.layout import KvLayout
from moonpool.native import Kernels, kernels
from moonpool.rpc.server import RpcServer
from moonpool.service.life import Life, ReadyFacts
from moonpool.service.ready import WARNING_FACT
from moonpool.store.base import BlockLog, DropReason, KeepHot, OnDropped
from moonpool.store.budget_keeper import BudgetKeeper, budget_left
from moonpool.store.directory import Directory
from moonpool.store.log_identity import LogIdentity
from moonpool.telemetry.metrics import Metrics
from moonpool.tiering.copies import CopyBook, CopyConfig
from moonpool.tiering.found_chains import FoundChains
from moonpool.tiering.store_core import StoreCore
from moonpool.wire.store import DiskReport, StoreReport
from moonpool.wire.worker import WorkerHello
from moonpool.worker.books import WorkerBooks
from moonpool.worker.node import KvNode, NodeAdapters
from moonpool.worker.shell import WorkerShell
from moonpool_kvstore.books import STORE_METRICS, StoreBooks
from moonpool_kvstore.neighbours import Neighbours
from moonpool_kvstore.rpc_service import SERVICE_NAME, StoreServicer
from moonpool_kvstore.settings import (
    arena_layout,
    core_config,
    fetch_config,
    handoff_config,
    log_identity,
    store_hello,
)
from moonpool_kvstore.store_engine import StoreEngine

log = structlog.get_logger("moonpool.store")


class OpenLog(Protocol):
    """Opens the log of a directory, which is made if only its last part is missing."""

    async def __call__(
        self,
        path: Path,
        *,
        identity: LogIdentity,
        capacity_bytes: int,
        kernels: Kernels,
        clock: Clock,
        on_dropped: OnDropped,
        keep_hot: KeepHot,
    ) -> BlockLog:
        """Raises ConfigError: The directory cannot be used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAdapters:
    """What a composition root chooses."""

    node: NodeAdapters
    open_log: OpenLog
    directory: Directory


class StoreService:
    """Implements service.life.Service; see the file's head."""

    def __init__(self, config: KvStoreConfig, adapters: StoreAdapters) -> None:
        """Raises ConfigError: Failpoints that are not allowed."""
        self._config = config
        self._open_log = adapters.open_log
        self._directory = adapters.directory
        self._clock: Clock = adapters.node.clock
        self._node = KvNode(
            node_id=config.store_id,
            common=config.common,
            settings=config.store,
            adapters=adapters.node,
            books=WorkerBooks(Metrics(STORE_METRICS), tier="host"),
            set_gauges=self._set_gauges,
        )
        self._books = StoreBooks(self.metrics)
        self._servicer = StoreServicer(self.report)
        self._engine: StoreEngine | None = None
        self._neighbours: Neighbours | None = None
        self._disk: BlockLog | None = None
        #: Why there is no disk although one was asked for.
        self._problem = ""

    @property
    def name(self) -> str:
        return self._config.store_id

    @property
    def shell(self) -> WorkerShell:
        """After `start`."""
        return self._node.shell

    @property
    def metrics(self) -> Metrics:
        return self._node.books.metrics

    @property
    def num_neighbours(self) -> int:
        """Other nodes of the ring that do not leave, as of the last word from the directory."""
        return self._neighbours.num_others if self._neighbours is not None else 0

    def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, with gauges as of now."""
        return self._node.render_metrics()

    def report(self) -> StoreReport:
        """What the tiers hold and have done, as of now. After `start`."""
        assert self._engine is not None, "start() has not returned"
        layout = self.shell.hello.regions[0].layout
        disk, problem = None, self._problem
        if self._disk is not None:
            stats = self._disk.stats()
            problem = self._disk.health().problem
            disk = DiskReport(
                capacity_bytes=stats.capacity_bytes,
                file_bytes=stats.file_bytes,
                written_bytes=stats.written_bytes,
                read_bytes=stats.read_bytes,
            )
        return StoreReport(
            store=self.shell.hello.worker,
            block_bytes=layout.block_bytes,
            num_total_blocks=layout.num_blocks,
            stats=self._engine.stats(),
            disk=disk,
            problem=problem,
        )

    # -- Service --

    async def start(self, life: Life) -> ReadyFacts:
        config, node = self._config, self._node
        secret, model = await node.load_model()
        layout = arena_layout(config, model)
        parts = await node.listen(
            life, layout=layout, secret=secret, add_services=self._add_services
        )
        hello = store_hello(config, parts.key, model, layout, secret, parts.address)
        hello = await node.enter_transports(life, parts, hello)
        engines: list[StoreEngine] = []

        def send_command(command: Command) -> None:
            engines[0].send(command)

        def stage(hashes: tuple[BlockHash, ...]) -> None:
            engines[0].stage(hashes)

        def on_dropped(hashes: Sequence[BlockHash], reason: DropReason) -> None:
            # What goes while the log is opened was never told to be there.
            for engine in engines:
                engine.on_disk_dropped(hashes, reason)

        def keep_hot(hashes: Sequence[BlockHash], max_blocks: int) -> Sequence[BlockHash]:
            return engines[0].keep_on_disk(hashes, max_blocks) if engines else ()

        shell = node.make_shell(
            parts,
            hello,
            handoff=handoff_config(layout),
            fetch=fetch_config(layout),
            send_command=send_command,
            stage=stage,
        )
        disk = await self._enter_disk(life, hello, layout, on_dropped=on_dropped, keep_hot=keep_hot)
        parts.memory.seal()
        engine = StoreEngine(
            core=StoreCore(
                core_config(
                    config,
                    layout,
                    record_bytes=disk.record_bytes if disk is not None else None,
                    budget_left=await budget_left(self._ssd_path, self._clock)
                    if disk is not None
                    else None,
                )
            ),
            memory=parts.memory,
            disk=disk,
            clock=self._clock,
            failpoints=node.failpoints,
            on_frame=shell.on_frame,
            on_event=shell.handle,
        )
        engines.append(engine)
        self._engine, self._disk = engine, disk
        book = CopyBook(
            parts.key.worker_id,
            CopyConfig(block_bytes=layout.block_bytes),
            tenant_of=engine.tenant_of,
            num_here=engine.num_here,
            is_on_disk=engine.is_on_disk,
        )
        if disk is not None:
            await _note_found(book, disk)
        life.spawn(engine.run(), name="store-engine")
        if disk is not None and config.store.ssd_write_bytes_per_day:
            self._keep_budget(life, engine, disk)
        await engine.wait_running()
        life.stack.callback(self._servicer.close)
        await node.serve(life, parts, open_services=lambda: self._servicer.open(parts.key, engine))
        neighbours = Neighbours(
            key=parts.key,
            address=parts.address,
            directory=await life.enter(self._directory),
            book=book,
            take=engine.take,
            clock=self._clock,
        )
        engine.watch(neighbours)
        life.spawn(neighbours.run(), name="neighbours")
        self._neighbours = neighbours
        return {
            **parts.facts,
            "memory": _size(layout.pool_bytes),
            "ssd": _size(config.store.ssd_bytes) if disk is not None else "off",
            **({WARNING_FACT: self._problem} if self._problem else {}),
        }

    async def announce_drain(self) -> None:
        await self._node.announce_drain()

    async def drain(self) -> None:
        await self._leave_ring()
        await self._node.drain()

    async def abort(self) -> None:
        self._servicer.close()
        await self._node.abort()

    # -- parts --

    async def _leave_ring(self) -> None:
        """Have the others take what lies here, and tell what they did not."""
        if self._neighbours is None:
            return
        timeout_s = self._config.store.drain_timeout_s / 2
        handed = await self._neighbours.leave(timeout_s=timeout_s)
        if handed is None:
            return
        num_left = max(self.shell.kv.head.count - len(handed), 0)
        self._books.ring_left(num_handed_blocks=len(handed), num_left_blocks=num_left)
        log.info("store.left_ring", num_handed_blocks=len(handed), num_left_blocks=num_left)

    def _set_gauges(self) -> None:
        if self._engine is not None:
            self._books.update(self.report())
            directory = self._directory
            self._books.directory(
                num_failed_calls=directory.num_failed_calls,
                num_bad_records=directory.num_bad_records,
            )

    def _add_services(self, server: RpcServer) -> None:
        server.add(store_pb2_grpc.add_StoreServicer_to_server, self._servicer, SERVICE_NAME)

    def _keep_budget(self, life: Life, engine: StoreEngine, disk: BlockLog) -> None:
        keeper = BudgetKeeper(
            self._ssd_path,
            left_bytes=lambda: engine.stats().write_budget_bytes or 0,
            written_bytes=lambda: disk.stats().written_bytes,
            clock=self._clock,
        )
        life.spawn(keeper.run(), name="write-budget")
        # After the last write, before the log gives up the directory.
        life.stack.push_async_callback(keeper.keep)

    @property
    def _ssd_path(self) -> Path:
        """This node's own; only where there is an SSD."""
        store = self._config.store
        assert store.ssd_dir is not None, store
        return store.ssd_dir / self._config.store_id

    async def _enter_disk(
        self,
        life: Life,
        hello: WorkerHello,
        layout: KvLayout,
        *,
        on_dropped: OnDropped,
        keep_hot: KeepHot,
    ) -> BlockLog | None:
        """The log of this node's own directory, scanned; None without one.

        Raises:
            ConfigError: It cannot be used, and the node must not start without.
        """
        store = self._config.store
        if store.ssd_dir is None:
            return None
        path = self._ssd_path
        try:
            disk = await self._open_log(
                path,
                identity=log_identity(hello, layout),
                capacity_bytes=store.ssd_bytes,
                kernels=kernels(),
                clock=self._clock,
                on_dropped=on_dropped,
                keep_hot=keep_hot,
            )
        except ConfigError as error:
            if store.is_ssd_strict:
                raise
            self._problem = error.message
            log.warning("store.ssd_off", why=error.message)
            return None
        life.stack.push_async_callback(disk.close)
        stats = disk.stats()
        log.info(
            "store.ssd_open",
            path=str(path),
            num_blocks=stats.num_records,
            file_bytes=stats.file_bytes,
            capacity_bytes=stats.capacity_bytes,
            num_torn=stats.num_torn_records,
            num_corrupt=stats.num_corrupt_footers,
        )
        return disk


async def _note_found(book: CopyBook, disk: BlockLog) -> None:
    """Have what the scan has found asked for too on the day on which this node leaves."""
    found = FoundChains()
    for part in disk.contents():
        for record in part:
            found.add(record.block_hash, record.link)
        await asyncio.sleep(0)
    # Of many blocks it is long, and nobody else has them.
    book.note_found(await asyncio.to_thread(found.chains, book.max_recent_blocks))


def _size(num_bytes: int) -> str:
    """For people: `1.5GiB`, `40MiB`."""
    gib, mib = num_bytes / 2**30, num_bytes / 2**20
    return f"{gib:.1f}GiB" if gib >= 1.0 else f"{mib:.0f}MiB"
