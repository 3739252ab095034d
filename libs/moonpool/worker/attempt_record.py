"""AttemptRecord: what happened to one attempt on one worker, and when. attempt_spans.py makes spans of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.handoff.effects import RecordFetch
from moonpool.ids import AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """One read that has ended well, bad leaves apart."""

    started_ns: int
    ended_ns: int
    num_bytes: int
    num_bad_leaves: int
    first_layer: int
    end_layer: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTimes:
    """The source's clock readings, for its Commit; 0 if unknown."""

    last_layer_unix_ns: int = 0
    first_token_unix_ns: int = 0


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """What happened to one attempt here, and when (wall clock, ns; 0: not yet)."""

    attempt_id: AttemptId
    is_prefill_side: bool
    traceparent: str
    num_tokens: int
    has_source: bool
    received_ns: int
    #: Worker that the KV is read from; empty until its stream is opened.
    source: str = ""
    started_ns: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    #: The last layer's KV could be read; the last layer was computed.
    last_layer_ns: int = 0
    forward_ended_ns: int = 0
    first_token_ns: int = 0
    reserved_ns: int = 0
    transport: str = ""
    commit_ns: int = 0
    source_times: CommitTimes = CommitTimes()
    reads: list[ReadRecord] = field(default_factory=list)
    #: Reading its beginning from a peer has ended, and how.
    fetched_ns: int = 0
    fetch: RecordFetch | None = None
    admitted_ns: int = 0
    #: The core took it into the running batch, with the token that the source drew.
    joined_ns: int = 0
    first_step_ns: int = 0
    num_output_tokens: int = 0
    is_prefill_told: bool = False
