"""AttemptSpans: the spans of one attempt on one worker, made of what its record says.

prefill        started -> last layer readable -> layers computed -> first token drawn
kv.fetch       decided -> pieces verified ... -> ended
kv.transfer    reserved -> layers verified ... -> Commit received -> admitted
decode         admitted -> first step -> last token
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from moonpool.handoff.effects import RecordFetch
from moonpool.inference.output import FinishReason
from moonpool.telemetry import names
from moonpool.telemetry.spans import SpanContext
from moonpool.wire.spans import AttributeValue, Span, SpanEvent
from moonpool.worker.attempt_record import AttemptRecord, ReadRecord

#: Reads and chunks of one attempt that become span events; a longer prompt's are summed up in counts.
_MAX_EVENTS = 256
_ERRORS = frozenset({"refused", "handed_back", FinishReason.INVALID_OUTPUT})


class AttemptSpans:
    """Makes an attempt's spans, children of the request's root."""

    def __init__(
        self, worker: str, record: AttemptRecord, parent: SpanContext, outcome: str
    ) -> None:
        self._worker = worker
        self._record = record
        self._parent = parent
        self._outcome = outcome

    def prefill(self, end_ns: int) -> Span:
        record = self._record
        return self._span(
            names.SPAN_PREFILL,
            record.started_ns or record.received_ns,
            record.first_token_ns or end_ns,
            {
                names.ATTR_INPUT_TOKENS: record.num_tokens,
                names.ATTR_CACHED_TOKENS: record.num_cached_tokens,
                "moonpool.prefill_started_unix_ns": record.started_ns,
                "moonpool.last_layer_unix_ns": record.last_layer_ns,
                "moonpool.forward_ended_unix_ns": record.forward_ended_ns,
                "moonpool.first_token_unix_ns": record.first_token_ns,
                "moonpool.num_chunks": len(record.chunks),
            },
            (
                SpanEvent(name="chunk", unix_ns=at, attributes={"start": start, "end": end})
                for at, start, end in record.chunks[:_MAX_EVENTS]
            ),
        )

    def fetch(self, fetch: RecordFetch) -> Span:
        record, reads = self._record, self._record.reads
        return self._span(
            names.SPAN_KV_FETCH,
            record.fetched_ns - round(fetch.elapsed_s * 1e9),
            record.fetched_ns,
            {
                "moonpool.source": str(fetch.holder),
                names.ATTR_BACKEND: record.transport,
                names.ATTR_BYTES: sum(read.num_bytes for read in reads),
                names.ATTR_REASON: fetch.outcome.value,
                "moonpool.num_wanted_blocks": fetch.num_wanted_blocks,
                "moonpool.num_blocks": fetch.num_blocks,
                "moonpool.num_reads": len(reads),
                "moonpool.num_bad_leaves": sum(read.num_bad_leaves for read in reads),
                "moonpool.predicted_ms": round(fetch.predicted_s * 1e3, 3),
                "moonpool.recompute_ms": round(fetch.recompute_s * 1e3, 3),
            },
            map(_read_event, reads[:_MAX_EVENTS]),
        )

    def transfer(self, end_ns: int) -> Span:
        record, reads = self._record, self._record.reads
        return self._span(
            names.SPAN_KV_TRANSFER,
            record.reserved_ns,
            record.admitted_ns or end_ns,
            {
                "moonpool.source": record.source,
                names.ATTR_BACKEND: record.transport,
                names.ATTR_BYTES: sum(read.num_bytes for read in reads),
                "moonpool.num_held_tokens": record.num_cached_tokens,
                "moonpool.num_reads": len(reads),
                "moonpool.num_bad_leaves": sum(read.num_bad_leaves for read in reads),
                "moonpool.source_last_layer_unix_ns": record.source_times.last_layer_unix_ns,
                "moonpool.source_first_token_unix_ns": record.source_times.first_token_unix_ns,
                "moonpool.commit_received_unix_ns": record.commit_ns,
                "moonpool.last_read_unix_ns": max((read.ended_ns for read in reads), default=0),
                "moonpool.admitted_unix_ns": record.admitted_ns,
            },
            map(_read_event, reads[:_MAX_EVENTS]),
        )

    def decode(self, end_ns: int) -> Span:
        record = self._record
        return self._span(
            names.SPAN_DECODE,
            record.admitted_ns or record.first_token_ns or record.received_ns,
            end_ns,
            {
                names.ATTR_OUTPUT_TOKENS: record.num_output_tokens,
                "moonpool.admitted_unix_ns": record.admitted_ns,
                "moonpool.joined_unix_ns": record.joined_ns,
                "moonpool.first_step_unix_ns": record.first_step_ns,
            },
        )

    def _span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, AttributeValue],
        events: Iterable[SpanEvent] = (),
    ) -> Span:
        common: dict[str, AttributeValue] = {
            names.ATTR_PROCESS: self._worker,
            names.ATTR_WORKER: self._worker,
            names.ATTR_REQUEST_ID: self._record.attempt_id.request_id,
            names.ATTR_ATTEMPT: self._record.attempt_id.attempt,
            "moonpool.outcome": self._outcome,
            "moonpool.received_unix_ns": self._record.received_ns,
        }
        return Span(
            trace_id=self._parent.trace_id,
            span_id=secrets.token_hex(8),
            parent_span_id=self._parent.span_id,
            name=name,
            start_unix_ns=start_ns,
            end_unix_ns=max(start_ns, end_ns),
            attributes=common | attributes,
            events=tuple(events),
            is_error=self._outcome in _ERRORS,
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
