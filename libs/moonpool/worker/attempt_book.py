"""AttemptBook: when what happened to each attempt here, and the spans that this becomes.

An entry begins when the core is asked and ends with the attempt; its spans travel to the router with
the attempt's last report. Times are this host's wall clock in nanoseconds, so that spans of several
workers can be laid side by side (as well as their clocks agree).

    prefill        queued -> started -> last layer readable -> layers computed -> first token drawn
    kv.transfer    reserved, stream opened -> Commit -> last read verified
    decode         admitted -> first step -> last token
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moonpool.core.protocol import (
    ChunkPlanned,
    Decode,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Refused,
    Reserved,
    TokensReady,
)
from moonpool.handoff.messages import WorkerMessage
from moonpool.ids import AttemptId, WorkerKey
from moonpool.inference.output import FinishReason
from moonpool.telemetry import names
from moonpool.telemetry.spans import SpanContext
from moonpool.wire.engine_frames import TimedFrame
from moonpool.wire.spans import AttributeValue, Span, SpanEvent

#: Reads and chunks of one attempt that become span events; a longer prompt's are summed up in counts.
_MAX_EVENTS = 256
_ERRORS = frozenset({"refused", "handed_back", FinishReason.INVALID_OUTPUT})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What goes with a report to a router."""

    is_prefill_side: bool
    spans: tuple[Span, ...] = ()


_OF_DECODE = Reported(is_prefill_side=False)


@dataclass(slots=True, kw_only=True)
class _Entry:
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
    admitted_ns: int = 0
    first_step_ns: int = 0
    num_output_tokens: int = 0


class AttemptBook:
    """Owned by the loop.

    Args:
        worker: Name of this worker, on every span.
        now_ns: Wall clock.
    """

    def __init__(self, worker: str, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._worker = worker
        self._now_ns = now_ns
        self._entries: dict[AttemptId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, command: Prefill | Decode) -> None:
        """The core is asked for a new attempt."""
        request = command.request
        self._entries[command.attempt_id] = _Entry(
            attempt_id=command.attempt_id,
            is_prefill_side=isinstance(command, Prefill),
            traceparent=request.traceparent,
            num_tokens=request.num_tokens,
            has_source=isinstance(command, Decode) and command.has_source,
            received_ns=self._now_ns(),
        )

    def traceparent(self, attempt_id: AttemptId) -> str:
        entry = self._entries.get(attempt_id)
        return entry.traceparent if entry is not None else ""

    def core_frame(self, timed: TimedFrame) -> None:
        """Note what a frame of the core says; before the machines act on it."""
        frame = timed.frame
        now_ns = self._now_ns()
        for reply in frame.replies:
            entry = self._entries.get(reply.attempt_id)
            if entry is None:
                continue
            match reply:
                case TokensReady(run=run):
                    if entry.admitted_ns and not entry.first_step_ns and entry.num_output_tokens:
                        entry.first_step_ns = timed.computed_unix_ns or now_ns
                    if not entry.has_source and not entry.first_token_ns:
                        entry.first_token_ns = timed.computed_unix_ns or now_ns
                    entry.num_output_tokens += len(run.token_ids)
                case PrefillStarted(num_cached_tokens=num_cached_tokens):
                    entry.started_ns = timed.planned_unix_ns or now_ns
                    entry.num_cached_tokens = num_cached_tokens
                case ChunkPlanned(start=start, end=end):
                    entry.chunks.append((timed.planned_unix_ns or now_ns, start, end))
                case PrefillDone():
                    computed_ns = timed.computed_unix_ns or now_ns
                    entry.first_token_ns = computed_ns
                    entry.last_layer_ns = timed.last_layer_unix_ns
                    entry.forward_ended_ns = computed_ns - round(
                        (frame.logits_s + frame.sample_s) * 1e9
                    )
                case Reserved(num_cached_tokens=num_cached_tokens):
                    entry.reserved_ns = now_ns
                    entry.num_cached_tokens = num_cached_tokens
                case _:
                    pass

    def opening(self, attempt_id: AttemptId, source: WorkerKey) -> None:
        """The stream to the source is asked for."""
        entry = self._entries.get(attempt_id)
        if entry is not None:
            entry.source = str(source)

    def connected(self, attempt_id: AttemptId, transport: str) -> None:
        """The source's pool is reached by `transport`."""
        entry = self._entries.get(attempt_id)
        if entry is not None:
            entry.transport = transport

    def read_done(self, attempt_id: AttemptId, record: ReadRecord) -> None:
        entry = self._entries.get(attempt_id)
        if entry is not None:
            entry.reads.append(record)

    def committed(self, attempt_id: AttemptId, times: CommitTimes) -> None:
        """The source's Commit was received."""
        entry = self._entries.get(attempt_id)
        if entry is not None:
            entry.commit_ns = self._now_ns()
            entry.source_times = times

    def admitted(self, attempt_id: AttemptId) -> None:
        """The core is told that the KV has arrived."""
        entry = self._entries.get(attempt_id)
        if entry is not None:
            entry.admitted_ns = self._now_ns()

    def commit_times(self, attempt_id: AttemptId) -> CommitTimes:
        """What the prefill side adds to its Commit."""
        entry = self._entries.get(attempt_id)
        if entry is None:
            return CommitTimes()
        return CommitTimes(
            last_layer_unix_ns=entry.last_layer_ns, first_token_unix_ns=entry.first_token_ns
        )

    def end(self, attempt_id: AttemptId) -> None:
        """Forget the attempt."""
        self._entries.pop(attempt_id, None)

    def reported(self, message: WorkerMessage) -> Reported:
        """What goes with a report: the role that made it, and the attempt's spans if it is the last.

        A decode side's entry ends with its last report; a prefill side's stays for its Commit, until
        `end`.
        """
        entry = self._entries.get(message.attempt_id)
        if entry is None:
            return _OF_DECODE
        is_ended = not isinstance(message, TokensReady) or message.run.finish_reason is not None
        if entry.is_prefill_side:
            if isinstance(message, Refused):
                del self._entries[message.attempt_id]
        elif is_ended:
            del self._entries[message.attempt_id]
        else:
            return _OF_DECODE
        parent = SpanContext.parse(entry.traceparent)
        spans = tuple(self._spans(entry, parent, _outcome(message))) if parent is not None else ()
        return Reported(is_prefill_side=entry.is_prefill_side, spans=spans)

    def _spans(self, entry: _Entry, parent: SpanContext, outcome: str) -> Iterator[Span]:
        end_ns = self._now_ns()

        def span(
            name: str,
            start_ns: int,
            end_ns: int,
            attributes: dict[str, AttributeValue],
            events: Iterable[SpanEvent] = (),
        ) -> Span:
            common: dict[str, AttributeValue] = {
                names.ATTR_PROCESS: self._worker,
                names.ATTR_WORKER: self._worker,
                names.ATTR_REQUEST_ID: entry.attempt_id.request_id,
                names.ATTR_ATTEMPT: entry.attempt_id.attempt,
                "moonpool.outcome": outcome,
                "moonpool.received_unix_ns": entry.received_ns,
            }
            return Span(
                trace_id=parent.trace_id,
                span_id=secrets.token_hex(8),
                parent_span_id=parent.span_id,
                name=name,
                start_unix_ns=start_ns,
                end_unix_ns=max(start_ns, end_ns),
                attributes=common | attributes,
                events=tuple(events),
                is_error=outcome in _ERRORS,
            )

        if entry.is_prefill_side or not entry.has_source:
            yield span(
                names.SPAN_PREFILL,
                entry.started_ns or entry.received_ns,
                entry.first_token_ns or end_ns,
                {
                    names.ATTR_INPUT_TOKENS: entry.num_tokens,
                    names.ATTR_CACHED_TOKENS: entry.num_cached_tokens,
                    "moonpool.prefill_started_unix_ns": entry.started_ns,
                    "moonpool.last_layer_unix_ns": entry.last_layer_ns,
                    "moonpool.forward_ended_unix_ns": entry.forward_ended_ns,
                    "moonpool.first_token_unix_ns": entry.first_token_ns,
                    "moonpool.num_chunks": len(entry.chunks),
                },
                (
                    SpanEvent(name="chunk", unix_ns=at, attributes={"start": start, "end": end})
                    for at, start, end in entry.chunks[:_MAX_EVENTS]
                ),
            )
        if entry.source:
            reads = entry.reads
            yield span(
                names.SPAN_KV_TRANSFER,
                entry.reserved_ns,
                entry.admitted_ns or end_ns,
                {
                    "moonpool.source": entry.source,
                    names.ATTR_BACKEND: entry.transport,
                    names.ATTR_BYTES: sum(read.num_bytes for read in reads),
                    "moonpool.num_held_tokens": entry.num_cached_tokens,
                    "moonpool.num_reads": len(reads),
                    "moonpool.num_bad_leaves": sum(read.num_bad_leaves for read in reads),
                    "moonpool.source_last_layer_unix_ns": entry.source_times.last_layer_unix_ns,
                    "moonpool.source_first_token_unix_ns": entry.source_times.first_token_unix_ns,
                    "moonpool.commit_received_unix_ns": entry.commit_ns,
                    "moonpool.last_read_unix_ns": max((read.ended_ns for read in reads), default=0),
                    "moonpool.admitted_unix_ns": entry.admitted_ns,
                },
                map(_read_event, reads[:_MAX_EVENTS]),
            )
        if entry.num_output_tokens and not entry.is_prefill_side:
            yield span(
                names.SPAN_DECODE,
                entry.admitted_ns or entry.first_token_ns or entry.received_ns,
                end_ns,
                {
                    names.ATTR_OUTPUT_TOKENS: entry.num_output_tokens,
                    "moonpool.admitted_unix_ns": entry.admitted_ns,
                    "moonpool.first_step_unix_ns": entry.first_step_ns,
                },
            )


def _read_event(read: ReadRecord) -> SpanEvent:
    return SpanEvent(
        name=names.EVENT_LAYERS_VERIFIED,
        unix_ns=read.ended_ns,
        attributes={
            "started_unix_ns": read.started_ns,
            "num_bytes": read.num_bytes,
            "num_bad_leaves": read.num_bad_leaves,
            "first_layer": read.first_layer,
            "end_layer": read.end_layer,
            "num_blocks": read.num_blocks,
        },
    )


def _outcome(message: WorkerMessage) -> str:
    match message:
        case Refused():
            return "refused"
        case HandedBack():
            return "handed_back"
        case TokensReady(run=run):
            return run.finish_reason or "first_token"
