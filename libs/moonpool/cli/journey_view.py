"""A journey as text: where, why, when each layer's KV arrived, TTFT in parts, gaps between tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moonpool.cli.journey import TTFT_PARTS, Handoff, Journey, group_layers
from moonpool.cli.terminal import Glyphs, format_bytes, format_ms, rounded_parts

_BAR_WIDTH = 40
_MAX_LAYER_ROWS = 10
_LABEL = 16


def journey_lines(journey: Journey, glyphs: Glyphs) -> list[str]:
    """For a terminal of 80 columns or more, without colours."""
    lines = [*_where(journey)]
    if journey.handoff is not None:
        lines += ["", *_arrival(journey.handoff, glyphs)]
    lines += ["", *_ttft(journey, glyphs), "", *_gaps(journey)]
    return lines


def journey_json(journey: Journey) -> dict[str, Any]:
    """The same as JSON; times in milliseconds from the start of the prefill."""
    values = asdict(journey)
    if journey.handoff is not None:
        values["handoff"]["exposed_ms"] = journey.handoff.exposed_ms
        values["handoff"]["share_before_prefill_end"] = journey.handoff.share_before_end
    return values


def _where(journey: Journey) -> list[str]:
    attempts = f" in {journey.num_attempts} attempts" if journey.num_attempts > 1 else ""
    chunks = "one chunk" if journey.num_chunks == 1 else f"{journey.num_chunks} chunks"
    return [
        _row("prefilled on", f"{journey.prefill_worker}, in {chunks}{attempts}"),
        _row("because", journey.reason),
        _row("decoded on", journey.decode_worker),
        _row(
            "tokens",
            f"{journey.num_prompt_tokens:,} in the prompt ({journey.num_cached_tokens:,} of them "
            f"cached), {journey.num_completion_tokens:,} in the answer ({journey.finish_reason})",
        ),
    ]


def _arrival(handoff: Handoff, glyphs: Glyphs) -> list[str]:
    """Bars on one time axis from the prefill's start to the admission."""
    lines = [
        f"KV: {format_bytes(handoff.num_bytes)} over {handoff.transport} in {handoff.num_reads} "
        f"reads from {handoff.source.partition('@')[0]}, read layer by layer while it computed",
        "",
        f"  {'layer':7}{'read by the decode worker':{_BAR_WIDTH + 2}}verified, against prefill's end",
    ]
    span_ms = max(handoff.admitted_ms, handoff.prefill_ended_ms, 1e-6)
    for group in group_layers(handoff.layers, max_rows=_MAX_LAYER_ROWS):
        first, last = group[0].layer, group[-1].layer
        verified_ms = max(layer.verified_ms for layer in group)
        bar = glyphs.interval(
            min(layer.started_ms for layer in group) / span_ms,
            verified_ms / span_ms,
            _BAR_WIDTH,
            mark=handoff.prefill_ended_ms / span_ms,
        )
        name = str(first) if first == last else f"{first}-{last}"
        off_ms = verified_ms - handoff.prefill_ended_ms
        when = f"{format_ms(abs(off_ms)):>10} {'before' if off_ms <= 0 else 'after'}"
        lines.append(f"  {name:7}{bar}  {when}")
    lines += [
        f"  {glyphs.mark} prefill's last layer was computed {format_ms(handoff.prefill_ended_ms)} "
        "after it began",
        "",
        _row(
            "overlap",
            f"{handoff.share_before_end:.1%} of the bytes lay verified on decode when prefill ended",
        ),
        _row(
            "exposed",
            f"{format_ms(handoff.exposed_ms)} from token 1 drawn on prefill to ready on decode",
        ),
    ]
    if handoff.num_bad_leaves:
        lines.append(
            _row("digests", f"{handoff.num_bad_leaves} pieces did not match and were recomputed")
        )
    return lines


def _ttft(journey: Journey, glyphs: Glyphs) -> list[str]:
    parts = rounded_parts(journey.ttft_parts_ms)
    total = sum(parts.values())
    lines = ["Time to the first token"]
    order = [*(name for name in TTFT_PARTS if name in parts)]
    order += [name for name in parts if name not in TTFT_PARTS]
    for name in order:
        bar = glyphs.bar(parts[name] / total if total else 0.0, 20)
        lines.append(
            f"  {name:14}{parts[name]:>9,.1f} ms  {bar}  {TTFT_PARTS.get(name, '')}".rstrip()
        )
    lines.append(
        f"  {'sum':14}{total:>9,.1f} ms  {'':20}  seen by this client: "
        f"{format_ms(journey.client_ttft_ms)}"
    )
    return lines


def _gaps(journey: Journey) -> list[str]:
    gaps = journey.gaps
    if gaps is None:
        return [_row("between tokens", "one token: no gap")]
    rate = 1_000 / gaps.p50_ms if gaps.p50_ms else 0.0
    return [
        _row(
            "between tokens",
            f"p50 {format_ms(gaps.p50_ms)}, p99 {format_ms(gaps.p99_ms)}, max "
            f"{format_ms(gaps.max_ms)} over {gaps.num_gaps} gaps ({rate:,.0f} tokens/s)",
        ),
        _row("token 1 to 2", f"{format_ms(gaps.first_ms)}: from one worker to the other")
        if journey.handoff is not None
        else _row("token 1 to 2", format_ms(gaps.first_ms)),
    ]


def _row(label: str, text: str) -> str:
    return f"{label:{_LABEL}}{text}"
