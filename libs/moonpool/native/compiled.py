"""The compiled kernels: ctypes over libmoonpool_native.so."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.native.geometry import (
    LEAF_CHECK_DTYPE,
    BoolArray,
    ByteArray,
    DigestArray,
    Int32Array,
    Int64Array,
    LeafCheckArray,
    LeafGeometry,
    RangeError,
)
from moonpool.native.kernels import ControlPage, LayerFinisher, Progress

#: MP_ABI_VERSION of src/moonpool_native.h.
ABI_VERSION = 1

_RANGE_ERRORS = {1: "span", 2: "block of leaf", 3: "layer of leaf", 6: "slot of tail"}
_LEAF_ORDER, _BAD_GEOMETRY, _SYSTEM = 4, 5, 8


class GeometryStruct(ctypes.Structure):
    """`mp_geometry`."""

    _fields_ = [(name, ctypes.c_int64) for name in LeafGeometry.__slots__]


class ResultStruct(ctypes.Structure):
    """`mp_result`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("status", "index", "num_bad")]


class LoadError(Exception):
    """The library is missing, of another ABI version, or cannot be loaded here."""


def load_library(path: Path) -> ctypes.CDLL:
    """Load and declare every function.

    Raises:
        LoadError: With the reason in words.
    """
    if not path.exists():
        raise LoadError("it was not built")
    try:
        library = ctypes.CDLL(str(path))
        library.mp_abi_version.restype = ctypes.c_int64
        version = library.mp_abi_version()
    except (OSError, AttributeError) as error:
        raise LoadError(f"it cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise LoadError(f"it was built from other sources (ABI {version}, need {ABI_VERSION})")
    pointer, int64, uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    uint32, int32 = ctypes.c_uint32, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "mp_isa": (ctypes.c_char_p, []),
        "mp_digest": (uint64, [pointer, int64]),
        "mp_write_leaves": (None, [pointer, pointer, pointer, int64, int64, pointer, pointer]),
        "mp_zero_tails": (None, [pointer, pointer, pointer, int64, int64, pointer]),
        "mp_verify_leaves": (None, [pointer, pointer, pointer, int64, pointer, pointer]),
        "mp_copy_verify": (
            None,
            [
                pointer,
                int64,
                pointer,
                int64,
                pointer,
                int64,
                pointer,
                pointer,
                int64,
                pointer,
                pointer,
            ],
        ),
        "mp_finish_layer": (
            None,
            [
                pointer,
                pointer,
                pointer,
                int64,
                pointer,
                int64,
                int64,
                pointer,
                pointer,
                uint64,
                uint32,
                int32,
                pointer,
            ],
        ),
        "mp_begin_step": (None, [pointer, uint64, uint64]),
        "mp_publish": (None, [pointer, uint64, uint32]),
        "mp_end_step": (None, [pointer]),
        "mp_progress": (uint64, [pointer]),
        "mp_started_ns": (uint64, [pointer]),
        "mp_ring": (int64, [int32]),
    }
    for name, (restype, argtypes) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
    return library


class CompiledKernels:
    """Kernels in C."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def isa(self) -> str:
        """Which variant of the digest the library chose: baseline, avx2 or avx512."""
        name: bytes = self._library.mp_isa()
        return name.decode()

    def digest(self, data: ByteArray) -> int:
        value: int = self._library.mp_digest(address_of(data, np.uint8), data.size)
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
        self._library.mp_write_leaves(
            address_of(pool, np.uint8),
            ctypes.byref(geometry_struct(geometry)),
            address_of(block_ids, np.int32),
            len(block_ids),
            layer,
            address_of(leaves, np.uint64),
            ctypes.byref(result),
        )
        raise_for(result)

    def zero_tails(
        self, pool: ByteArray, geometry: LeafGeometry, tails: Int32Array, layer: int
    ) -> None:
        _check_sizes(pool, geometry)
        result = ResultStruct()
        self._library.mp_zero_tails(
            address_of(pool, np.uint8),
            ctypes.byref(geometry_struct(geometry)),
            address_of(tails, np.int32),
            len(tails),
            layer,
            ctypes.byref(result),
        )
        raise_for(result)

    def verify_leaves(
        self, pool: ByteArray, geometry: LeafGeometry, checks: LeafCheckArray
    ) -> BoolArray:
        _check_sizes(pool, geometry)
        is_bad = np.zeros(len(checks), np.bool_)
        result = ResultStruct()
        self._library.mp_verify_leaves(
            address_of(pool, np.uint8),
            ctypes.byref(geometry_struct(geometry)),
            address_of(checks, LEAF_CHECK_DTYPE),
            len(checks),
            is_bad.ctypes.data,
            ctypes.byref(result),
        )
        raise_for(result)
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
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        self._library.mp_copy_verify(
            address_of(source, np.uint8),
            source.size,
            address_of(target, np.uint8),
            target.size,
            address_of(spans, np.int64),
            len(spans),
            ctypes.byref(geometry_struct(geometry)),
            address_of(checks, LEAF_CHECK_DTYPE),
            len(checks),
            is_bad.ctypes.data,
            ctypes.byref(result),
        )
        raise_for(result)
        return is_bad

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


class CompiledControlPage:
    """ControlPage with C11 atomics: publish is a release, progress an acquire."""

    def __init__(self, library: ctypes.CDLL, page: ByteArray) -> None:
        self._library = library
        self._page = page
        self._address = page_address(page)

    def begin_step(self, step: int, now_ns: int) -> None:
        self._library.mp_begin_step(self._address, step, now_ns)

    def publish(self, step: int, layers_done: int) -> None:
        self._library.mp_publish(self._address, step, layers_done)

    def end_step(self) -> None:
        self._library.mp_end_step(self._address)

    def progress(self) -> Progress:
        word: int = self._library.mp_progress(self._address)
        return Progress(step=word >> 16, layers_done=word & 0xFFFF)

    def started_ns(self) -> int:
        started: int = self._library.mp_started_ns(self._address)
        return started


class CompiledLayerFinisher:
    """LayerFinisher in one C call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: ByteArray,
        geometry: LeafGeometry,
        leaves: DigestArray,
        page: ByteArray,
        eventfd: int,
    ) -> None:
        self._library = library
        self._kept_alive = (pool, leaves, page)
        self._pool = address_of(pool, np.uint8)
        self._leaves = address_of(leaves, np.uint64)
        self._page = page_address(page)
        self._eventfd = eventfd
        self._geometry = geometry_struct(geometry)
        self._result = ResultStruct()

    def finish_layer(
        self, *, step: int, layer: int, block_ids: Int32Array, zero_tails: Int32Array
    ) -> None:
        self._library.mp_finish_layer(
            self._pool,
            ctypes.byref(self._geometry),
            address_of(block_ids, np.int32),
            len(block_ids),
            address_of(zero_tails, np.int32),
            len(zero_tails),
            layer,
            self._leaves,
            self._page,
            step,
            layer + 1,
            self._eventfd,
            ctypes.byref(self._result),
        )
        raise_for(self._result)


def address_of(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> int:  # Any: dtype is checked here
    """The array's first byte; ValueError unless it is contiguous and of `dtype`."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"need a contiguous array of {dtype}, got {array.dtype}")
    return array.ctypes.data


def page_address(page: ByteArray) -> int:
    """Address of a control page; ValueError unless it can hold aligned atomics."""
    address = address_of(page, np.uint8)
    if page.size < 16 or address % 8 or not page.flags.writeable:
        raise ValueError("a control page is at least 16 writable bytes, 8-byte aligned")
    return address


def geometry_struct(geometry: LeafGeometry) -> GeometryStruct:
    """The C form of a geometry."""
    return GeometryStruct(*(getattr(geometry, name) for name in LeafGeometry.__slots__))


def raise_for(result: ResultStruct) -> None:
    """RangeError or ValueError for a status that is not OK."""
    status = result.status
    if status == 0:
        return
    if status in _RANGE_ERRORS:
        raise RangeError(_RANGE_ERRORS[status], result.index)
    if status == _LEAF_ORDER:
        raise ValueError(f"leaf {result.index} is not in order of after_span")
    if status == _BAD_GEOMETRY:
        raise ValueError("the geometry does not fit the region")
    assert status == _SYSTEM, status
    raise OSError("the eventfd cannot be written")


def _check_sizes(
    pool: ByteArray, geometry: LeafGeometry, leaves: DigestArray | None = None
) -> None:
    if pool.size < geometry.region_bytes:
        raise ValueError(f"the pool has {pool.size} bytes, its geometry {geometry.region_bytes}")
    if leaves is not None and leaves.shape != (geometry.num_blocks, geometry.num_layers):
        raise ValueError(f"leaves have shape {leaves.shape}")
