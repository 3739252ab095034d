"""What the experiments make of traces and gaps; the clusters behind them are not started here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.errors import InternalError
from moonpool.telemetry import names
from moonpool.wire.spans import AttributeValue, Span, SpanEvent
from moonpool.wire.steps import StepRecord
from moonpool_loadtest.experiments.lab import Answer
from moonpool_loadtest.experiments.numbers import Distribution, Sample, quantile, ratio_interval
from moonpool_loadtest.experiments.overlap import read_handoff
from moonpool_loadtest.experiments.receiving import (
    Arrival,
    covered_s,
    split_by_arrivals,
    steady_gaps,
)
from moonpool_loadtest.experiments.report import Finding

MS = 1_000_000
#: (ended at, bytes): both layers of the first chunk, then both of the last one.
READS = ((10, 100), (20, 100), (60, 40), (74, 40))


def span(name: str, events: tuple[SpanEvent, ...] = (), **moments_ms: int) -> Span:
    attributes: dict[str, AttributeValue] = {
        f"moonpool.{key}_unix_ns": value * MS for key, value in moments_ms.items()
    }
    return Span(
        trace_id="0" * 31 + "1",
        span_id="0" * 15 + "1",
        parent_span_id="",
        name=name,
        start_unix_ns=0,
        end_unix_ns=0,
        attributes=attributes,
        events=events,
    )


def chunk(start: int, end: int) -> SpanEvent:
    return SpanEvent(name="chunk", unix_ns=0, attributes={"start": start, "end": end})


def make_spans() -> list[Span]:
    """80 tokens and 31 more (5 blocks, 2 blocks), two layers; D verifies its last read after 74 ms."""
    transfer = span(
        names.SPAN_KV_TRANSFER,
        tuple(
            SpanEvent(name="read", unix_ns=at * MS, attributes={"num_bytes": num_bytes})
            for at, num_bytes in READS
        ),
        commit_received=82,
        admitted=83,
    )
    transfer = replace(
        transfer,
        attributes={**transfer.attributes, names.ATTR_BYTES: 280, "moonpool.num_bad_leaves": 0},
    )
    return [
        span(
            names.SPAN_PREFILL,
            (chunk(0, 80), chunk(80, 111)),
            last_layer=70,
            forward_ended=75,
            first_token=80,
        ),
        transfer,
        span(names.SPAN_DECODE, joined=84, first_step=100),
    ]


ANSWER = Answer(sent_unix_ns=-20 * MS, token_unix_ns=[81 * MS, 101 * MS, 111 * MS])


def test_a_handoff_is_read_from_its_spans() -> None:
    handoff = read_handoff(make_spans(), ANSWER, num_layers=2)
    assert handoff.share_at_last_layer == 240 / 280
    assert handoff.share_at_forward_end == 1.0
    # The last chunk's second layer: 2 of 7 blocks, half of their bytes.
    assert handoff.bound == pytest.approx(1 - 1 / 7)
    assert handoff.overlap == pytest.approx(1.0)
    assert (handoff.last_layer_to_verified_ms, handoff.last_layer_to_token_ms) == (4, 10)
    assert (handoff.commit_ms, handoff.admitted_ms, handoff.exposed_ms) == (2, 3, 4)
    assert (handoff.first_gap_ms, handoff.client_first_gap_ms) == (20, 20)
    assert handoff.ttft_ms == 101


def test_what_is_not_one_clean_handoff_is_refused() -> None:
    prefill, transfer, decode = make_spans()
    with pytest.raises(InternalError, match="no span"):
        read_handoff([prefill, decode], ANSWER, num_layers=2)
    with pytest.raises(InternalError, match="one clean attempt"):
        read_handoff([prefill, prefill, transfer, decode], ANSWER, num_layers=2)
    with pytest.raises(InternalError, match="do not sum"):
        read_handoff(
            [prefill, replace(transfer, events=transfer.events[1:]), decode], ANSWER, num_layers=2
        )
    unknown = replace(prefill, attributes={**prefill.attributes, "moonpool.last_layer_unix_ns": 0})
    with pytest.raises(InternalError, match="last_layer"):
        read_handoff([unknown, transfer, decode], ANSWER, num_layers=2)


def test_gaps_lie_within_the_window() -> None:
    assert ANSWER.gaps_ms(start_ns=0, end_ns=200 * MS) == [20, 10]
    assert ANSWER.gaps_ms(start_ns=0, end_ns=111 * MS) == [20]
    assert ANSWER.gaps_ms(start_ns=100 * MS, end_ns=111 * MS) == []


def test_quantiles_are_values_of_the_sample() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([3.0], 0.99) == 3.0
    gaps = Distribution.of(values)
    assert (gaps.num, gaps.p50, gaps.p99, gaps.longest) == (100, 50, 99, 100)
    assert str(Sample(values=(3.0, 1.0, 2.0))) == "2 [1 .. 3]"


def test_a_ratio_of_quantiles_is_told_with_what_chance_makes_of_it() -> None:
    values = [100.0 + number % 10 for number in range(60)]
    low, high = ratio_interval([2.0 * value for value in values], [100.0], 0.5)
    assert 2.04 <= low < 2.08 < high <= 2.14
    low, high = ratio_interval([*values, 500.0, 500.0, 500.0], values, 0.95)
    assert low <= 1.0 < 4.0 < high


@pytest.mark.parametrize(
    ("value", "is_upper", "verdict"),
    [
        (0.99, False, "met"),
        (0.96, False, "met, aim missed"),
        (0.94, False, "MISSED"),
        (0.94, True, "met"),
        (1.0, True, "MISSED"),
    ],
)
def test_a_finding_is_judged_by_bar_and_aim(value: float, is_upper: bool, verdict: str) -> None:
    bar, aim = (0.99, 0.95) if is_upper else (0.95, 0.99)
    finding = Finding(what="share", value=value, bar=bar, aim=aim, is_upper=is_upper)
    assert finding.verdict == verdict
    assert finding.is_met is (verdict != "MISSED")
    assert Finding(what="other", value=value).verdict == ""


def step(number: int, at_ms: int, num_tokens: int = 8) -> StepRecord:
    return StepRecord(
        step=number,
        planned_unix_ns=0,
        computed_unix_ns=at_ms * MS,
        num_tokens=num_tokens,
        forward_s=0.0,
        logits_s=0.0,
        sample_s=0.0,
    )


def test_gaps_while_receiving_are_those_of_steady_steps_within_which_a_read_was_under_way() -> None:
    steps = [step(1, 0), step(2, 10), step(3, 25, 9), step(4, 40), step(5, 52), step(7, 70)]
    steps += [step(8, 85), step(9, 200)]
    gaps = steady_gaps(steps, num_tokens=8, start_ns=0, end_ns=100 * MS)
    assert gaps == [(0, 10 * MS), (40 * MS, 52 * MS), (70 * MS, 85 * MS)]
    arrivals = [
        Arrival(started_unix_ns=start * MS, ended_unix_ns=end * MS, num_bytes=1)
        for start, end in ((10, 40), (30, 41), (60, 62), (84, 90))
    ]
    assert split_by_arrivals(gaps, arrivals) == ([12.0, 15.0], [10.0])
    assert covered_s(arrivals) == pytest.approx(0.039)
