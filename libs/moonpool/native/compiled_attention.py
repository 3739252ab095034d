"""PagedAttention in C: src/attention.c and src/chunk_attention.c, or src/bfloat16_attention.c for both."""

from __future__ import annotations

import ctypes

import numpy as np

from moonpool.native.binding import (
    AttentionRowsStruct,
    AttentionStruct,
    NativeLibrary,
    ResultStruct,
    address_of,
    geometry_struct,
    raise_for,
)
from moonpool.native.geometry import ByteArray, Int32Array, Int64Array, LeafGeometry

#: Lanes of the widest vector: what a head must be made of.
_MAX_LANES = 16
#: The variant of machines that multiply bfloat16.
_ROUNDING_ISA = "avx512_bf16"
_INT32_BYTES = np.dtype(np.int32).itemsize
_INT64_BYTES = np.dtype(np.int64).itemsize


class CompiledAttention:
    """Bound to one pool; planned for one step at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ByteArray,
        geometry: LeafGeometry,
        *,
        group_size: int,
        is_bfloat16: bool,
        is_rounding: bool = False,
        isa: str | None = None,
    ) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine.

        `is_rounding` only for a pool of bfloat16 where the library has such products.
        """
        if is_rounding:
            if not is_bfloat16 or isa not in (None, _ROUNDING_ISA):
                raise ValueError("products of bfloat16 need a pool of it, and a CPU that has them")
            isa = "bfloat16"
        geometry.validate()
        head_dim = geometry.token_bytes // (2 if is_bfloat16 else 4)
        if geometry.num_planes != 2 or head_dim % _MAX_LANES or head_dim == 0 or group_size < 1:
            raise ValueError(f"planes of K and V and heads of whole vectors, not {geometry}")
        if pool.size < geometry.region_bytes:
            raise ValueError(f"the pool has {pool.size} bytes, not {geometry.region_bytes}")
        self._pool = pool
        self._attention = AttentionStruct(
            pool=address_of(pool, np.uint8),
            geometry=geometry_struct(geometry),
            group_size=group_size,
            head_dim=head_dim,
            is_bfloat16=is_bfloat16,
            scale=head_dim**-0.5,
        )
        self._result = ResultStruct()
        #: All rows for their last queries; rows of one query; the others.
        self._rows, self._decodes, self._chunks = (AttentionRowsStruct() for _ in range(3))
        self._planned: tuple[object, ...] = ()
        self._work = np.empty(0, np.float32)
        self._work_address = 0
        self._attend = library.kernel("mp_attend", isa)
        self._attend_chunks = library.kernel("mp_attend_chunks", isa)
        work_isa = "bfloat16" if is_rounding else None  # of the others all work in as much
        self._attend_work = library.kernel("mp_attend_work", work_isa)
        self._attend_chunks_work = library.kernel("mp_attend_chunks_work", work_isa)

    def plan(
        self,
        qo_indptr: Int32Array,
        indptr: Int32Array,
        indices: Int32Array,
        lengths: Int64Array,
        *,
        num_decode_rows: int,
    ) -> None:
        num_rows = len(lengths)
        if qo_indptr.shape != (num_rows + 1,) or indptr.shape != (num_rows + 1,):
            raise ValueError(
                f"indptr have shapes {qo_indptr.shape}, {indptr.shape} for {num_rows} rows"
            )
        if not 0 <= num_decode_rows <= num_rows:
            raise ValueError(f"{num_decode_rows} of {num_rows} rows")
        max_length = -(-int(lengths.max(initial=1)) // _MAX_LANES) * _MAX_LANES
        attention = ctypes.byref(self._attention)
        self._grow(self._attend_work(attention, max_length))
        if num_decode_rows < num_rows:
            self._grow(self._attend_chunks_work(attention, max_length))
        self._planned = (qo_indptr, indptr, indices, lengths)
        qo, offsets, blocks = (address_of(one, np.int32) for one in (qo_indptr, indptr, indices))
        all_lengths = address_of(lengths, np.int64)
        for rows, first, last in (
            (self._rows, 0, num_rows),
            (self._decodes, 0, num_decode_rows),
            (self._chunks, num_decode_rows, num_rows),
        ):
            rows.num_rows = last - first
            rows.num_indices = len(indices)
            rows.max_length = max_length
            rows.qo_indptr = qo + first * _INT32_BYTES
            rows.indptr = offsets + first * _INT32_BYTES
            rows.indices = blocks
            rows.lengths = all_lengths + first * _INT64_BYTES
            rows.work = self._work_address

    def run(
        self, layer: int, query: int, query_stride: int, out: int, *, is_last_only: bool = False
    ) -> None:
        attention, result = ctypes.byref(self._attention), ctypes.byref(self._result)
        if is_last_only:
            self._attend(
                attention, layer, ctypes.byref(self._rows), query, query_stride, out, result
            )
            raise_for(self._result.status, self._result.index)
            return
        for attend, rows in (
            (self._attend, self._decodes),
            (self._attend_chunks, self._chunks),
        ):
            if rows.num_rows:
                attend(attention, layer, ctypes.byref(rows), query, query_stride, out, result)
                raise_for(self._result.status, self._result.index)

    def _grow(self, num_floats: int) -> None:
        if len(self._work) < num_floats:
            self._work = np.empty(num_floats + num_floats // 2, np.float32)
            self._work_address = address_of(self._work, np.float32)
