"""The same kernels in numpy and xxhash, for machines where the C library could not be built.

Correct and slower. Its control page relies on aligned 8-byte stores being single, which CPython's
platforms give, and on the processor not reordering stores, which only x86 gives; on others a reader
may see a layer too early and then finds a wrong digest, which costs a recompute and no token.
"""

from __future__ import annotations

import contextlib
import os
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
    DecodeAttention,
    LayerFinisher,
    PackedLinear,
    Progress,
    RowKernels,
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
        rows = tails.reshape(-1, 2)
        _check_blocks(geometry, rows[:, 0], layer)
        for index, slot in enumerate(rows[:, 1].tolist()):
            if not 0 <= slot <= geometry.block_size:
                raise RangeError("slot of tail", index)
        for block, slot in rows.tolist():
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

    def pack_linear(self, weight: WeightArray, bias: Float32Array | None) -> PackedLinear | None:
        return None

    def decode_attention(
        self, pool: ByteArray, geometry: LeafGeometry, *, group_size: int, is_bfloat16: bool
    ) -> DecodeAttention | None:
        return None

    def row_kernels(self) -> RowKernels | None:
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


class FallbackCopyQueue:
    """CopyQueue on a Python thread; it shares the interpreter lock with its caller."""

    def __init__(self, kernels: FallbackKernels) -> None:
        self._kernels = kernels
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
            self._kernels.copy_verify, route.source, route.target, spans, route.geometry, checks
        )

    def stream(
        self,
        target: ByteArray,
        geometry: LeafGeometry,
        spans: Int64Array,
        starts: Int64Array,
        checks: LeafCheckArray,
        done_at: Int64Array,
    ) -> CopyStream:
        return CopyStream(
            target=target,
            geometry=geometry,
            spans=spans,
            starts=starts,
            checks=checks,
            done_at=done_at,
            is_bad=np.zeros(len(checks), np.bool_),
            handle=None,
        )

    def feed(self, stream: CopyStream, begin: int, part: ByteArray) -> CopyTicket:
        return self._submit(self._scatter, stream, begin, part)

    def _scatter(self, stream: CopyStream, begin: int, part: ByteArray) -> BoolArray:
        end = begin + part.size
        ends = stream.starts + stream.spans[:, 2]
        rows = np.flatnonzero((ends > begin) & (stream.starts < end))
        spans = stream.spans[rows]
        skipped = np.maximum(begin - stream.starts[rows], 0)
        beyond = np.maximum(ends[rows] - end, 0)
        parts = np.empty_like(spans)
        parts[:, 0] = stream.starts[rows] + skipped - begin
        parts[:, 1] = spans[:, 1] + skipped
        parts[:, 2] = spans[:, 2] - skipped - beyond
        done = (stream.done_at <= end) & ((stream.done_at > begin) | (begin == 0))
        is_bad = self._kernels.copy_verify(
            part, stream.target, parts, stream.geometry, _last(stream.checks[done], len(parts))
        )
        stream.is_bad[done] = is_bad
        return _NOTHING_BAD

    def _submit(self, work: Callable[..., BoolArray], *arguments: object) -> CopyTicket:
        future = self._executor.submit(work, *arguments)
        ticket = FallbackTicket(future)
        self._pending.append(ticket)
        future.add_done_callback(self._ring)
        return ticket

    def _ring(self, _future: Future[BoolArray]) -> None:
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
        self._executor.shutdown(cancel_futures=True)
        os.close(self._eventfd)
        self._eventfd = -1
        tickets: list[CopyTicket] = list(self._pending)
        self._pending.clear()
        return tickets


_NOTHING_BAD = np.zeros(0, np.bool_)


def _last(checks: LeafCheckArray, num_spans: int) -> LeafCheckArray:
    """The checks, all due after the last of `num_spans`."""
    due = checks.copy()
    due["after_span"] = num_spans - 1
    return due


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


def _check_leaves(geometry: LeafGeometry, checks: LeafCheckArray) -> None:
    for index, check in enumerate(checks):
        if not 0 <= int(check["block"]) < geometry.num_blocks:
            raise RangeError("block of leaf", index)
        if not 0 <= int(check["layer"]) < geometry.num_layers:
            raise RangeError("layer of leaf", index)
