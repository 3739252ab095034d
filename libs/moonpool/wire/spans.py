"""Closed spans: what a worker sends to its router and an exporter sends to a collector."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.wire.fields import MAX_NAME_LENGTH, between, invalid, text

AttributeValue = str | bool | int | float

_MAX_JSON_LENGTH = 64 * 1024
_MAX_EVENTS = 1_024
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    name: str
    unix_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a request that has ended. Ids are W3C's: 32 and 16 hex digits."""

    trace_id: str
    span_id: str
    #: Empty for a root.
    parent_span_id: str
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    is_error: bool = False

    @property
    def duration_ms(self) -> float:
        return (self.end_unix_ns - self.start_unix_ns) / 1e6


def span_to_pb(span: Span) -> pb.SpanReport:
    return pb.SpanReport(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        start_unix_ns=span.start_unix_ns,
        end_unix_ns=span.end_unix_ns,
        attributes_json=json.dumps(dict(span.attributes)) if span.attributes else "",
        events_json=json.dumps([[e.name, e.unix_ns, dict(e.attributes)] for e in span.events])
        if span.events
        else "",
        is_error=span.is_error,
    )


def span_from_pb(message: pb.SpanReport, path: str = "span") -> Span:
    """Raises InvalidMessageError."""
    if not _TRACE_ID.fullmatch(message.trace_id):
        raise invalid(f"{path}.trace_id", "is not 32 hex digits")
    if not _SPAN_ID.fullmatch(message.span_id):
        raise invalid(f"{path}.span_id", "is not 16 hex digits")
    if message.parent_span_id and not _SPAN_ID.fullmatch(message.parent_span_id):
        raise invalid(f"{path}.parent_span_id", "is not 16 hex digits")
    start, end = message.start_unix_ns, message.end_unix_ns
    return Span(
        trace_id=message.trace_id,
        span_id=message.span_id,
        parent_span_id=message.parent_span_id,
        name=text(message.name, f"{path}.name", max_length=MAX_NAME_LENGTH),
        start_unix_ns=start,
        end_unix_ns=between(end, f"{path}.end_unix_ns", low=start, high=2**64 - 1),
        attributes=_attributes(
            _parsed(message.attributes_json, f"{path}.attributes_json", {}),
            f"{path}.attributes_json",
        ),
        events=_events(message.events_json, f"{path}.events_json"),
        is_error=message.is_error,
    )


def _events(source: str, path: str) -> tuple[SpanEvent, ...]:
    items = _parsed(source, path, [])
    if not isinstance(items, list) or len(items) > _MAX_EVENTS:
        raise invalid(path, f"is not a list of at most {_MAX_EVENTS} events")
    events: list[SpanEvent] = []
    for item in items:
        match item:
            case [str(name), int(unix_ns), dict(attributes)] if not isinstance(unix_ns, bool):
                events.append(
                    SpanEvent(
                        name=text(name, path, max_length=MAX_NAME_LENGTH),
                        unix_ns=between(unix_ns, path, low=0, high=2**64 - 1),
                        attributes=_attributes(attributes, path),
                    )
                )
            case _:
                raise invalid(path, "has an event that is not [name, unix_ns, attributes]")
    return tuple(events)


def _parsed(source: str, path: str, default: Any) -> Any:  # Any: JSON
    if not source:
        return default
    text(source, path, max_length=_MAX_JSON_LENGTH)
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise invalid(path, "is not JSON") from error


def _attributes(value: Any, path: str) -> dict[str, AttributeValue]:  # Any: JSON
    if not isinstance(value, dict) or not all(
        isinstance(item, str | bool | int | float) for item in value.values()
    ):
        raise invalid(path, "is not an object of strings, numbers and booleans")
    return value
