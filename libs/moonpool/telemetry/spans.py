"""Spans: what happened to one request, where and when. Light enough to be always on.

A span is opened with `Tracer.start`, given attributes and events, and ended once; then it is a frozen
Span in the tracer's sink. Workers make theirs when an attempt ends and send them with its last report;
a router keeps the last requests' in a TraceRing and passes them to an exporter.
There are no spans per token.

Context is W3C's traceparent: a field of each request message, metadata on calls and handoff streams.
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from moonpool.clock import Clock
from moonpool.wire.spans import AttributeValue, Span, SpanEvent

__all__ = [
    "AttributeValue",
    "OpenSpan",
    "Span",
    "SpanContext",
    "SpanEvent",
    "TraceRing",
    "Tracer",
]

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

#: Events of one span; later ones are dropped and counted in an attribute.
MAX_EVENTS = 512


class SpanContext(NamedTuple):
    """What a child needs to know of its parent."""

    trace_id: str
    span_id: str

    @classmethod
    def parse(cls, traceparent: str) -> SpanContext | None:
        """None if it is not a traceparent: then a new trace begins."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or match[1] == "0" * 32 or match[2] == "0" * 16:
            return None
        return cls(match[1], match[2])

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class OpenSpan:
    """A span that runs. Usable as a context; an exception marks it as an error."""

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        context: SpanContext,
        parent_span_id: str,
        start_unix_ns: int,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self.context = context
        self._tracer = tracer
        self._name = name
        self._parent_span_id = parent_span_id
        self._start_unix_ns = start_unix_ns
        self._attributes = attributes
        self._events: list[SpanEvent] = []
        self._num_dropped_events = 0
        self._is_error = False
        self._ended: Span | None = None

    @property
    def traceparent(self) -> str:
        """For whoever works on this span's behalf."""
        return self.context.traceparent

    @property
    def is_ended(self) -> bool:
        return self._ended is not None

    def set(self, **attributes: AttributeValue) -> None:
        """Attributes whose names are Python names; see `set_all` for dotted ones."""
        self._attributes.update(attributes)

    def set_all(self, attributes: dict[str, AttributeValue]) -> None:
        self._attributes.update(attributes)

    def event(self, name: str, unix_ns: int | None = None, **attributes: AttributeValue) -> None:
        """Something happened at one moment; now if no time is given."""
        if len(self._events) >= MAX_EVENTS:
            self._num_dropped_events += 1
            return
        at = self._tracer.unix_ns() if unix_ns is None else unix_ns
        self._events.append(SpanEvent(name=name, unix_ns=at, attributes=attributes))

    def fail(self, error_type: str) -> None:
        """Mark as an error of this stable code."""
        self._is_error = True
        self._attributes["error.type"] = error_type

    def end(self, unix_ns: int | None = None) -> Span:
        """Close it; the first end counts."""
        if self._ended is None:
            end_unix_ns = self._tracer.unix_ns() if unix_ns is None else unix_ns
            if self._num_dropped_events:
                self._attributes["moonpool.dropped_events"] = self._num_dropped_events
            self._ended = Span(
                trace_id=self.context.trace_id,
                span_id=self.context.span_id,
                parent_span_id=self._parent_span_id,
                name=self._name,
                start_unix_ns=self._start_unix_ns,
                end_unix_ns=max(end_unix_ns, self._start_unix_ns),
                attributes=dict(self._attributes),
                events=tuple(self._events),
                is_error=self._is_error,
            )
            self._tracer.sink(self._ended)
        return self._ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.fail(getattr(exc, "code", None) or type(exc).__name__)
        self.end()


class Tracer:
    """Opens spans.

    Args:
        sink: Takes each span when it has ended; must not block.
        process: Name of this process, an attribute of each span.
        rng: Source of ids.
    """

    def __init__(
        self, *, clock: Clock, sink: Callable[[Span], None], process: str, rng: random.Random
    ) -> None:
        self.sink = sink
        self._clock = clock
        self._process = process
        self._rng = rng

    def start(
        self,
        name: str,
        *,
        parent: str | SpanContext | None = None,
        start_unix_ns: int | None = None,
        attributes: dict[str, AttributeValue] | None = None,
    ) -> OpenSpan:
        """Open a span, as a child of `parent` (a traceparent or a context) or as a new trace's root."""
        above = SpanContext.parse(parent) if isinstance(parent, str) else parent
        trace_id = above.trace_id if above is not None else self._id(128)
        return OpenSpan(
            self,
            name,
            SpanContext(trace_id, self._id(64)),
            above.span_id if above is not None else "",
            self.unix_ns() if start_unix_ns is None else start_unix_ns,
            {"moonpool.process": self._process, **(attributes or {})},
        )

    def unix_ns(self) -> int:
        return round(self._clock.unix() * 1e9)

    def _id(self, num_bits: int) -> str:
        """Hex digits, never all zero."""
        return f"{self._rng.getrandbits(num_bits) or 1:0{num_bits // 4}x}"


@dataclass(slots=True)
class _KeptTrace:
    request_id: str
    spans: list[Span]


class TraceRing:
    """The traces of the last requests, by request id; the oldest goes first.

    Args:
        export: Gets every span, kept or not; must not block.
    """

    def __init__(
        self,
        *,
        max_traces: int,
        max_spans_per_trace: int = 512,
        export: Callable[[Span], None] = lambda _span: None,
    ) -> None:
        self._max_traces = max_traces
        self._max_spans_per_trace = max_spans_per_trace
        self._export = export
        self._by_trace: OrderedDict[str, _KeptTrace] = OrderedDict()
        self._by_request: dict[str, _KeptTrace] = {}

    def __len__(self) -> int:
        return len(self._by_trace)

    def begin(self, request_id: str, root: SpanContext) -> None:
        """From here on spans of this trace are kept under `request_id`.

        A client may send several requests in one trace of its own: the last one has it.
        """
        if not self._max_traces:
            return
        earlier = self._by_trace.pop(root.trace_id, None)
        if earlier is not None:
            self._by_request.pop(earlier.request_id, None)
        kept = _KeptTrace(request_id=request_id, spans=[])
        self._by_trace[root.trace_id] = kept
        self._by_request[request_id] = kept
        while len(self._by_trace) > self._max_traces:
            _, oldest = self._by_trace.popitem(last=False)
            self._by_request.pop(oldest.request_id, None)

    def add(self, span: Span) -> None:
        """A span of this process or of a worker; dropped if its trace is unknown or full."""
        self._export(span)
        kept = self._by_trace.get(span.trace_id)
        if kept is not None and len(kept.spans) < self._max_spans_per_trace:
            kept.spans.append(span)

    def get(self, request_id: str) -> tuple[Span, ...]:
        """Spans of a request by their start; empty if it is unknown or too long ago."""
        kept = self._by_request.get(request_id)
        return tuple(sorted(kept.spans, key=lambda span: span.start_unix_ns)) if kept else ()
