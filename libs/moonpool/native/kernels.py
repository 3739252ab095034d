"""Kernels: what the native library does, as one interface with a compiled and a Python form.

All arrays are C-contiguous. A pool is uint8[region_bytes]; digests are uint64[num_blocks, num_layers].
Every call checks bounds before it writes and raises RangeError having written nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moonpool.kv.key_table import KeyTable
from moonpool.native.geometry import (
    BoolArray,
    ByteArray,
    DigestArray,
    DrawArray,
    Float32Array,
    Int32Array,
    Int64Array,
    LeafCheckArray,
    LeafGeometry,
    WeightArray,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a worker's running step is: layers [0, layers_done) of `step` may be read."""

    step: int
    layers_done: int


class ControlPage(Protocol):
    """One page that the engine writes and its service reads. `step` < 2^48, layers < 2^16."""

    def begin_step(self, step: int, now_ns: int) -> None:
        """No layer of `step` is done; it began at CLOCK_MONOTONIC `now_ns`."""
        ...

    def publish(self, step: int, layers_done: int) -> None:
        """All bytes written so far for layers [0, layers_done) may be read by whoever sees this."""
        ...

    def end_step(self) -> None:
        """No step runs; progress keeps its last value."""
        ...

    def progress(self) -> Progress:
        """The last published value; step 0 before the first step.

        What was read from the pool or the leaves before this call was not written by a later step.
        """
        ...

    def started_ns(self) -> int:
        """CLOCK_MONOTONIC at which the running step began, 0 while none runs."""
        ...


class LayerFinisher(Protocol):
    """What the engine does after each layer, bound once to its pool."""

    def finish_layer(
        self, *, step: int, layer: int, block_ids: Int32Array, zero_tails: Int32Array
    ) -> None:
        """Zero tails, write the leaves of `block_ids`, publish (step, layer + 1), ring.

        Args:
            block_ids: int32[n].
            zero_tails: int32[m, 2] of (block, first unused slot).
        """
        ...


class CopyCancelledError(Exception):
    """The job was cancelled before it ran, or its queue was closed; it wrote nothing."""


class CopyTicket(Protocol):
    """One job of a CopyQueue. Keeps its arrays alive."""

    def cancel(self) -> bool:
        """True if the job will never write a byte. It is told as finished all the same."""
        ...

    def result(self) -> BoolArray | None:
        """bool[number of checks], True where the copy is bad; None if none is.

        Only after it was told as finished.

        Raises:
            RangeError: Nothing was written.
            CopyCancelledError: It was cancelled.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyRoute:
    """Two memories between which jobs copy; keeps both alive. Made by CopyQueue.route."""

    source: ByteArray
    target: ByteArray
    geometry: LeafGeometry
    source_address: int
    target_address: int
    geometry_address: int


class StreamRead(Protocol):
    """One read whose bytes come as part of a CopyStream. Keeps its arrays alive."""

    @property
    def num_bytes(self) -> int: ...

    def abandon(self) -> bool:
        """Throw away what has not been written yet; may be called again.

        Returns:
            True if no byte of it will be written any more. False if one is being written now: ask
            again when the queue's descriptor is ready.
        """
        ...

    def bad_checks(self) -> Int64Array | None:
        """Ascending positions of the checks that do not match; None if all do. Only when it is done."""
        ...


class CopyStream(Protocol):
    """The bytes of many reads, one read's after another's, that come in messages of any size.

    The queue becomes ready when a read is done, and when `ring_at` says.
    """

    def plan(self, spans: Int64Array, checks: LeafCheckArray) -> StreamRead:
        """Prepare a read of at least one byte.

        Args:
            spans: int64[n, 3]; the source offsets are not used.
            checks: Each is checked when the byte has come that completes it.

        Raises:
            RangeError: A target or a leaf is out of bounds.
        """
        ...

    def expect(self, read: StreamRead) -> None:
        """It is the next whose bytes will come, whether it is abandoned or not. Once for each read."""
        ...

    def feed(self, message: bytes) -> None:
        """Queue the next bytes; never more than the reads expected lack."""
        ...

    def num_done(self) -> int:
        """How many of the reads expected are done: all bytes have come and are consumed."""
        ...

    def ring_at(self, num_bytes: int) -> int:
        """Let the queue become ready once so many bytes were written or thrown away, in all.

        Returns:
            How many were until now; if that is enough, it need not become ready.
        """
        ...


class Gathering(Protocol):
    """The bytes of a pool's spans, taken in order. Keeps its arrays alive."""

    @property
    def num_left(self) -> int: ...

    def take(self, num_bytes: int) -> bytes:
        """The next `num_bytes`, which is at most `num_left`."""
        ...


class CopyQueue(Protocol):
    """Verified copies in a thread of their own, in order of submission. One caller.

    Read `fileno()` (an eventfd) for readiness, then call `finished()`.
    """

    def fileno(self) -> int: ...

    def route(self, source: ByteArray, target: ByteArray, geometry: LeafGeometry) -> CopyRoute:
        """Where jobs copy from and to, looked up once. `geometry` is the target's."""
        ...

    def submit(self, route: CopyRoute, spans: Int64Array, checks: LeafCheckArray) -> CopyTicket:
        """Queue what Kernels.copy_verify does."""
        ...

    def stream(self, target: ByteArray, geometry: LeafGeometry) -> CopyStream:
        """A stream into `target`, fed in order with other jobs."""
        ...

    def finished(self) -> list[CopyTicket]:
        """Jobs submitted that finished since the last call, in order. Clears the eventfd."""
        ...

    def close(self) -> list[CopyTicket]:
        """Cancel what is queued, wait for what runs; returns all submitted that was not told yet."""
        ...


class PackedLinear(Protocol):
    """y = x W^T + b for rows of float32. A row's result is the same bits in any batch.

    Arithmetic is in float32; where rows are rounded to bfloat16 first, products are of bfloat16.
    """

    num_in: int
    num_out: int
    #: Of the packed weight.
    size_bytes: int

    def multiply(self, x: int, num_rows: int, y: int, largest: int = 0) -> None:
        """Addresses are not checked: a check would cost as much as the call.

        Args:
            x: Address of contiguous float32[num_rows, num_in].
            y: Of contiguous float32[num_rows, num_out].
            largest: Unless it is 0, of contiguous float32[num_rows, ceil(num_out / LINEAR_PANEL)]: the
                largest output of each panel, NaN if one of them is not finite.
        """
        ...


class PagedAttention(Protocol):
    """Causal attention over a paged pool, bound to that pool.

    A query's result depends on itself and on what it sees only: its bits are the same alone, in a chunk,
    and in any batch.
    """

    def plan(
        self,
        qo_indptr: Int32Array,
        indptr: Int32Array,
        indices: Int32Array,
        lengths: Int64Array,
        *,
        num_decode_rows: int,
    ) -> None:
        """The rows of the next runs; keeps the arrays until the next plan.

        Args:
            qo_indptr: int32[rows + 1]: row r's queries are [qo_indptr[r], qo_indptr[r + 1]).
            indptr: int32[rows + 1]: its blocks are indices[indptr[r] : indptr[r + 1]].
            lengths: int64[rows]: tokens that the last query of each row sees, itself included.
            num_decode_rows: How many rows, the first ones, have one query.
        """
        ...

    def run(
        self, layer: int, query: int, query_stride: int, out: int, *, is_last_only: bool = False
    ) -> None:
        """out[query] = attention of query[query]; with `is_last_only` of the last query of each row.

        Args:
            query: Address of float32[queries, heads, head_dim], the queries `query_stride` elements apart.
            out: Address of contiguous float32[queries, heads * head_dim]; neither is checked.

        Raises:
            RangeError: A layer, row or block is out of bounds; nothing was written for rows of one
                query, or nothing for the others.
        """
        ...


class RowKernels(Protocol):
    """What stands between the products of a layer, in one pass over each row.

    Addresses are of contiguous float32, and not checked. A row's result does not depend on the others.
    """

    def rms_norm(self, x: int, weight: int, eps: float, num_rows: int, size: int, y: int) -> None:
        """y[rows, size] = x / sqrt(mean(x^2) + eps) * weight[size]."""
        ...

    def silu_mul(self, x: int, num_rows: int, size: int, y: int) -> None:
        """y[rows, size] = silu(x[:, :size]) * x[:, size:] for x[rows, 2 * size]."""
        ...


class SampleKernel(Protocol):
    """From logits to tokens, as engine/sampler.py says. A row's token does not depend on the others."""

    def sample(self, logits: int, size: int, draws: DrawArray, largest: int = 0) -> Int64Array:
        """int64[rows]: one token for each row; -1 for a row that is not finite.

        Args:
            logits: Address of contiguous float32[rows, size]; not checked.
            draws: How each row is drawn from.
            largest: 0, or what the product that made the logits says of its panels: the logits are then
                read in few places only.
        """
        ...


class Kernels(Protocol):
    """Calls release the interpreter lock in the compiled form."""

    def digest(self, data: ByteArray) -> int:
        """XXH3-64 of one run of bytes."""
        ...

    def write_leaves(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        block_ids: Int32Array,
        layer: int,
        leaves: DigestArray,
    ) -> None:
        """leaves[block, layer] = the block's digest, for each of `block_ids`."""
        ...

    def zero_tails(
        self, pool: ByteArray, geometry: LeafGeometry, tails: Int32Array, layer: int
    ) -> None:
        """Zero slots [first unused, block_size) of one layer; `tails` is int32[m, 2]."""
        ...

    def verify_leaves(
        self, pool: ByteArray, geometry: LeafGeometry, checks: LeafCheckArray
    ) -> BoolArray:
        """bool[n]: True where the pool's digest differs from `expected`."""
        ...

    def copy_verify(
        self,
        source: ByteArray,
        target: ByteArray,
        spans: Int64Array,
        geometry: LeafGeometry,
        checks: LeafCheckArray,
    ) -> BoolArray:
        """Copy spans and check each leaf as soon as its last byte is there.

        Args:
            spans: int64[n, 3] of (source offset, target offset, length), none overlapping in target.
            geometry: Of the target.
            checks: In order of `after_span`.

        Returns:
            bool[len(checks)]: True where the copy's digest differs from `expected`.
        """
        ...

    @property
    def has_bfloat16_products(self) -> bool:
        """True if `pack_linear` and `paged_attention` can round: the C library on a CPU with AVX512-BF16."""
        ...

    def pack_linear(
        self,
        weight: WeightArray,
        bias: Float32Array | None,
        scale: Float32Array | None = None,
        *,
        is_rounding: bool = False,
    ) -> PackedLinear | None:
        """A copy of `weight` [out, in]; None without the C library: torch's product is faster then.

        Args:
            bias: float32[out].
            scale: float32[out], what each output of a weight of int8 is multiplied by.
            is_rounding: Rows are rounded to bfloat16, as the weight is, and multiplied as such, added in
                float32; only with `has_bfloat16_products`.

        Raises:
            ValueError: One of them is of another type or shape.
        """
        ...

    def paged_attention(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        *,
        group_size: int,
        is_bfloat16: bool,
        is_rounding: bool = False,
    ) -> PagedAttention | None:
        """`group_size` query heads share a KV head; the planes hold K, then V.

        Args:
            is_bfloat16: What the pool holds; else float32.
            is_rounding: Queries, and the weights of values, are rounded to bfloat16 and multiplied as such,
                added in float32. Else all arithmetic is float32.

        None without the C library, and for heads that are not whole vectors of 16. With `is_rounding` None
        for a pool of float32 as well, and without `has_bfloat16_products`.
        """
        ...

    def gather(self, pool: ByteArray, spans: Int64Array) -> Gathering:
        """Read a pool's spans.

        Args:
            spans: int64[n, 2] of (offset, length), n at least 1.

        Raises:
            RangeError: One is out of bounds, or empty.
        """
        ...

    def row_kernels(self) -> RowKernels | None:
        """None without the C library."""
        ...

    def sample_kernel(self) -> SampleKernel | None:
        """None without the C library."""
        ...

    def copy_queue(self) -> CopyQueue:
        """A new thread for copies; the caller closes it."""
        ...

    def key_table(self) -> KeyTable:
        """An empty one, for one thread."""
        ...

    def control_page(self, page: ByteArray) -> ControlPage:
        """Access to a shared page of at least 16 bytes, zero when new, 8-byte aligned."""
        ...

    def layer_finisher(
        self,
        *,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> LayerFinisher:
        """Bind the engine's memory once; `eventfd` may be -1."""
        ...
