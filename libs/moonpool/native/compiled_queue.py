"""The compiled copy queue: a C thread (src/copy_queue.c) that never needs the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque

import numpy as np

from moonpool.native.binding import (
    JobStruct,
    NativeLibrary,
    StreamStruct,
    address_of,
    geometry_struct,
    raise_for,
)
from moonpool.native.geometry import (
    LEAF_CHECK_DTYPE,
    BoolArray,
    ByteArray,
    Int64Array,
    LeafCheckArray,
    LeafGeometry,
)
from moonpool.native.kernels import CopyRoute, CopyStream, CopyTicket

_INT64 = np.dtype(np.int64)


class CompiledTicket:
    """CopyTicket over one `mp_job`."""

    __slots__ = ("_is_bad", "_kept_alive", "_library", "job")

    def __init__(
        self,
        library: NativeLibrary,
        job: JobStruct,
        is_bad: ctypes.Array[ctypes.c_uint8] | None,
        kept_alive: object,
    ) -> None:
        self._library = library
        self.job = job
        self._is_bad = is_bad
        self._kept_alive = kept_alive

    def cancel(self) -> bool:
        return bool(self._library.brief.mp_job_cancel(ctypes.byref(self.job)))

    def result(self) -> BoolArray | None:
        raise_for(self.job.status, self.job.index)
        if self._is_bad is None or not self.job.num_bad:
            return None
        is_bad: BoolArray = np.ctypeslib.as_array(self._is_bad).view(np.bool_)
        return is_bad


class CompiledCopyQueue:
    """CopyQueue in C. `_pending` holds every job that the C side may still touch."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handle: int | None = library.working.mp_queue_create(self._eventfd)
        if self._handle is None:
            os.close(self._eventfd)
            raise OSError("the copy thread could not be started")
        self._pending: deque[CompiledTicket] = deque()
        self._num_told = 0

    def fileno(self) -> int:
        return self._eventfd

    def route(self, source: ByteArray, target: ByteArray, geometry: LeafGeometry) -> CopyRoute:
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        return CopyRoute(
            source=source,
            target=target,
            geometry=geometry,
            source_address=address_of(source, np.uint8),
            target_address=address_of(target, np.uint8),
            geometry_address=ctypes.addressof(geometry_struct(geometry)),
        )

    def submit(self, route: CopyRoute, spans: Int64Array, checks: LeafCheckArray) -> CopyTicket:
        num_checks = len(checks)
        is_bad = (ctypes.c_uint8 * num_checks)()
        job = JobStruct(
            route.source_address,
            route.source.size,
            None,
            0,
            route.target_address,
            route.target.size,
            address_of(spans, _INT64),
            len(spans),
            route.geometry_address,
            address_of(checks, LEAF_CHECK_DTYPE),
            num_checks,
            ctypes.addressof(is_bad),
        )
        return self._submit(CompiledTicket(self._library, job, is_bad, (route, spans, checks)))

    def stream(
        self,
        target: ByteArray,
        geometry: LeafGeometry,
        spans: Int64Array,
        starts: Int64Array,
        checks: LeafCheckArray,
        done_at: Int64Array,
    ) -> CopyStream:
        if not target.flags.writeable:
            raise ValueError("the target is read-only")
        is_bad = np.zeros(len(checks), np.bool_)
        handle = StreamStruct(
            address_of(target, np.uint8),
            target.size,
            address_of(spans, _INT64),
            address_of(starts, _INT64),
            len(spans),
            ctypes.addressof(geometry_struct(geometry)),
            address_of(checks, LEAF_CHECK_DTYPE),
            address_of(done_at, _INT64),
            len(checks),
            address_of(is_bad, np.bool_),
        )
        return CopyStream(
            target=target,
            geometry=geometry,
            spans=spans,
            starts=starts,
            checks=checks,
            done_at=done_at,
            is_bad=is_bad,
            handle=handle,
        )

    def feed(self, stream: CopyStream, begin: int, part: ByteArray) -> CopyTicket:
        assert isinstance(stream.handle, StreamStruct)
        job = JobStruct(
            address_of(part, np.uint8), part.size, ctypes.addressof(stream.handle), begin
        )
        return self._submit(CompiledTicket(self._library, job, None, (stream, part)))

    def _submit(self, ticket: CompiledTicket) -> CopyTicket:
        if self._handle is None:
            raise RuntimeError("the copy queue is closed")
        self._pending.append(ticket)
        self._library.brief.mp_queue_submit(self._handle, ctypes.byref(ticket.job))
        return ticket

    def finished(self) -> list[CopyTicket]:
        if self._handle is None:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        num_finished: int = self._library.brief.mp_queue_finished(self._handle)
        tickets: list[CopyTicket] = []
        while self._num_told < num_finished:
            tickets.append(self._pending.popleft())
            self._num_told += 1
        return tickets

    def close(self) -> list[CopyTicket]:
        if self._handle is None:
            return []
        self._library.working.mp_queue_close(self._handle)
        self._handle = None
        os.close(self._eventfd)
        tickets: list[CopyTicket] = list(self._pending)
        self._pending.clear()
        return tickets
