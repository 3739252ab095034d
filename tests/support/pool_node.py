"""PoolNode: a worker without an engine. What a store reads from, and what reads from a store.

Memory, digests, gRPC, shared memory and the machines of reads are a worker's; in the place of its core
stands this class, which holds the blocks that it is told to hold and asks for those it is told to get.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.clock import SystemClock
from moonpool.config.process import WorkerConfig
from moonpool.core.protocol import (
    BlockLedger,
    BlocksFetched,
    Command,
    CoreFrame,
    Drain,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    Reply,
    UnlockPrefix,
)
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.events import PeerNamed
from moonpool.handoff.messages import (
    HolderMessage,
    PeerPrefix,
    PrefixOpen,
    PrefixOpened,
    PrefixStaging,
    SourceRef,
)
from moonpool.ids import AttemptId, BlockHash, BlockId, RequestId
from moonpool.memory.fd_server import fetch_region
from moonpool.memory.region import ReadOnlyRegion
from moonpool.memory.worker_memory import POOL_NAME, WorkerMemory
from moonpool.native import LeafGeometry, kernels
from moonpool.rpc.channel import make_channel
from moonpool.rpc.metadata import Metadata, call_metadata
from moonpool.rpc.store import offer_blocks, store_stub
from moonpool.service.life import Life, ReadyFacts
from moonpool.telemetry.metrics import Metrics
from moonpool.transport.shm import ShmTransport
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.store import PutOffer
from moonpool.worker.books import WORKER_METRICS, WorkerBooks
from moonpool.worker.compatibility import handoff_fingerprint
from moonpool.worker.node import KvNode, NodeAdapters, NodeParts, TransportContext
from moonpool.worker.settings import pool_layout, worker_hello
from moonpool.worker.shell import WorkerShell
from support.leases import read_lease

#: For whatever a store is asked.
DEADLINE_S = 30.0

ByteArray = npt.NDArray[np.uint8]


class View:
    """Blocks of a store's arena, lent: readable until `close`."""

    def __init__(self, lease: AsyncGenerator[HolderMessage, None], blocks: ByteArray) -> None:
        self._lease = lease
        #: uint8[number of blocks in the arena, block_bytes], not writeable, and which of them.
        self.blocks = blocks
        self.block_ids: tuple[BlockId, ...] = ()

    async def close(self) -> None:
        await self._lease.aclose()


class PoolNode:
    """Implements service.life.Service. One operation at a time."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._node = KvNode(
            node_id=config.worker_id,
            common=config.common,
            settings=config.worker,
            adapters=NodeAdapters(
                bus=MemoryBus(MemoryBroker()), transports={"shm": _shm}, clock=SystemClock()
            ),
            books=WorkerBooks(Metrics(WORKER_METRICS)),
        )
        self._parts: NodeParts | None = None
        self._numbers = itertools.count(1)
        self._held: dict[BlockHash, BlockId] = {}
        self._unlocked = asyncio.Event()
        self._fetched: asyncio.Future[int] | None = None
        #: Any: generated code has no types.
        self._stub: Any = None
        self._arena: ReadOnlyRegion | None = None
        self._namespace = ""
        self._metadata: Metadata = ()

    # -- Service --

    @property
    def name(self) -> str:
        return self._config.worker_id

    async def start(self, life: Life) -> ReadyFacts:
        config, node = self._config, self._node
        secret, model = await node.load_model()
        layout = pool_layout(config, model)
        parts = await node.listen(life, layout=layout, secret=secret)
        hello = worker_hello(config, parts.key, model, layout, secret, parts.address)
        hello = await node.enter_transports(life, parts, hello)
        node.make_shell(
            parts,
            hello,
            handoff=HandoffConfig(num_layers=layout.num_layers, block_size=layout.block_size),
            fetch=FetchConfig(mode=FetchMode.ALWAYS, block_bytes=layout.block_bytes),
            send_command=self._on_command,
        )
        parts.memory.seal()
        await node.serve(life, parts)
        self._parts = parts
        self._namespace = handoff_fingerprint(hello.namespace, secret.value)
        self._metadata = call_metadata(key=secret.rpc_key)
        return parts.facts

    async def announce_drain(self) -> None:
        await self._node.announce_drain()

    async def drain(self) -> None:
        await self._node.drain()

    async def abort(self) -> None:
        await self._node.abort()

    # -- the pool --

    @property
    def parts(self) -> NodeParts:
        assert self._parts is not None, "start() has not returned"
        return self._parts

    @property
    def memory(self) -> WorkerMemory:
        return self.parts.memory

    @property
    def shell(self) -> WorkerShell:
        return self._node.shell

    def write_leaves(self, num_blocks: int) -> None:
        """Bring the digests of the first blocks up to date, as an engine does while it computes."""
        memory = self.memory
        blocks = np.arange(num_blocks, dtype=np.int32)
        for layer in range(memory.layout.num_layers):
            kernels().write_leaves(
                memory.pool.bytes,
                LeafGeometry.of_layout(memory.layout),
                blocks,
                layer,
                memory.leaf_digests,
            )

    # -- what is measured --

    async def put(
        self, store: SourceRef, hashes: tuple[BlockHash, ...], blocks: Sequence[BlockId]
    ) -> None:
        """Offer a chain that lies in these blocks; returns when the store has read all of it."""
        parts = self.parts
        if self._stub is None:
            self._stub = store_stub(make_channel(store.address))
        self._held = dict(zip(hashes, blocks, strict=True))
        self._unlocked.clear()
        answer = await offer_blocks(
            self._stub,
            PutOffer(
                store=store.key,
                tenant="default",
                hashes=hashes,
                source=SourceRef(key=parts.key, address=parts.address),
                deadline_s=DEADLINE_S,
            ),
            metadata=self._metadata,
            timeout_s=DEADLINE_S,
        )
        assert answer.num_wanted_blocks == len(hashes), answer
        async with asyncio.timeout(DEADLINE_S):
            await self._unlocked.wait()

    async def get(
        self, store: SourceRef, hashes: tuple[BlockHash, ...], blocks: Sequence[BlockId]
    ) -> None:
        """Read a chain into these blocks; returns when all of it lies there, verified."""
        block_size = self.memory.layout.block_size
        num_tokens = len(hashes) * block_size
        attempt_id = AttemptId(RequestId(f"get-{next(self._numbers)}"), 1)
        self._fetched = asyncio.get_running_loop().create_future()
        self.shell.handle(
            PeerNamed(
                attempt_id=attempt_id,
                peer=PeerPrefix(key=store.key, address=store.address, num_tokens=num_tokens),
            )
        )
        self._reply(
            FetchReserved(
                attempt_id=attempt_id,
                num_cached_tokens=0,
                num_tokens=num_tokens,
                block_ids=tuple(blocks),
                hashes=hashes,
            )
        )
        async with asyncio.timeout(DEADLINE_S):
            num_fetched = await self._fetched
        assert num_fetched == num_tokens, (num_fetched, num_tokens)

    async def map_arena(self, store: SourceRef) -> None:
        """Map a store's memory, once, for `view`."""
        region = (await self.shell.peers.get(store)).kv.region
        self._arena = await fetch_region(
            region.fd_socket, POOL_NAME, region.pool_bytes, timeout_s=DEADLINE_S
        )

    async def view(self, store: SourceRef, hashes: tuple[BlockHash, ...]) -> View:
        """Borrow a chain without a copy. The caller closes the view."""
        assert self._arena is not None, "map_arena comes first"
        secret = self.parts.secret
        attempt_id = AttemptId(RequestId(f"view-{next(self._numbers)}"), 1)
        peer = await self.shell.peers.get(store)
        opened = PrefixOpen(
            attempt_id=attempt_id,
            reader=self.parts.key,
            holder=store.key,
            namespace=self._namespace,
            secret_fingerprint=secret.fingerprint,
            hashes=hashes,
            first=0,
        )
        lease = read_lease(peer.prefixes, opened, self.shell.tasks)
        view = View(lease, self._arena.bytes.reshape(-1, self.memory.layout.block_bytes))
        async with asyncio.timeout(DEADLINE_S):
            message = await anext(lease)
            if isinstance(message, PrefixStaging):
                message = await anext(lease)
        assert isinstance(message, PrefixOpened), message
        assert len(message.block_ids) == len(hashes), message
        view.block_ids = message.block_ids
        return view

    # -- in the core's place --

    def _on_command(self, command: Command) -> None:
        match command:
            case LockPrefix():
                held = itertools.takewhile(self._held.__contains__, command.hashes)
                self._reply(
                    PrefixLocked(
                        read_id=command.read_id, block_ids=tuple(self._held[one] for one in held)
                    )
                )
            case UnlockPrefix():
                self._unlocked.set()
            case FetchEnded():
                assert self._fetched is not None
                self._fetched.set_result(command.num_tokens)
            case BlocksFetched() | Drain():
                pass
            case _:
                raise AssertionError(command)

    def _reply(self, reply: Reply) -> None:
        asyncio.get_running_loop().call_soon(self._tell, reply)

    def _tell(self, reply: Reply) -> None:
        num_blocks = self.memory.layout.num_blocks
        ledger = BlockLedger(
            num_total=num_blocks, num_free=num_blocks, num_cached=0, num_referenced=0
        )
        self.shell.on_frame(TimedFrame(frame=CoreFrame(step=0, replies=(reply,), ledger=ledger)))


def _shm(context: TransportContext) -> ShmTransport:
    return ShmTransport(pool=context.pool, host_id=context.host_id, kernels=context.kernels)
