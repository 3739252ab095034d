"""AttemptBook: what happened to each attempt here, and what of it goes to the router with a report.

An entry begins when the core is asked and ends with the attempt; its spans travel to the router with
reports, so that they need no way of their own. Times are this host's wall clock in nanoseconds, so that
spans of several workers can be laid side by side (as well as their clocks agree).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.protocol import (
    ChunkPlanned,
    Decode,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixLocked,
    Refused,
    Reserved,
    TokensReady,
)
from moonpool.handoff.effects import RecordFetch
from moonpool.handoff.messages import WorkerMessage
from moonpool.ids import AttemptId, WorkerKey
from moonpool.telemetry.spans import SpanContext
from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.spans import Span
from moonpool.worker.attempt_record import AttemptRecord, CommitTimes, ReadRecord
from moonpool.worker.attempt_spans import AttemptSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What goes with a report to a router."""

    is_prefill_side: bool
    spans: tuple[Span, ...] = ()


_OF_DECODE = Reported(is_prefill_side=False)


class AttemptBook:
    """Owned by the loop.

    Args:
        worker: Name of this worker, on every span.
        now_ns: Wall clock.
    """

    def __init__(self, worker: str, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._worker = worker
        self._now_ns = now_ns
        self._records: dict[AttemptId, AttemptRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, command: Prefill | Decode) -> None:
        """The core is asked for a new attempt."""
        request = command.request
        self._records[command.attempt_id] = AttemptRecord(
            attempt_id=command.attempt_id,
            is_prefill_side=isinstance(command, Prefill),
            traceparent=request.traceparent,
            num_tokens=request.num_tokens,
            has_source=isinstance(command, Decode) and command.has_source,
            received_ns=self._now_ns(),
        )

    def traceparent(self, attempt_id: AttemptId) -> str:
        record = self._records.get(attempt_id)
        return record.traceparent if record is not None else ""

    def core_frame(self, timed: TimedFrame) -> None:
        """Note what a frame of the core says; before the machines act on it."""
        frame = timed.frame
        now_ns = self._now_ns()
        for reply in frame.replies:
            if isinstance(reply, PrefixLocked):
                continue
            record = self._records.get(reply.attempt_id)
            if record is None:
                continue
            match reply:
                case TokensReady(run=run):
                    if record.admitted_ns and not record.num_output_tokens:
                        record.joined_ns = timed.planned_unix_ns or now_ns
                    elif record.admitted_ns and not record.first_step_ns:
                        record.first_step_ns = timed.computed_unix_ns or now_ns
                    if not record.has_source and not record.first_token_ns:
                        record.first_token_ns = timed.computed_unix_ns or now_ns
                    record.num_output_tokens += len(run.token_ids)
                case PrefillStarted(num_cached_tokens=num_cached_tokens):
                    record.started_ns = timed.planned_unix_ns or now_ns
                    record.num_cached_tokens = num_cached_tokens
                case ChunkPlanned(start=start, end=end):
                    record.chunks.append((timed.planned_unix_ns or now_ns, start, end))
                case PrefillDone():
                    computed_ns = timed.computed_unix_ns or now_ns
                    record.first_token_ns = computed_ns
                    record.last_layer_ns = timed.last_layer_unix_ns
                    record.forward_ended_ns = computed_ns - round(
                        (frame.logits_s + frame.sample_s) * 1e9
                    )
                case Reserved(num_cached_tokens=num_cached_tokens):
                    record.reserved_ns = now_ns
                    record.num_cached_tokens = num_cached_tokens
                case _:
                    pass

    def opening(self, attempt_id: AttemptId, source: WorkerKey) -> None:
        """The stream to the source is asked for."""
        record = self._records.get(attempt_id)
        if record is not None:
            record.source = str(source)

    def connected(self, attempt_id: AttemptId, transport: str) -> None:
        """The source's pool is reached by `transport`."""
        record = self._records.get(attempt_id)
        if record is not None:
            record.transport = transport

    def read_done(self, attempt_id: AttemptId, read: ReadRecord) -> None:
        """A read has ended well, bad leaves apart."""
        record = self._records.get(attempt_id)
        if record is not None:
            record.reads.append(read)

    def fetched(self, fetch: RecordFetch) -> None:
        """Reading the attempt's beginning from a peer has ended."""
        record = self._records.get(fetch.attempt_id)
        if record is not None:
            record.fetched_ns = self._now_ns()
            record.fetch = fetch

    def committed(self, attempt_id: AttemptId, times: CommitTimes) -> None:
        """The source's Commit was received."""
        record = self._records.get(attempt_id)
        if record is not None:
            record.commit_ns = self._now_ns()
            record.source_times = times

    def admitted(self, attempt_id: AttemptId) -> None:
        """The core is told that the KV has arrived."""
        record = self._records.get(attempt_id)
        if record is not None:
            record.admitted_ns = self._now_ns()

    def commit_times(self, attempt_id: AttemptId) -> CommitTimes:
        """What the prefill side adds to its Commit."""
        record = self._records.get(attempt_id)
        if record is None:
            return CommitTimes()
        return CommitTimes(
            last_layer_unix_ns=record.last_layer_ns, first_token_unix_ns=record.first_token_ns
        )

    def end(self, attempt_id: AttemptId) -> None:
        """Forget the attempt."""
        self._records.pop(attempt_id, None)

    def reported(self, message: WorkerMessage) -> Reported:
        """What goes with a report: the role that made it, and the attempt's spans if it is the last.

        A decode side's record ends with its last report; a prefill side's stays for its Commit, until
        `end`.
        """
        record = self._records.get(message.attempt_id)
        if record is None:
            return _OF_DECODE
        is_ended = not isinstance(message, TokensReady) or message.run.finish_reason is not None
        has_prefilled = record.is_prefill_side or (
            not record.has_source and record.first_token_ns > 0
        )
        is_prefill_news = has_prefilled and not record.is_prefill_told
        if not is_ended and not is_prefill_news:
            return Reported(is_prefill_side=True) if record.is_prefill_side else _OF_DECODE
        if is_ended and (not record.is_prefill_side or isinstance(message, Refused)):
            del self._records[message.attempt_id]
        spans: list[Span] = []
        parent = SpanContext.parse(record.traceparent)
        if parent is not None:
            make = AttemptSpans(self._worker, record, parent, _outcome(message))
            if record.fetch is not None:
                spans.append(make.fetch(record.fetch))
                record.fetch = None
            if is_prefill_news:
                spans.append(make.prefill(self._now_ns()))
            if is_ended and record.source:
                spans.append(make.transfer(self._now_ns()))
            if is_ended and record.num_output_tokens and not record.is_prefill_side:
                spans.append(make.decode(self._now_ns()))
        record.is_prefill_told |= is_prefill_news
        return Reported(is_prefill_side=record.is_prefill_side, spans=tuple(spans))


def _outcome(message: WorkerMessage) -> str:
    match message:
        case Refused():
            return "refused"
        case HandedBack():
            return "handed_back"
        case TokensReady(run=run):
            return run.finish_reason or "running"
