"""Answer: what a slow client has not taken merges; the end always comes last."""

from __future__ import annotations

import random

import pytest

from moonpool.clock import ManualClock
from moonpool.dispatch.effects import EndRequest
from moonpool.errors import InternalError, MoonpoolError, UnavailableError
from moonpool.ids import RequestId
from moonpool.inference.answer_text import AnswerText
from moonpool.inference.generation import GenerationChunk, GenerationDone, GenerationEvent, Usage
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.spans import Span, Tracer
from moonpool_router.answer import Answer, PrefillTimes
from moonpool_router.answer_trace import AnswerTrace
from moonpool_router.books import ROUTER_METRICS, RouterBooks


class Letters:
    """Token 0 is a, 1 is b, ..."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


def make_answer(*stop: str, spans: list[Span] | None = None) -> Answer:
    sink = [] if spans is None else spans
    tracer = Tracer(clock=ManualClock(), sink=sink.append, process="r", rng=random.Random(0))
    request = InferenceRequest(
        request_id=RequestId("r"), model="m", prompt_token_ids=(1,), sampling=SamplingParams()
    )
    return Answer(
        request,
        AnswerText(Letters(), stop),
        trace=AnswerTrace(tracer, tracer.start("root")),
        books=RouterBooks(Metrics(ROUTER_METRICS), model="m"),
        arrived_unix_s=10.0,
        tokenized_unix_s=10.1,
    )


def run(first_position: int, *token_ids: int, finish: FinishReason | None = None) -> TokenRun:
    return TokenRun(first_position=first_position, token_ids=token_ids, finish_reason=finish)


def end(
    finish_reason: FinishReason | None = FinishReason.LENGTH, error: MoonpoolError | None = None
) -> EndRequest:
    return EndRequest(
        request_id=RequestId("r"),
        finish_reason=finish_reason,
        usage=Usage(num_prompt_tokens=1, num_completion_tokens=3, num_cached_tokens=0),
        error=error,
        error_code=error.code if error else None,
    )


async def read(answer: Answer) -> list[GenerationEvent]:
    return [event async for event in answer]


async def test_what_is_not_taken_merges_into_one_chunk() -> None:
    answer = make_answer()
    for position in range(3):
        assert not answer.on_tokens(run(position, position), 11.0)
    answer.on_end(end())
    chunk, done = await read(answer)
    assert isinstance(chunk, GenerationChunk)
    assert (chunk.text, chunk.token_ids, chunk.first_position) == ("abc", (0, 1, 2), 0)
    assert isinstance(done, GenerationDone)
    assert done.usage.num_completion_tokens == 3


async def test_a_reader_that_keeps_up_gets_each_token_at_once() -> None:
    answer = make_answer()
    events = aiter(answer)
    for position in range(3):
        answer.on_tokens(run(position, position), 11.0)
        event = await anext(events)
        assert isinstance(event, GenerationChunk)
        assert (event.token_ids, event.first_position) == ((position,), position)


async def test_after_a_stop_string_nothing_more_is_taken() -> None:
    answer = make_answer("b")
    assert answer.on_tokens(run(0, 0, 1, 2), 11.0)
    assert answer.num_tokens == 2
    assert not answer.on_tokens(run(3, 3), 11.0)
    answer.on_end(end(FinishReason.STOP))
    chunk, done = await read(answer)
    assert isinstance(chunk, GenerationChunk)
    assert (chunk.text, chunk.token_ids) == ("a", (0, 1))
    assert isinstance(done, GenerationDone)
    assert done.finish_reason is FinishReason.STOP


async def test_a_failure_comes_after_what_was_there_before_it() -> None:
    answer = make_answer()
    answer.on_tokens(run(0, 0), 11.0)
    answer.on_end(end(None, InternalError("no")))
    events = aiter(answer)
    assert isinstance(await anext(events), GenerationChunk)
    with pytest.raises(InternalError):
        await anext(events)


async def test_a_failure_from_outside_comes_first_and_is_the_only_one() -> None:
    answer = make_answer()
    answer.fail(UnavailableError("down"))
    answer.on_end(end())
    with pytest.raises(UnavailableError):
        await read(answer)


async def test_a_failure_from_outside_ends_the_span_of_the_wait() -> None:
    spans: list[Span] = []
    answer = make_answer(spans=spans)
    answer.fail(UnavailableError("down"))
    answer.on_end(end(None, InternalError("no")))
    (queue,) = spans
    assert (queue.name, queue.is_error) == (names.SPAN_QUEUE, True)
    assert queue.attributes["error.type"] == "service_unavailable"


async def test_ttft_parts_come_from_both_clocks() -> None:
    answer = make_answer()
    answer.on_prefilled(PrefillTimes(started_unix_s=10.2, ended_unix_s=10.7))
    answer.on_tokens(run(0, 0, finish=FinishReason.LENGTH), 10.8)
    answer.on_end(end())
    done = (await read(answer))[-1]
    assert isinstance(done, GenerationDone)
    assert done.timing.ttft_ms == pytest.approx(800)
    assert done.timing.ttft_parts_ms == pytest.approx(
        {"tokenize": 100, "queue": 0, "worker_queue": 100, "prefill": 500, "deliver": 100}
    )
