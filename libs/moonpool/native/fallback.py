"""The same kernels in numpy and xxhash, for machines where the C library could not be built.

Correct and slower. Its control page relies on aligned 8-byte stores being single, which CPython's
platforms give, and on the processor not reordering stores, which only x86 gives; on others a reader
may see a layer too early and then finds a wrong digest, which costs a recompute and no token.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import xxhash

from moonpool.kv.key_table import DictKeyTable, KeyTable
from moonpool.native.geometry import (
    BoolArray,
    ByteArray,
    DigestArray,
    Float32Array,
    Int32Array,
    Int64Array,
    LeafCheckArray,
    LeafGeometry,
    RangeError,
    WeightArray,
)
from moonpool.native.kernels import (
    ControlPage,
    CopyCancelledError,
    CopyQueue,
    CopyRoute,
    CopyStream,
    CopyTicket,
    Gathering,
    LayerFinisher,
    PackedLinear,
    PagedAttention,
    Progress,
    RowKernels,
    SampleKernel,
    StreamRead,
)


class FallbackKernels:
    """Kernels without C."""

    def digest(self, data: ByteArray) -> int:
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).data)

    def write_leaves(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        block_ids: Int32Array,
        layer: int,
        leaves: DigestArray,
    ) -> None:
        _check_blocks(geometry, block_ids, layer)
        for block in block_ids.tolist():
            leaves[block, layer] = _leaf_digest(pool, geometry, block, layer)

    def zero_tails(
        self, pool: ByteArray, geometry: LeafGeometry, tails: Int32Array, layer: int
    ) -> None:
        _check_tails(geometry, tails, layer)
        for block, slot in tails.tolist():
            for plane in _planes(pool, geometry, block, layer):
                by_token = plane.reshape(-1, geometry.block_size, geometry.token_bytes)
                by_token[:, slot:] = 0

    def verify_leaves(
        self, pool: ByteArray, geometry: LeafGeometry, checks: LeafCheckArray
    ) -> BoolArray:
        _check_leaves(geometry, checks)
        return np.fromiter(
            (
                _leaf_digest(pool, geometry, int(check["block"]), int(check["layer"]))
                != int(check["expected"])
                for check in checks
            ),
            np.bool_,
            len(checks),
        )

    def copy_verify(
        self,
        source: ByteArray,
        target: ByteArray,
        spans: Int64Array,
        geometry: LeafGeometry,
        checks: LeafCheckArray,
    ) -> BoolArray:
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        for index, (from_, to, length) in enumerate(spans.tolist()):
            if min(from_, to, length) < 0 or from_ + length > source.size:
                raise RangeError("span", index)
            if to + length > target.size:
                raise RangeError("span", index)
        _check_leaves(geometry, checks)
        after = checks["after_span"]
        if len(spans) and len(checks) and (after[-1] >= len(spans) or np.any(np.diff(after) < 0)):
            raise ValueError("leaves are not in order of after_span")
        for from_, to, length in spans.tolist():
            target[to : to + length] = source[from_ : from_ + length]
        return self.verify_leaves(target, geometry, checks)

    @property
    def has_bfloat16_products(self) -> bool:
        return False

    def pack_linear(
        self,
        weight: WeightArray,
        bias: Float32Array | None,
        scale: Float32Array | None = None,
        *,
        is_rounding: bool = False,
    ) -> PackedLinear | None:
        return None

    def paged_attention(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        *,
        group_size: int,
        is_bfloat16: bool,
        is_rounding: bool = False,
    ) -> PagedAttention | None:
        return None

    def gather(self, pool: ByteArray, spans: Int64Array) -> Gathering:
        return FallbackGathering(pool, spans)

    def row_kernels(self) -> RowKernels | None:
        return None

    def sample_kernel(self) -> SampleKernel | None:
        return None

    def copy_queue(self) -> CopyQueue:
        return FallbackCopyQueue(self)

    def key_table(self) -> KeyTable:
        return DictKeyTable()

    def control_page(self, page: ByteArray) -> ControlPage:
        return FallbackControlPage(page)

    def layer_finisher(
        self,
        *,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> LayerFinisher:
        return FallbackLayerFinisher(self, pool, geometry, leaves, page, eventfd)


class FallbackGathering:
    """Gathering by joining views."""

    def __init__(self, pool: ByteArray, spans: Int64Array) -> None:
        self._pool = pool
        self._spans = deque(spans.tolist())
        for index, (offset, length) in enumerate(self._spans):
            if offset < 0 or length < 1 or offset + length > pool.size:
                raise RangeError("span", index)
        self.num_left = int(spans[:, 1].sum())

    def take(self, num_bytes: int) -> bytes:
        self.num_left -= num_bytes
        pieces: list[memoryview] = []
        while num_bytes:
            offset, length = self._spans.popleft()
            count = min(length, num_bytes)
            pieces.append(self._pool[offset : offset + count].data)
            num_bytes -= count
            if count < length:
                self._spans.appendleft([offset + count, length - count])
        return b"".join(pieces)


class FallbackControlPage:
    """ControlPage by plain 8-byte stores."""

    def __init__(self, page: ByteArray) -> None:
        self._words = page[:16].view(np.uint64)

    def begin_step(self, step: int, now_ns: int) -> None:
        self._words[1] = now_ns
        self._words[0] = step << 16

    def publish(self, step: int, layers_done: int) -> None:
        self._words[0] = step << 16 | layers_done

    def end_step(self) -> None:
        self._words[1] = 0

    def progress(self) -> Progress:
        word = int(self._words[0])
        return Progress(step=word >> 16, layers_done=word & 0xFFFF)

    def started_ns(self) -> int:
        return int(self._words[1])


class FallbackLayerFinisher:
    """LayerFinisher in four calls."""

    def __init__(
        self,
        kernels: FallbackKernels,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> None:
        self._kernels = kernels
        self._pool, self._geometry, self._leaves = pool, geometry, leaves
        self._page = FallbackControlPage(page)
        self._eventfd = eventfd

    def finish_layer(
        self, *, step: int, layer: int, block_ids: Int32Array, zero_tails: Int32Array
    ) -> None:
        _check_tails(self._geometry, zero_tails, layer)
        _check_blocks(self._geometry, block_ids, layer)
        self._kernels.zero_tails(self._pool, self._geometry, zero_tails, layer)
        self._kernels.write_leaves(self._pool, self._geometry, block_ids, layer, self._leaves)
        self._page.publish(step, layer + 1)
        if self._eventfd >= 0:
            os.eventfd_write(self._eventfd, 1)


class FallbackTicket:
    """CopyTicket over a future."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[BoolArray]) -> None:
        self._future = future

    def cancel(self) -> bool:
        return self._future.cancel()

    @property
    def is_finished(self) -> bool:
        return self._future.done()

    def result(self) -> BoolArray | None:
        try:
            is_bad = self._future.result(timeout=0)
            return is_bad if is_bad.any() else None
        except CancelledError:
            raise CopyCancelledError from None


class FallbackRead:
    """StreamRead; its cursor is the copy thread's."""

    def __init__(
        self,
        kernels: FallbackKernels,
        spans: Int64Array,
        checks: LeafCheckArray,
        done_at: Int64Array,
    ) -> None:
        self._kernels = kernels
        self._spans = spans
        self._ends = np.cumsum(spans[:, 2])
        self._starts = self._ends - spans[:, 2]
        self._checks = checks
        self._done_at = done_at
        self._is_bad = np.zeros(len(checks), np.bool_)
        self._at = 0
        self._lock = threading.Lock()
        self._is_writing = False
        self._is_abandoned = False

    @property
    def num_bytes(self) -> int:
        return int(self._spans[:, 2].sum())

    @property
    def num_missing(self) -> int:
        """Bytes that were neither written nor thrown away."""
        return self.num_bytes - self._at

    def abandon(self) -> bool:
        with self._lock:
            self._is_abandoned = True
            return not self._is_writing

    def bad_checks(self) -> Int64Array | None:
        return np.flatnonzero(self._is_bad) if self._is_bad.any() else None

    def take(self, part: ByteArray, target: ByteArray, geometry: LeafGeometry) -> None:
        """The next bytes, by the copy thread."""
        with self._lock:
            self._is_writing = not self._is_abandoned
        if self._is_writing:
            self._scatter(part, target, geometry)
        self._at += part.size
        with self._lock:
            self._is_writing = False

    def _scatter(self, part: ByteArray, target: ByteArray, geometry: LeafGeometry) -> None:
        begin, end = self._at, self._at + part.size
        rows = np.flatnonzero((self._ends > begin) & (self._starts < end))
        skipped = np.maximum(begin - self._starts[rows], 0)
        parts = np.empty((len(rows), 3), np.int64)
        parts[:, 0] = self._starts[rows] + skipped - begin
        parts[:, 1] = self._spans[rows, 1] + skipped
        parts[:, 2] = np.minimum(self._ends[rows], end) - begin - parts[:, 0]
        done = (self._done_at <= end) & ((self._done_at > begin) | (begin == 0))
        due = self._checks[done]
        due["after_span"] = len(parts) - 1
        self._is_bad[done] = self._kernels.copy_verify(part, target, parts, geometry, due)


class FallbackStream:
    """CopyStream on the thread of a FallbackCopyQueue."""

    def __init__(self, queue: FallbackCopyQueue, target: ByteArray, geometry: LeafGeometry) -> None:
        self._queue = queue
        self._target, self._geometry = target, geometry
        self._expected: deque[FallbackRead] = deque()
        self._num_done = 0
        self._num_consumed = 0

    def plan(self, spans: Int64Array, checks: LeafCheckArray) -> StreamRead:
        for index, (_, to, length) in enumerate(spans.tolist()):
            if to < 0 or length < 0 or to + length > self._target.size:
                raise RangeError("span", index)
        _check_leaves(self._geometry, checks)
        done_at = np.zeros(len(checks), np.int64)
        due = np.flatnonzero(checks["after_span"] >= 0)
        after = checks["after_span"][due]
        leaf_ends = self._geometry.leaf_ends(checks["block"][due], checks["layer"][due])
        lengths = spans[after, 2]
        starts = np.cumsum(spans[:, 2])[after] - lengths
        done_at[due] = starts + np.clip(leaf_ends - spans[after, 1], 0, lengths)
        return FallbackRead(self._queue.kernels, spans, checks, done_at)

    def expect(self, read: StreamRead) -> None:
        assert isinstance(read, FallbackRead)
        self._expected.append(read)

    def feed(self, message: bytes) -> None:
        self._queue.feed(self, message)

    def num_done(self) -> int:
        return self._num_done

    def ring_at(self, num_bytes: int) -> int:
        return self._num_consumed

    def distribute(self, message: bytes) -> None:
        """Give each expected read its part, by the copy thread."""
        rest = np.frombuffer(message, np.uint8)
        while len(rest):
            read = self._expected[0]
            part, rest = rest[: read.num_missing], rest[read.num_missing :]
            read.take(part, self._target, self._geometry)
            if not read.num_missing:
                self._expected.popleft()
                self._num_done += 1
        self._num_consumed += len(message)


class FallbackCopyQueue:
    """CopyQueue on a Python thread; it shares the interpreter lock with its caller."""

    def __init__(self, kernels: FallbackKernels) -> None:
        self.kernels = kernels
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pending: deque[FallbackTicket] = deque()

    def fileno(self) -> int:
        return self._eventfd

    def route(self, source: ByteArray, target: ByteArray, geometry: LeafGeometry) -> CopyRoute:
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        return CopyRoute(
            source=source,
            target=target,
            geometry=geometry,
            source_address=0,
            target_address=0,
            geometry_address=0,
        )

    def submit(self, route: CopyRoute, spans: Int64Array, checks: LeafCheckArray) -> CopyTicket:
        return self._submit(
            self.kernels.copy_verify, route.source, route.target, spans, route.geometry, checks
        )

    def stream(self, target: ByteArray, geometry: LeafGeometry) -> CopyStream:
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        return FallbackStream(self, target, geometry)

    def feed(self, stream: FallbackStream, message: bytes) -> None:
        """Every message rings when it was distributed."""
        self._executor.submit(stream.distribute, message).add_done_callback(self._ring)

    def _submit(self, work: Callable[..., BoolArray], *arguments: object) -> CopyTicket:
        future = self._executor.submit(work, *arguments)
        ticket = FallbackTicket(future)
        self._pending.append(ticket)
        future.add_done_callback(self._ring)
        return ticket

    def _ring(self, _future: Future[BoolArray] | Future[None]) -> None:
        os.eventfd_write(self._eventfd, 1)

    def finished(self) -> list[CopyTicket]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        tickets: list[CopyTicket] = []
        while self._pending and self._pending[0].is_finished:
            tickets.append(self._pending.popleft())
        return tickets

    def close(self) -> list[CopyTicket]:
        if self._eventfd < 0:
            return []
        # The last first, since the thread goes on with the first: so no job runs behind one that was dropped.
        for ticket in reversed(self._pending):
            ticket.cancel()
        self._executor.shutdown(cancel_futures=True)
        os.close(self._eventfd)
        self._eventfd = -1
        tickets: list[CopyTicket] = list(self._pending)
        self._pending.clear()
        return tickets


def _planes(pool: ByteArray, geometry: LeafGeometry, block: int, layer: int) -> list[ByteArray]:
    first = geometry.first_byte + block * geometry.block_stride + layer * geometry.layer_stride
    starts = range(
        first, first + geometry.num_planes * geometry.plane_stride, geometry.plane_stride
    )
    return [pool[start : start + geometry.plane_bytes] for start in starts]


def _leaf_digest(pool: ByteArray, geometry: LeafGeometry, block: int, layer: int) -> int:
    state = xxhash.xxh3_64()
    for plane in _planes(pool, geometry, block, layer):
        state.update(plane.data)
    return state.intdigest()


def _check_blocks(geometry: LeafGeometry, block_ids: Int32Array, layer: int) -> None:
    if not 0 <= layer < geometry.num_layers:
        raise RangeError("layer of leaf", 0)
    for index, block in enumerate(block_ids.tolist()):
        if not 0 <= block < geometry.num_blocks:
            raise RangeError("block of leaf", index)


def _check_tails(geometry: LeafGeometry, tails: Int32Array, layer: int) -> None:
    if tails.shape[1:] != (2,):
        raise ValueError(f"need the shape ['n', 2], got {list(tails.shape)}")
    _check_blocks(geometry, tails[:, 0], layer)
    for index, slot in enumerate(tails[:, 1].tolist()):
        if not 0 <= slot <= geometry.block_size:
            raise RangeError("slot of tail", index)


def _check_leaves(geometry: LeafGeometry, checks: LeafCheckArray) -> None:
    for index, check in enumerate(checks):
        if not 0 <= int(check["block"]) < geometry.num_blocks:
            raise RangeError("block of leaf", index)
        if not 0 <= int(check["layer"]) < geometry.num_layers:
            raise RangeError("layer of leaf", index)
