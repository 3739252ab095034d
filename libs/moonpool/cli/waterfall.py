"""A trace as a waterfall in text: nested spans, when they ran, and the attributes that matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonpool.cli.terminal import Glyphs, format_bytes, format_ms
from moonpool.telemetry import names
from moonpool.wire.spans import AttributeValue, Span

_MIN_BAR = 16
_ORDER = (
    names.SPAN_TOKENIZE,
    names.SPAN_QUEUE,
    names.SPAN_ATTEMPT,
    names.SPAN_KV_FETCH,
    names.SPAN_PREFILL,
    names.SPAN_KV_TRANSFER,
    names.SPAN_DECODE,
)

Format = Callable[[AttributeValue], str]


def _plain(text: str) -> Format:
    return lambda value: text.format(value)


#: By attribute, in the order in which they are shown.
_SHOWN: dict[str, Format] = {
    names.ATTR_ERROR: _plain("error {}"),
    "moonpool.outcome": lambda value: (
        f"outcome {value}" if value not in ("first_token", "stop", "length") else ""
    ),
    names.ATTR_REASON: _plain("{}"),
    "moonpool.num_uncached_tokens": _plain("{} uncached tokens"),
    "moonpool.threshold_tokens": _plain("threshold {}"),
    names.ATTR_INPUT_TOKENS: _plain("{} tokens in"),
    names.ATTR_CACHED_TOKENS: _plain("{} cached"),
    names.ATTR_OUTPUT_TOKENS: _plain("{} tokens out"),
    "moonpool.num_chunks": lambda value: f"{value} chunk{'' if value == 1 else 's'}",
    names.ATTR_BYTES: lambda value: format_bytes(float(value)),
    names.ATTR_BACKEND: _plain("over {}"),
    "moonpool.num_reads": _plain("{} reads"),
    "moonpool.num_bad_leaves": lambda value: f"{value} bad digests" if value else "",
    "moonpool.source": lambda value: f"from {str(value).partition('@')[0]}",
    names.ATTR_ATTEMPT: lambda value: f"attempt {value}" if value != 1 else "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """One span, or a moment in one."""

    depth: int
    name: str
    process: str
    start_ms: float
    #: None for a moment.
    duration_ms: float | None
    details: str
    is_error: bool = False


def waterfall_rows(spans: Sequence[Span]) -> list[WaterfallRow]:
    """Roots first, children below their parents by their start.

    A worker's spans are shown below the attempt that they belong to, although their parent is the
    request. A span whose parent is not here is a root: the client's own stays with the client.
    """
    if not spans:
        return []
    origin_ns = min(span.start_unix_ns for span in spans)
    known = {span.span_id for span in spans}
    attempts = {
        span.attributes.get(names.ATTR_ATTEMPT): span.span_id
        for span in spans
        if span.name == names.SPAN_ATTEMPT
    }
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=_by_start):
        parent = span.parent_span_id if span.parent_span_id in known else ""
        if span.name != names.SPAN_ATTEMPT:
            parent = attempts.get(span.attributes.get(names.ATTR_ATTEMPT), parent)
        children.setdefault(parent, []).append(span)
    return list(_rows(children, "", 0, origin_ns))


def waterfall_lines(rows: Sequence[WaterfallRow], glyphs: Glyphs, *, width: int) -> list[str]:
    """Text for `width` columns or more; details go to the end of the line, folded below if long."""
    if not rows:
        return []
    total_ms = max(row.start_ms + (row.duration_ms or 0.0) for row in rows) or 1e-6
    labels = [f"{'  ' * row.depth}{row.name}" for row in rows]
    label_width = max(map(len, labels))
    process_width = max(len(row.process) for row in rows)
    fixed = label_width + process_width + 2 * 12 + 8
    bar_width = max(_MIN_BAR, min(48, width - fixed))
    lines = []
    for label, row in zip(labels, rows, strict=True):
        start = row.start_ms / total_ms
        if row.duration_ms is None:
            at = min(int(start * bar_width), bar_width - 1)
            bar = (" " * at + glyphs.mark).ljust(bar_width)
            took = ""
        else:
            bar = glyphs.interval(start, (row.start_ms + row.duration_ms) / total_ms, bar_width)
            took = format_ms(row.duration_ms)
        mark = f" {glyphs.bad}" if row.is_error else ""
        lines.append(
            f"{label:{label_width}}  {row.process:{process_width}}  {format_ms(row.start_ms):>11}  "
            f"{bar}  {took:>10}{mark}".rstrip()
        )
        if row.details:
            lines.append(f"{'  ' * row.depth}    {row.details}")
    return lines


def _rows(
    children: Mapping[str, Sequence[Span]], parent: str, depth: int, origin_ns: int
) -> Iterator[WaterfallRow]:
    for span in children.get(parent, ()):
        yield WaterfallRow(
            depth=depth,
            name=span.name,
            process=_process(span),
            start_ms=(span.start_unix_ns - origin_ns) / 1e6,
            duration_ms=span.duration_ms,
            details=_details(span),
            is_error=span.is_error,
        )
        for event in span.events:
            if event.name in (names.EVENT_FIRST_TOKEN, names.EVENT_MIGRATED, names.EVENT_PREEMPTED):
                yield WaterfallRow(
                    depth=depth + 1,
                    name=event.name,
                    process=_process(span),
                    start_ms=(event.unix_ns - origin_ns) / 1e6,
                    duration_ms=None,
                    details=", ".join(f"{key} {value}" for key, value in event.attributes.items()),
                )
        yield from _rows(children, span.span_id, depth + 1, origin_ns)


def _process(span: Span) -> str:
    return str(span.attributes.get(names.ATTR_PROCESS, "")).partition("@")[0]


def _details(span: Span) -> str:
    """The attributes that matter, and for a transfer how much of it was hidden."""
    shown = [
        text
        for key, form in _SHOWN.items()
        if key in span.attributes and (text := form(span.attributes[key]))
    ]
    if span.name == names.SPAN_KV_TRANSFER:
        shown += _exposed(span.attributes)
    return ", ".join(shown)


def _exposed(attributes: Mapping[str, AttributeValue]) -> list[str]:
    token, admitted = (
        attributes.get(key, 0)
        for key in ("moonpool.source_first_token_unix_ns", "moonpool.admitted_unix_ns")
    )
    if not isinstance(token, int) or not isinstance(admitted, int) or not token or not admitted:
        return []
    return [f"ready {format_ms((admitted - token) / 1e6)} after token 1 was drawn"]


def _by_start(span: Span) -> tuple[int, int]:
    rank = _ORDER.index(span.name) if span.name in _ORDER else len(_ORDER)
    return span.start_unix_ns, rank
