"""`moonpool trace`: one request's spans, asked of its router; no collector is needed."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from moonpool.cli.failure import EXIT_OK
from moonpool.cli.target import Target
from moonpool.cli.terminal import Glyphs, make_console, print_json
from moonpool.cli.waterfall import waterfall_lines, waterfall_rows
from moonpool.rpc.admin import fetch_trace
from moonpool.wire.spans import Span

_DEADLINE_S = 5.0


def run_trace(request_id: str, target: Target, *, is_json: bool) -> int:
    """Print the waterfall, or the spans as JSON.

    Raises:
        NotFoundError: The router does not know the request, or no longer.
        UnavailableError: It does not answer.
    """
    spans = asyncio.run(
        fetch_trace(target.address, request_id, key=target.api_key, deadline_s=_DEADLINE_S)
    )
    if is_json:
        print_json({"request_id": request_id, "spans": [span_json(span) for span in spans]})
        return EXIT_OK
    console = make_console()
    console.print(f"request {request_id}  trace {spans[0].trace_id}", soft_wrap=True)
    for line in waterfall_lines(waterfall_rows(spans), Glyphs.of(console), width=console.width):
        console.print(line, soft_wrap=True, markup=False)
    return EXIT_OK


def span_json(span: Span) -> dict[str, Any]:
    """A span with its duration, for programs."""
    return {**asdict(span), "duration_ms": span.duration_ms}
