"""LogBooks: what a log counts. Changed on the loop only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LogBooks:
    """Names and meanings are those of base.LogStats."""

    written_bytes: int = 0
    written_record_bytes: int = 0
    carried_bytes: int = 0
    read_bytes: int = 0
    num_writes: int = 0
    num_reads: int = 0
    num_write_errors: int = 0
    num_sync_errors: int = 0
    num_read_errors: int = 0
    num_corrupt_records: int = 0
    num_corrupt_footers: int = 0
    num_torn_records: int = 0
    num_reclaimed_segments: int = 0
    num_reclaimed_records: int = 0
    num_carried_records: int = 0
