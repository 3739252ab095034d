"""ctypes over libmoonpool_native.so: signatures, structs, and what a status means."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.native.geometry import ByteArray, LeafGeometry, RangeError
from moonpool.native.kernels import CopyCancelledError

#: MP_ABI_VERSION of src/moonpool_native.h.
ABI_VERSION = 13

_RANGE_ERRORS = {1: "span", 2: "block of leaf", 3: "layer of leaf", 6: "slot of tail", 9: "row"}
_LEAF_ORDER, _BAD_GEOMETRY, _CLOSED, _SYSTEM = 4, 5, 7, 8


class GeometryStruct(ctypes.Structure):
    """`mp_geometry`."""

    _fields_ = [(name, ctypes.c_int64) for name in LeafGeometry.__slots__]


class ResultStruct(ctypes.Structure):
    """`mp_result`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("status", "index", "num_bad")]


class ReadStruct(ctypes.Structure):
    """`mp_read`."""

    _fields_ = (
        ("spans", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("num_spans", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
        ("leaves", ctypes.c_void_p),
        ("done_at", ctypes.c_void_p),
        ("num_leaves", ctypes.c_int64),
        ("is_bad", ctypes.c_void_p),
        ("num_bad", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("span", ctypes.c_int64),
        ("leaf", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


class StreamStruct(ctypes.Structure):
    """`mp_stream`."""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("geometry", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("num_done", ctypes.c_int64),
        ("num_consumed", ctypes.c_int64),
        ("ring_at", ctypes.c_int64),
    )


class GatheringStruct(ctypes.Structure):
    """`mp_gathering`."""

    _fields_ = (("spans", ctypes.c_void_p), ("row", ctypes.c_int64), ("at", ctypes.c_int64))


class JobStruct(ctypes.Structure):
    """`mp_job` of src/copy_queue.c, its result inlined."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("source_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("target_bytes", ctypes.c_int64),
        ("spans", ctypes.c_void_p),
        ("num_spans", ctypes.c_int64),
        ("geometry", ctypes.c_void_p),
        ("leaves", ctypes.c_void_p),
        ("num_leaves", ctypes.c_int64),
        ("is_bad", ctypes.c_void_p),
        ("status", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("num_bad", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


class LinearStruct(ctypes.Structure):
    """`mp_linear`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_in", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class AttentionStruct(ctypes.Structure):
    """`mp_attention`."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("geometry", GeometryStruct),
        ("group_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class AttentionRowsStruct(ctypes.Structure):
    """`mp_attention_rows`."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_indices", ctypes.c_int64),
        ("max_length", ctypes.c_int64),
        ("qo_indptr", ctypes.c_void_p),
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
    )


class KeyChangeStruct(ctypes.Structure):
    """`mp_key_change` of src/key_table.c."""

    _fields_ = (("num_keys", ctypes.c_int64), ("digest", ctypes.c_uint64))


class LoadError(Exception):
    """The library is missing, of another ABI version, or cannot be loaded here."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The library, loaded twice: the same code, with and without the interpreter lock.

    A call that gives the lock away may wait for it afterwards, for as long as another thread likes to
    keep it. That is worth it for work on memory, not for a store, a load or a queue.
    """

    #: For calls that copy, digest or wait: the lock is released meanwhile.
    working: ctypes.CDLL
    #: For calls of less than a few microseconds: the lock is kept.
    brief: ctypes.PyDLL

    def kernel(self, name: str, isa: str | None) -> Any:  # Any: a ctypes function
        """A working function in the variant that suits this machine, or in that named `isa`."""
        function = getattr(self.working, name)
        if isa is None:
            return function
        variant = getattr(self.working, f"{name}_{isa}")
        variant.restype, variant.argtypes = function.restype, function.argtypes
        return variant


def load_library(path: Path) -> NativeLibrary:
    """Load and declare every function.

    Raises:
        LoadError: With the reason in words.
    """
    if not path.exists():
        raise LoadError("it was not built")
    try:
        working, brief = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        brief.mp_abi_version.restype = ctypes.c_int64
        version = brief.mp_abi_version()
    except (OSError, AttributeError) as error:
        raise LoadError(f"it cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise LoadError(f"it was built from other sources (ABI {version}, need {ABI_VERSION})")
    pointer, int64, uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    uint32, int32 = ctypes.c_uint32, ctypes.c_int32
    _declare(
        working,
        mp_digest=(uint64, pointer, int64),
        mp_write_leaves=(None, pointer, pointer, pointer, int64, int64, pointer, pointer),
        mp_zero_tails=(None, pointer, pointer, pointer, int64, int64, pointer),
        mp_verify_leaves=(None, pointer, pointer, pointer, int64, pointer, pointer),
        mp_copy_verify=(
            (
                None,
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
            )
        ),
        mp_finish_layer=(
            (
                None,
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
            )
        ),
        mp_multiply=(None, pointer, pointer, int64, pointer, pointer),
        mp_multiply_bfloat16=(None, pointer, pointer, int64, pointer, pointer),
        mp_attend=(None, pointer, int64, pointer, pointer, int64, pointer, pointer),
        mp_attend_chunks=(None, pointer, int64, pointer, pointer, int64, pointer, pointer),
        mp_attend_work=(int64, pointer, int64),
        mp_attend_chunks_work=(int64, pointer, int64),
        mp_gather=(None, pointer, pointer, ctypes.c_char_p, int64),
        mp_rms_norm=(None, pointer, pointer, ctypes.c_float, int64, int64, pointer),
        mp_silu_mul=(None, pointer, int64, int64, pointer),
        mp_sample=(None, pointer, pointer, int64, int64, pointer, pointer, pointer),
        mp_queue_create=(pointer, int32),
        mp_queue_close=(None, pointer),
    )
    _declare(
        brief,
        mp_isa=(ctypes.c_char_p,),
        mp_has_bfloat16_products=(int64,),
        mp_begin_step=(None, pointer, uint64, uint64),
        mp_publish=(None, pointer, uint64, uint32),
        mp_end_step=(None, pointer),
        mp_progress=(uint64, pointer),
        mp_started_ns=(uint64, pointer),
        mp_queue_submit=(None, pointer, pointer),
        mp_job_cancel=(int64, pointer),
        mp_queue_finished=(uint64, pointer),
        mp_key_table_create=(pointer,),
        mp_key_table_destroy=(None, pointer),
        mp_key_table_add=(int64, pointer, pointer, int64, int64, pointer),
        mp_key_table_remove=(None, pointer, pointer, int64, int64, pointer),
        mp_key_table_drop=(None, pointer, int64),
        mp_key_table_runs=(int64, pointer, pointer, int64, pointer, pointer),
        mp_key_table_keys_of=(int64, pointer, int64, pointer),
        mp_key_table_num_words=(int64, pointer),
        mp_key_table_num_held=(int64, pointer),
        mp_key_table_num_bytes=(int64, pointer),
        mp_key_table_is_valid=(int64, pointer),
        mp_gathering_bytes=(int64, pointer, int64, int64, pointer),
        mp_read_plan=(int64, pointer, pointer, int64, pointer),
        mp_read_abandon=(int64, pointer),
        mp_stream_num_done=(int64, pointer),
        mp_stream_ring_at=(int64, pointer, int64),
        mp_stream_expect=(None, pointer, pointer, pointer),
        mp_stream_feed=(uint64, pointer, pointer, pointer, ctypes.c_char_p, int64),
    )
    return NativeLibrary(working, brief)


def _declare(library: ctypes.CDLL, **signatures: tuple[Any, ...]) -> None:  # Any: ctypes types
    """Set result and argument types by name: (result, argument, ...)."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


#: A new bytes object whose contents whoever made it writes before anyone else sees it.
new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
new_bytes.restype, new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)


def address_of(
    array: npt.NDArray[Any],  # Any: dtype is checked here
    dtype: npt.DTypeLike,
    row: tuple[int, ...] = (),
    *,
    is_written: bool = False,
) -> int:
    """The array's first byte.

    ValueError unless it is contiguous, of `dtype` and of the shape [n, *row], and can be written if it
    `is_written`.
    """
    if (array.dtype is not dtype and array.dtype != dtype) or not array.flags.c_contiguous:
        raise ValueError(f"need a contiguous array of {dtype}, got {array.dtype}")
    if array.shape[1:] != row:
        raise ValueError(f"need the shape {['n', *row]}, got {list(array.shape)}")
    if is_written and not array.flags.writeable:
        raise ValueError("the array is read-only")
    return array.ctypes.data


def page_address(page: ByteArray) -> int:
    """Address of a control page; ValueError unless it can hold aligned atomics."""
    address = address_of(page, np.uint8, is_written=True)
    if page.size < 16 or address % 8:
        raise ValueError("a control page is at least 16 bytes, 8-byte aligned")
    return address


@functools.cache
def geometry_struct(geometry: LeafGeometry) -> GeometryStruct:
    """The C form of a geometry; never written, and kept for ever: addresses of it are."""
    return GeometryStruct(*(getattr(geometry, name) for name in LeafGeometry.__slots__))


def raise_for(status: int, index: int) -> None:
    """RangeError, ValueError or CopyCancelledError for a status that is not OK."""
    if status == 0:
        return
    if status in _RANGE_ERRORS:
        raise RangeError(_RANGE_ERRORS[status], index)
    if status == _LEAF_ORDER:
        raise ValueError(f"leaf {index} is not in order of after_span")
    if status == _BAD_GEOMETRY:
        raise ValueError("the geometry does not fit the region")
    if status == _CLOSED:
        raise CopyCancelledError
    assert status == _SYSTEM, status
    raise OSError("the eventfd cannot be written")
