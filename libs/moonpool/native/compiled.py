"""The compiled kernels: thin calls into the C library."""

from __future__ import annotations

import ctypes

import numpy as np

from moonpool.kv.key_table import KeyTable
from moonpool.native.binding import (
    GatheringStruct,
    NativeLibrary,
    ResultStruct,
    address_of,
    geometry_struct,
    new_bytes,
    page_address,
    raise_for,
)
from moonpool.native.compiled_attention import CompiledAttention
from moonpool.native.compiled_linear import CompiledLinear
from moonpool.native.compiled_queue import CompiledCopyQueue
from moonpool.native.compiled_sample import CompiledSampleKernel
from moonpool.native.compiled_table import CompiledKeyTable
from moonpool.native.geometry import (
    LEAF_CHECK_DTYPE,
    BoolArray,
    ByteArray,
    DigestArray,
    Float32Array,
    Int32Array,
    Int64Array,
    LeafCheckArray,
    LeafGeometry,
    WeightArray,
)
from moonpool.native.kernels import (
    ControlPage,
    CopyQueue,
    Gathering,
    LayerFinisher,
    PackedLinear,
    PagedAttention,
    Progress,
    RowKernels,
    SampleKernel,
)
from moonpool.native.weight_memory import WeightMemory


class CompiledKernels:
    """Kernels in C."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._weights = WeightMemory()

    @property
    def isa(self) -> str:
        """Which variant of its kernels the library chose: baseline, avx2, avx512, avx512_bf16."""
        name: bytes = self._library.brief.mp_isa()
        return name.decode()

    def digest(self, data: ByteArray) -> int:
        value: int = self._library.working.mp_digest(address_of(data, np.uint8), data.size)
        return value

    def write_leaves(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        block_ids: Int32Array,
        layer: int,
        leaves: DigestArray,
    ) -> None:
        _check_sizes(pool, geometry, leaves)
        result = ResultStruct()
        self._library.working.mp_write_leaves(
            address_of(pool, np.uint8),
            ctypes.byref(geometry_struct(geometry)),
            address_of(block_ids, np.int32),
            len(block_ids),
            layer,
            address_of(leaves, np.uint64, (geometry.num_layers,), is_written=True),
            ctypes.byref(result),
        )
        raise_for(result.status, result.index)

    def zero_tails(
        self, pool: ByteArray, geometry: LeafGeometry, tails: Int32Array, layer: int
    ) -> None:
        _check_sizes(pool, geometry)
        result = ResultStruct()
        self._library.working.mp_zero_tails(
            address_of(pool, np.uint8, is_written=True),
            ctypes.byref(geometry_struct(geometry)),
            address_of(tails, np.int32, (2,)),
            len(tails),
            layer,
            ctypes.byref(result),
        )
        raise_for(result.status, result.index)

    def verify_leaves(
        self, pool: ByteArray, geometry: LeafGeometry, checks: LeafCheckArray
    ) -> BoolArray:
        _check_sizes(pool, geometry)
        is_bad = np.zeros(len(checks), np.bool_)
        result = ResultStruct()
        self._library.working.mp_verify_leaves(
            address_of(pool, np.uint8),
            ctypes.byref(geometry_struct(geometry)),
            address_of(checks, LEAF_CHECK_DTYPE),
            len(checks),
            is_bad.ctypes.data,
            ctypes.byref(result),
        )
        raise_for(result.status, result.index)
        return is_bad

    def copy_verify(
        self,
        source: ByteArray,
        target: ByteArray,
        spans: Int64Array,
        geometry: LeafGeometry,
        checks: LeafCheckArray,
    ) -> BoolArray:
        is_bad = np.zeros(len(checks), np.bool_)
        result = ResultStruct()
        self._library.working.mp_copy_verify(
            address_of(source, np.uint8),
            source.size,
            address_of(target, np.uint8, is_written=True),
            target.size,
            address_of(spans, np.int64, (3,)),
            len(spans),
            ctypes.byref(geometry_struct(geometry)),
            address_of(checks, LEAF_CHECK_DTYPE),
            len(checks),
            is_bad.ctypes.data,
            ctypes.byref(result),
        )
        raise_for(result.status, result.index)
        return is_bad

    @property
    def has_bfloat16_products(self) -> bool:
        return bool(self._library.brief.mp_has_bfloat16_products())

    def pack_linear(
        self,
        weight: WeightArray,
        bias: Float32Array | None,
        scale: Float32Array | None = None,
        *,
        is_rounding: bool = False,
    ) -> PackedLinear | None:
        return CompiledLinear(
            self._library,
            weight,
            bias,
            scale=scale,
            is_rounding=is_rounding,
            allocate=self._weights.allocate,
        )

    def paged_attention(
        self,
        pool: ByteArray,
        geometry: LeafGeometry,
        *,
        group_size: int,
        is_bfloat16: bool,
        is_rounding: bool = False,
    ) -> PagedAttention | None:
        if geometry.token_bytes % (32 if is_bfloat16 else 64):
            return None
        if is_rounding and not (is_bfloat16 and self.has_bfloat16_products):
            return None
        return CompiledAttention(
            self._library,
            pool,
            geometry,
            group_size=group_size,
            is_bfloat16=is_bfloat16,
            is_rounding=is_rounding,
        )

    def gather(self, pool: ByteArray, spans: Int64Array) -> Gathering:
        return CompiledGathering(self._library, pool, spans)

    def row_kernels(self) -> RowKernels | None:
        return CompiledRowKernels(self._library)

    def sample_kernel(self) -> SampleKernel | None:
        return CompiledSampleKernel(self._library)

    def copy_queue(self) -> CopyQueue:
        return CompiledCopyQueue(self._library)

    def key_table(self) -> KeyTable:
        return CompiledKeyTable(self._library)

    def control_page(self, page: ByteArray) -> ControlPage:
        return CompiledControlPage(self._library, page)

    def layer_finisher(
        self,
        *,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> LayerFinisher:
        _check_sizes(pool, geometry, leaves)
        return CompiledLayerFinisher(self._library, pool, geometry, leaves, page, eventfd)


class CompiledGathering:
    """Gathering in C, straight into the bytes that are returned."""

    def __init__(self, library: NativeLibrary, pool: ByteArray, spans: Int64Array) -> None:
        result = ResultStruct()
        address = address_of(spans, np.int64, (2,))
        self.num_left: int = library.brief.mp_gathering_bytes(
            address, len(spans), pool.size, ctypes.byref(result)
        )
        raise_for(result.status, result.index)
        self._gather = library.working.mp_gather
        self._kept_alive = (pool, spans)
        self._pool = address_of(pool, np.uint8)
        self._struct = GatheringStruct(address)
        self._reference = ctypes.byref(self._struct)

    def take(self, num_bytes: int) -> bytes:
        assert 0 <= num_bytes <= self.num_left, (num_bytes, self.num_left)
        self.num_left -= num_bytes
        message: bytes = new_bytes(None, num_bytes)
        self._gather(self._reference, self._pool, message, num_bytes)
        return message


class CompiledRowKernels:
    """RowKernels in C."""

    def __init__(self, library: NativeLibrary, *, isa: str | None = None) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine."""
        self._rms_norm = library.kernel("mp_rms_norm", isa)
        self._silu_mul = library.kernel("mp_silu_mul", isa)

    def rms_norm(self, x: int, weight: int, eps: float, num_rows: int, size: int, y: int) -> None:
        self._rms_norm(x, weight, eps, num_rows, size, y)

    def silu_mul(self, x: int, num_rows: int, size: int, y: int) -> None:
        self._silu_mul(x, num_rows, size, y)


class CompiledControlPage:
    """ControlPage with C11 atomics: publish is a release, progress an acquire."""

    def __init__(self, library: NativeLibrary, page: ByteArray) -> None:
        self._library = library
        self._page = page
        self._address = page_address(page)

    def begin_step(self, step: int, now_ns: int) -> None:
        self._library.brief.mp_begin_step(self._address, step, now_ns)

    def publish(self, step: int, layers_done: int) -> None:
        self._library.brief.mp_publish(self._address, step, layers_done)

    def end_step(self) -> None:
        self._library.brief.mp_end_step(self._address)

    def progress(self) -> Progress:
        word: int = self._library.brief.mp_progress(self._address)
        return Progress(step=word >> 16, layers_done=word & 0xFFFF)

    def started_ns(self) -> int:
        started: int = self._library.brief.mp_started_ns(self._address)
        return started


class CompiledLayerFinisher:
    """LayerFinisher in one C call."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> None:
        self._library = library
        self._kept_alive = (pool, leaves, page)
        self._pool = address_of(pool, np.uint8, is_written=True)
        self._leaves = address_of(leaves, np.uint64, (geometry.num_layers,), is_written=True)
        self._page = page_address(page)
        self._eventfd = eventfd
        self._geometry = geometry_struct(geometry)
        self._result = ResultStruct()

    def finish_layer(
        self, *, step: int, layer: int, block_ids: Int32Array, zero_tails: Int32Array
    ) -> None:
        self._library.working.mp_finish_layer(
            self._pool,
            ctypes.byref(self._geometry),
            address_of(block_ids, np.int32),
            len(block_ids),
            address_of(zero_tails, np.int32, (2,)),
            len(zero_tails),
            layer,
            self._leaves,
            self._page,
            step,
            layer + 1,
            self._eventfd,
            ctypes.byref(self._result),
        )
        raise_for(self._result.status, self._result.index)


def _check_sizes(
    pool: ByteArray, geometry: LeafGeometry, leaves: DigestArray | None = None
) -> None:
    if pool.size < geometry.region_bytes:
        raise ValueError(f"the pool has {pool.size} bytes, its geometry {geometry.region_bytes}")
    if leaves is not None and leaves.shape != (geometry.num_blocks, geometry.num_layers):
        raise ValueError(f"leaves have shape {leaves.shape}")
