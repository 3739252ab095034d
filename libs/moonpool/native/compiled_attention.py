"""DecodeAttention in C: see src/attention.c."""

from __future__ import annotations

import ctypes

import numpy as np

from moonpool.native.binding import (
    AttentionStruct,
    DecodeRowsStruct,
    NativeLibrary,
    ResultStruct,
    address_of,
    geometry_struct,
    raise_for,
)
from moonpool.native.geometry import ByteArray, Int32Array, Int64Array, LeafGeometry

#: Query heads whose scores lie side by side (MAX_QUERIES of src/attention.c).
_MAX_QUERIES = 3
#: Lanes of the widest vector: what a head must be made of.
_MAX_LANES = 16


class CompiledDecodeAttention:
    """Bound to one pool; planned for one step at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ByteArray,
        geometry: LeafGeometry,
        *,
        group_size: int,
        is_bfloat16: bool,
        isa: str | None = None,
    ) -> None:
        """`isa` names a variant of src/dispatch.c; by default the one that suits this machine."""
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
        self._rows = DecodeRowsStruct()
        self._result = ResultStruct()
        self._addresses = tuple(
            ctypes.addressof(struct) for struct in (self._attention, self._rows, self._result)
        )
        self._planned: tuple[Int32Array, Int32Array, Int64Array] | None = None
        self._scores = np.empty(0, np.float32)
        self._attend = library.kernel("mp_attend", isa)

    def plan(self, indptr: Int32Array, indices: Int32Array, lengths: Int64Array) -> None:
        if indptr.shape != (len(lengths) + 1,):
            raise ValueError(f"indptr has shape {indptr.shape} for {len(lengths)} rows")
        max_length = -(-int(lengths.max(initial=1)) // _MAX_LANES) * _MAX_LANES
        if len(self._scores) < _MAX_QUERIES * max_length:
            self._scores = np.empty(2 * _MAX_QUERIES * max_length, np.float32)
        self._planned = (indptr, indices, lengths)
        rows = self._rows
        rows.num_rows = len(lengths)
        rows.num_indices = len(indices)
        rows.max_length = max_length
        rows.indptr = address_of(indptr, np.int32)
        rows.indices = address_of(indices, np.int32)
        rows.lengths = address_of(lengths, np.int64)
        rows.scores = address_of(self._scores, np.float32)

    def run(self, layer: int, query: int, query_stride: int, out: int) -> None:
        attention, rows, result = self._addresses
        self._attend(attention, layer, rows, query, query_stride, out, result)
        if self._result.status:
            raise_for(self._result.status, self._result.index)
