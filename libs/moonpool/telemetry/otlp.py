"""OTLP export of spans. The collector may be absent: then they are dropped, and nothing waits.

Spans come from several processes but leave through the router, so each keeps its process as an
attribute and all share the resource `service.name = moonpool`.
"""

from __future__ import annotations

import logging

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from moonpool.wire.spans import Span

EXPORT_TIMEOUT_S = 5
MAX_QUEUED_SPANS = 4_096


class OtlpExport:
    """Call it with each span (it is a TraceRing's `export`); `close` flushes.

    Args:
        exporter: In place of the OTLP one, for tests.
    """

    def __init__(
        self, endpoint: str, *, version: str, exporter: SpanExporter | None = None
    ) -> None:
        # The exporter logs each failed batch with a stack; an absent collector is no error of ours.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource({"service.name": "moonpool", "service.version": version})
        self._processor = BatchSpanProcessor(
            exporter
            or OTLPSpanExporter(
                endpoint=endpoint,
                insecure=endpoint.startswith("http://"),
                timeout=EXPORT_TIMEOUT_S,
            ),
            max_queue_size=MAX_QUEUED_SPANS,
        )

    def __call__(self, span: Span) -> None:
        """Queue it; never blocks, the oldest goes when the queue is full."""
        self._processor.on_end(_readable(span, self._resource))

    def close(self) -> None:
        """Send what is queued, within EXPORT_TIMEOUT_S. Blocks: call it off the loop."""
        self._processor.force_flush(EXPORT_TIMEOUT_S * 1_000)
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it untyped


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_span_id) if span.parent_span_id else None,
        resource=resource,
        attributes=dict(span.attributes),
        events=[
            Event(event.name, dict(event.attributes), timestamp=event.unix_ns)
            for event in span.events
        ],
        kind=SpanKind.INTERNAL if span.parent_span_id else SpanKind.SERVER,
        status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
