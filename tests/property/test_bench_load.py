"""The load of a benchmark: schedules keep their rate and shape, prompts their seed."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import InvalidRequestError
from moonpool.inference.generation import TextPrompt, TokenPrompt
from moonpool_loadtest.bench.arrivals import ArrivalKind, ArrivalProcess
from moonpool_loadtest.bench.sse import SseParser
from moonpool_loadtest.bench.workload import (
    BenchRequest,
    Lengths,
    PromptKind,
    WorkloadSpec,
    make_requests,
)

rates = st.floats(min_value=0.01, max_value=1e4)
processes = st.builds(
    ArrivalProcess,
    kind=st.sampled_from(ArrivalKind),
    rate_rps=rates,
    burstiness=st.floats(min_value=0.05, max_value=200.0),
)


@given(process=processes, num_requests=st.integers(0, 200), seed=st.integers())
def test_a_schedule_is_absolute_ascending_and_of_the_asked_rate(
    process: ArrivalProcess, num_requests: int, seed: int
) -> None:
    times = process.schedule(num_requests, random.Random(seed))
    assert times == process.schedule(num_requests, random.Random(seed))
    assert len(times) == num_requests
    assert list(times) == sorted(times)
    assert all(time == 0.0 for time in times[:1])
    if num_requests > 1:
        assert math.isclose(times[-1], (num_requests - 1) / process.rate_rps, rel_tol=1e-9)


def test_an_infinite_rate_sends_all_at_once() -> None:
    process = ArrivalProcess(rate_rps=math.inf)
    assert process.schedule(5, random.Random(0)) == (0.0,) * 5


def cv_of_gaps(process: ArrivalProcess, seed: int) -> float:
    times = process.schedule(6_001, random.Random(seed))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert math.isclose(statistics.fmean(gaps), 1 / process.rate_rps, rel_tol=1e-6)
    return statistics.pstdev(gaps) * process.rate_rps


@given(seed=st.integers(0, 10_000), cv=st.floats(min_value=0.2, max_value=2.0))
@settings(max_examples=15)
def test_burstiness_is_the_shape_of_the_gaps(seed: int, cv: float) -> None:
    process = ArrivalProcess(kind=ArrivalKind.GAMMA, rate_rps=5.0, burstiness=1 / cv**2)
    assert math.isclose(cv_of_gaps(process, seed), cv, rel_tol=0.2)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_poisson_gaps_are_exponential_and_constant_ones_equal(seed: int) -> None:
    poisson = ArrivalProcess(kind=ArrivalKind.POISSON, rate_rps=7.0)
    assert math.isclose(cv_of_gaps(poisson, seed), 1.0, rel_tol=0.12)
    # The share of gaps above the mean is 1/e, which a gamma of another shape would not give.
    times = poisson.schedule(6_001, random.Random(seed))
    num_long = sum(b - a > 1 / 7.0 for a, b in itertools.pairwise(times))
    assert math.isclose(num_long / 6_000, math.exp(-1), abs_tol=0.035)
    constant = ArrivalProcess(kind=ArrivalKind.CONSTANT, rate_rps=7.0)
    assert cv_of_gaps(constant, seed) < 1e-6


lengths = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: f"{pair[0]}:{sum(pair)}"),
    st.integers(1, 80).map(str),
    st.tuples(st.integers(1, 50), st.floats(0.1, 2.0)).map(
        lambda pair: f"lognormal:{pair[0]}:{pair[1]}"
    ),
).map(Lengths.parse)


def units(request: BenchRequest) -> list[str]:
    match request.prompt:
        case TokenPrompt(token_ids=token_ids):
            return [str(token_id) for token_id in token_ids]
        case TextPrompt(text=text):
            return text.split()


@given(
    kind=st.sampled_from(PromptKind),
    inputs=lengths,
    outputs=lengths,
    prefix_length=st.integers(0, 20),
    num_prefixes=st.integers(1, 3),
    seed=st.integers(),
)
@settings(max_examples=40)
def test_requests_follow_their_specification(
    kind: PromptKind,
    inputs: Lengths,
    outputs: Lengths,
    prefix_length: int,
    num_prefixes: int,
    seed: int,
) -> None:
    spec = WorkloadSpec(
        kind=kind,
        input_lengths=inputs,
        output_lengths=outputs,
        prefix_length=prefix_length,
        num_prefixes=num_prefixes,
        vocab_size=1_000,
    )
    schedule = tuple(float(index) for index in range(12))
    requests = make_requests(spec, schedule, seed=seed)
    assert [request.scheduled_s for request in requests] == list(schedule)
    for request in requests:
        assert inputs.low <= len(units(request)) - prefix_length <= inputs.high
        assert outputs.low <= request.max_tokens <= outputs.high
        if isinstance(request.prompt, TokenPrompt):
            assert all(100 <= token_id < 1_000 for token_id in request.prompt.token_ids)
    assert len({tuple(units(request)[:prefix_length]) for request in requests}) <= num_prefixes
    # A longer run begins as a shorter one does; a warm-up is of other prompts.
    assert make_requests(spec, schedule[:5], seed=seed) == requests[:5]
    if inputs.low >= 8:
        warm = make_requests(spec, schedule, seed=seed, stream="warm-up")
        assert not {request.prompt for request in warm} & {request.prompt for request in requests}


def test_lognormal_lengths_have_the_asked_mean() -> None:
    drawn = [Lengths.parse("lognormal:200:0.5").draw(random.Random(seed)) for seed in range(3_000)]
    assert math.isclose(statistics.fmean(drawn), 200, rel_tol=0.05)
    assert math.isclose(statistics.pstdev(drawn), 100, rel_tol=0.1)


@pytest.mark.parametrize("text", ["", "0", "5:2", "-1", "lognormal:5", "lognormal:0:1", "a:b"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="lognormal"):
        Lengths.parse(text)


def test_tokens_need_a_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="vocab-size"):
        make_requests(WorkloadSpec(kind=PromptKind.TOKENS), (0.0,), seed=0)


@given(
    events=st.lists(st.binary(min_size=1).filter(lambda data: not set(data) & set(b"\r\n"))),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(1, 7)),
)
def test_events_do_not_depend_on_how_bytes_arrive(
    events: list[bytes], ending: bytes, cuts: list[int]
) -> None:
    stream = b"".join(b": comment%sdata: %s%s%s" % (ending, e, ending, ending) for e in events)
    parser = SseParser()
    found: list[bytes] = []
    position = 0
    for cut in [*cuts, len(stream)]:
        found += parser.feed(stream[position : position + cut])
        position += cut
    assert found == events
