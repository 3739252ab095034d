"""Scanning a segment: what can be found in it after a restart, by its footers alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.store.base import ByteArray
from moonpool.store.segment_files import SegmentFiles, read_fully
from moonpool.store.segment_format import (
    ALIGNMENT,
    FOOTER_BYTES,
    FoundRecord,
    RecordFormat,
    sequence_of,
)

#: Slots up to this size are read whole, many at a time; of others only the footers are.
_MAX_WHOLE_SLOT_BYTES = 64 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
#: Footers that are looked at together where they are read one by one.
_FOOTERS_PER_CHUNK = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedSegment:
    """One file."""

    number: int
    fd: int
    #: Slots that the file reaches into.
    num_slots: int
    records: tuple[FoundRecord, ...]
    num_corrupt: int
    num_torn: int


def scan_segment(
    files: SegmentFiles, name: str, number: int, record_format: RecordFormat
) -> ScannedSegment:
    """Open a segment and read its footers; blocks.

    Raises:
        OSError: It cannot be opened or read; it is closed again.
    """
    fd = files.open(name)
    try:
        num_bytes = files.size(fd)
        num_whole, rest = divmod(num_bytes, record_format.slot_bytes)
        is_whole = record_format.slot_bytes <= _MAX_WHOLE_SLOT_BYTES
        step = _CHUNK_BYTES // record_format.slot_bytes if is_whole else _FOOTERS_PER_CHUNK
        records: list[FoundRecord] = []
        num_corrupt, num_torn = 0, int(rest > 0)
        for first in range(0, num_whole, step):
            count = min(step, num_whole - first)
            read = _read_slots if is_whole else _read_footers
            raw = read(files, fd, record_format, first, count)
            found = record_format.find(raw, sequence_of(number, first))
            records += found.records
            num_corrupt += found.num_corrupt
            num_torn += found.num_unwritten
    except BaseException:
        files.close(fd)
        raise
    return ScannedSegment(
        number=number,
        fd=fd,
        num_slots=num_whole + int(rest > 0),
        records=tuple(records),
        num_corrupt=num_corrupt,
        num_torn=num_torn,
    )


def _read_slots(
    files: SegmentFiles, fd: int, record_format: RecordFormat, first: int, count: int
) -> ByteArray:
    slot_bytes, start = record_format.slot_bytes, record_format.footer_offset
    slots: ByteArray = np.zeros((count, slot_bytes), np.uint8)
    read_fully(files, fd, [slots.reshape(-1)], first * slot_bytes)
    return np.ascontiguousarray(slots[:, start : start + FOOTER_BYTES])


def _read_footers(
    files: SegmentFiles, fd: int, record_format: RecordFormat, first: int, count: int
) -> ByteArray:
    slot_bytes, start = record_format.slot_bytes, record_format.footer_offset
    footers: ByteArray = np.zeros((count, FOOTER_BYTES), np.uint8)
    for row in range(count):
        offset = (first + row) * slot_bytes + start
        read_fully(files, fd, [footers[row]], offset)
        # A cached page within a run that is not spoils the kernel's read-ahead, for a read of the run.
        files.uncache(fd, offset, ALIGNMENT)
    return footers
