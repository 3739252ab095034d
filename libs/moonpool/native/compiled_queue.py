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
    ReadStruct,
    ResultStruct,
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
from moonpool.native.kernels import CopyRoute, CopyStream, CopyTicket, StreamRead

_INT64 = np.dtype(np.int64)
_NEVER = 2**63 - 1
#: What was submitted, or None; and else what must stay alive until the job has finished.
_Job = tuple["CompiledTicket | None", object]


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


class CompiledRead:
    """StreamRead over one `mp_read`."""

    __slots__ = ("_is_bad", "_kept_alive", "_library", "_order", "struct")

    def __init__(
        self,
        library: NativeLibrary,
        spans: Int64Array,
        checks: LeafCheckArray,
        target_bytes: int,
        geometry_address: int,
    ) -> None:
        num_spans, num_checks = len(spans), len(checks)
        starts, done_at = (ctypes.c_int64 * num_spans)(), (ctypes.c_int64 * num_checks)()
        self._library = library
        self._is_bad = (ctypes.c_uint8 * num_checks)()
        self._kept_alive: object = (spans, checks, starts, done_at)
        #: Which of the checks given stands where in the order of arrival; None: they are in order.
        self._order: Int64Array | None = None
        self.struct = ReadStruct(
            address_of(spans, _INT64, (3,)),
            ctypes.addressof(starts),
            num_spans,
            0,
            address_of(checks, LEAF_CHECK_DTYPE),
            ctypes.addressof(done_at),
            num_checks,
            ctypes.addressof(self._is_bad),
        )
        result = ResultStruct()
        is_sorted = library.brief.mp_read_plan(
            ctypes.byref(self.struct), geometry_address, target_bytes, ctypes.byref(result)
        )
        raise_for(result.status, result.index)
        if not is_sorted:
            unsorted = np.ctypeslib.as_array(done_at)
            self._order = np.argsort(unsorted, kind="stable")
            checks, unsorted[:] = checks[self._order], unsorted[self._order]
            self.struct.leaves = address_of(checks, LEAF_CHECK_DTYPE)
            self._kept_alive = (spans, checks, starts, done_at)

    @property
    def num_bytes(self) -> int:
        num_bytes: int = self.struct.num_bytes
        return num_bytes

    def abandon(self) -> bool:
        return bool(self._library.brief.mp_read_abandon(ctypes.byref(self.struct)))

    def bad_checks(self) -> Int64Array | None:
        if not self.struct.num_bad:
            return None
        bad = np.flatnonzero(np.ctypeslib.as_array(self._is_bad))
        return bad if self._order is None else np.sort(self._order[bad])


class CompiledStream:
    """CopyStream over one `mp_stream`. Holds every read that the C side may still touch."""

    def __init__(self, queue: CompiledCopyQueue, target: ByteArray, geometry: LeafGeometry) -> None:
        self._queue = queue
        self._target = target
        self._geometry_address = ctypes.addressof(geometry_struct(geometry))
        self._struct = StreamStruct(
            address_of(target, np.uint8, is_written=True), self._geometry_address
        )
        self._struct.ring_at = _NEVER
        self._reference = ctypes.byref(self._struct)
        self._expected: deque[CompiledRead] = deque()
        self._num_done = 0

    def plan(self, spans: Int64Array, checks: LeafCheckArray) -> StreamRead:
        return CompiledRead(
            self._queue.library, spans, checks, self._target.size, self._geometry_address
        )

    def expect(self, read: StreamRead) -> None:
        assert isinstance(read, CompiledRead)
        self._expected.append(read)
        self._queue.expect(self._reference, read)

    def feed(self, message: bytes) -> None:
        self._queue.feed(self, self._reference, message)

    def num_done(self) -> int:
        num_done: int = self._queue.library.brief.mp_stream_num_done(self._reference)
        while self._num_done < num_done:
            self._expected.popleft()
            self._num_done += 1
        return num_done

    def ring_at(self, num_bytes: int) -> int:
        num_consumed: int = self._queue.library.brief.mp_stream_ring_at(self._reference, num_bytes)
        return num_consumed


class CompiledCopyQueue:
    """CopyQueue in C. `_pending` holds every job that the C side may still touch."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handle: int | None = library.working.mp_queue_create(self._eventfd)
        if self._handle is None:
            os.close(self._eventfd)
            raise OSError("the copy thread could not be started")
        self._pending: deque[_Job] = deque()
        self._num_finished = 0
        self._untold: list[CopyTicket] = []

    def fileno(self) -> int:
        return self._eventfd

    def route(self, source: ByteArray, target: ByteArray, geometry: LeafGeometry) -> CopyRoute:
        return CopyRoute(
            source=source,
            target=target,
            geometry=geometry,
            source_address=address_of(source, np.uint8),
            target_address=address_of(target, np.uint8, is_written=True),
            geometry_address=ctypes.addressof(geometry_struct(geometry)),
        )

    def submit(self, route: CopyRoute, spans: Int64Array, checks: LeafCheckArray) -> CopyTicket:
        num_checks = len(checks)
        is_bad = (ctypes.c_uint8 * num_checks)()
        job = JobStruct(
            route.source_address,
            route.source.size,
            None,
            route.target_address,
            route.target.size,
            address_of(spans, _INT64, (3,)),
            len(spans),
            route.geometry_address,
            address_of(checks, LEAF_CHECK_DTYPE),
            num_checks,
            ctypes.addressof(is_bad),
        )
        return self._submit(CompiledTicket(self.library, job, is_bad, (route, spans, checks)))

    def stream(self, target: ByteArray, geometry: LeafGeometry) -> CopyStream:
        return CompiledStream(self, target, geometry)

    def expect(self, stream: object, read: CompiledRead) -> None:
        self.library.brief.mp_stream_expect(self._open(), stream, ctypes.byref(read.struct))

    def feed(self, stream: CompiledStream, reference: object, message: bytes) -> None:
        job = JobStruct()
        self._pending.append((None, (job, stream, message)))
        self._let_go(
            self.library.brief.mp_stream_feed(
                self._open(), reference, ctypes.byref(job), message, len(message)
            )
        )

    def _submit(self, ticket: CompiledTicket) -> CopyTicket:
        handle = self._open()
        self._pending.append((ticket, None))
        self.library.brief.mp_queue_submit(handle, ctypes.byref(ticket.job))
        return ticket

    def _open(self) -> int:
        if self._handle is None:
            raise RuntimeError("the copy queue is closed")
        return self._handle

    def finished(self) -> list[CopyTicket]:
        if self._handle is None:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        self._let_go(self.library.brief.mp_queue_finished(self._handle))
        tickets, self._untold = self._untold, []
        return tickets

    def _let_go(self, num_finished: int) -> None:
        """Forget the oldest jobs up to so many in all; those that were submitted are to be told."""
        while self._num_finished < num_finished:
            ticket = self._pending.popleft()[0]
            if ticket is not None:
                self._untold.append(ticket)
            self._num_finished += 1

    def close(self) -> list[CopyTicket]:
        if self._handle is None:
            return []
        self.library.working.mp_queue_close(self._handle)
        self._handle = None
        os.close(self._eventfd)
        tickets = self._untold + [job[0] for job in self._pending if job[0] is not None]
        self._pending.clear()
        self._untold = []
        return tickets
