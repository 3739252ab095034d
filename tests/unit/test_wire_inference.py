from __future__ import annotations

import pytest

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.errors import InvalidRequestError
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    MAX_CLIENT_REQUEST_ID_LENGTH,
    ChatMessage,
    ChatPrompt,
    GenerationChunk,
    GenerationDone,
    GenerationEvent,
    GenerationRequest,
    PlacementSummary,
    Prompt,
    SamplingOptions,
    TextPrompt,
    Timing,
    TokenPrompt,
    Usage,
)
from moonpool.inference.output import FinishReason
from moonpool.wire.inference import (
    generation_event_from_pb,
    generation_event_to_pb,
    generation_request_from_pb,
    generation_request_to_pb,
)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(text=""),
        ChatPrompt(messages=()),
        ChatPrompt(messages=(ChatMessage(role="user", content="hi"),)),
        TokenPrompt(token_ids=(1, 2, 3)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(
            temperature=0.0, top_p=0.5, top_k=0, seed=-5, max_tokens=0, ignore_eos=True
        ),
        SamplingOptions(stop=("a", "b"), stop_token_ids=(7,)),
    ],
)
def test_a_request_survives_the_wire(prompt: Prompt, options: SamplingOptions) -> None:
    request = GenerationRequest(
        prompt=prompt, model="m", options=options, cache_salt="s", client_request_id="c"
    )
    message = pb.GenerateRequest.FromString(generation_request_to_pb(request).SerializeToString())
    assert generation_request_from_pb(message, deadline_s=None) == request


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1] * 2**20)), "prompt"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 4_097)),
            "messages",
        ),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(stop_token_ids=[1] * 1_025)),
            "stop_token_ids",
        ),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(stop=["a"] * 5)), "stop"),
    ],
    ids=["prompt", "messages", "stop_token_ids", "stop"],
)
def test_a_list_that_is_too_long_is_refused(message: pb.GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generation_request_from_pb(message, deadline_s=None)
    assert caught.value.param == param


def test_a_prompt_that_the_model_cannot_take_is_not_copied() -> None:
    message = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(16)))
    generation_request_from_pb(message, deadline_s=None, max_model_len=17)
    with pytest.raises(InvalidRequestError) as caught:
        generation_request_from_pb(message, deadline_s=None, max_model_len=16)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_roles_are_those_of_the_http_door() -> None:
    def asking(*roles: str) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=role) for role in roles])
        )

    request = generation_request_from_pb(asking("developer", "user", "assistant"), deadline_s=None)
    assert isinstance(request.prompt, ChatPrompt)
    assert [message.role for message in request.prompt.messages] == ["system", "user", "assistant"]
    for role in ("tool", "", "User", "x" * 1_000_000):
        with pytest.raises(InvalidRequestError, match="allowed are system, developer") as caught:
            generation_request_from_pb(asking("user", role), deadline_s=None)
        assert caught.value.param == "messages[1].role"
        assert len(caught.value.message) < 200


def test_a_label_is_cut() -> None:
    for message in (
        pb.GenerateRequest(text="a", client_request_id="x" * 500),
        pb.GenerateRequest(text="a"),
    ):
        request = generation_request_from_pb(message, deadline_s=None, request_label="x" * 500)
        assert request.client_request_id == "x" * MAX_CLIENT_REQUEST_ID_LENGTH


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generation_request_from_pb(pb.GenerateRequest(), deadline_s=None)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "event",
    [
        GenerationChunk(request_id=RequestId("r"), text="täxt", token_ids=(1, 2), first_position=3),
        GenerationDone(
            request_id=RequestId("r"),
            model="m",
            finish_reason=FinishReason.LENGTH,
            usage=Usage(num_prompt_tokens=1, num_completion_tokens=2, num_cached_tokens=0),
            timing=Timing(ttft_ms=3.0, ttft_parts_ms={"queue": 1.0, "prefill": 2.0}),
            placement=PlacementSummary(
                prefill_worker="p", decode_worker="d", num_attempts=1, reason="remote"
            ),
        ),
    ],
)
def test_an_event_survives_the_wire(event: GenerationEvent) -> None:
    message = pb.GenerateReply.FromString(generation_event_to_pb(event).SerializeToString())
    assert generation_event_from_pb(message) == event


def test_an_empty_reply_is_an_error() -> None:
    with pytest.raises(ValueError, match="kind"):
        generation_event_from_pb(pb.GenerateReply())
