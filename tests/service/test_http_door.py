"""The HTTP door over a real router and workers that the test plays: what goes in and what comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from moonpool.core.protocol import BlockLedger, RefuseReason
from moonpool.handoff.messages import AbortRequest, DecodeRequest
from moonpool.inference.output import FinishReason
from moonpool.rpc.admin import fetch_trace
from moonpool.telemetry.names import METRICS
from moonpool.wire.worker import LoadReport
from moonpool_router.books import ROUTER_METRICS
from support.eventually import eventually
from support.fake_worker import FakeWorker, fake_worker
from support.raw_http import RawHttp, RawResponse, post, raw_http
from support.router import RouterUnderTest, router

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    router: RouterUnderTest
    worker: FakeWorker
    client: httpx.AsyncClient

    @property
    def port(self) -> int:
        return int(self.router.running.facts["http_port"])

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def raw(self, data: bytes, method: str = "POST") -> RawResponse:
        async with raw_http(self.port) as raw:
            await raw.send(data)
            return await raw.response(method)

    async def tell_load(self, load: LoadReport) -> None:
        """The worker reports it, and the router knows."""
        self.worker.load = load
        self.worker.send()

        async def is_known() -> bool:
            (worker,) = (await self.router.client.status()).workers
            return worker.load == load

        await eventually(is_known, timeout_s=10, what="the load is known")

    async def until_queued(self, num_requests: int) -> None:
        async def is_so() -> bool:
            return (await self.router.client.status()).num_queued == num_requests

        await eventually(is_so, timeout_s=10, what=f"{num_requests} requests wait")

    async def metric(self, line: str) -> float:
        """A sample's value, 0 if there is none."""
        text = (await self.client.get("/metrics")).text
        values = [float(row.split()[-1]) for row in text.splitlines() if row.startswith(line)]
        return sum(values)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """One router and one decode worker for all tests of this file; nothing is left running."""
    path = tmp_path_factory.mktemp("router")
    async with router(path, max_body_bytes=100_000) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        url = str(r.running.facts["http_url"])
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            door = Door(router=r, worker=worker, client=client)
            yield door
            assert worker.session is not None
            assert worker.session.messages.empty()


def error_of(response: httpx.Response) -> Any:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert len(response.headers["x-request-id"]) == 32
    return error


def events_of(body: str) -> list[Any]:
    """The JSON of each event of a stream, which must end as streams do."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]", body
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


# -- answers --


async def test_a_chat_is_answered(door: Door) -> None:
    asking = asyncio.create_task(
        door.post(
            CHAT,
            {
                "model": "tiny",
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "one"},
                            {"type": "text", "text": "two"},
                        ],
                        "foo": 1,
                    },
                ],
                "max_completion_tokens": 3,
                "temperature": 0,
                "top_k": 5,
                "seed": -1,
                "stop": "END",
                "n": 1,
                "presence_penalty": 0.0,
                "logit_bias": {},
                "logprobs": False,
                "response_format": {"type": "text"},
                "tools": None,
                "user": "somebody",
                "metadata": {"a": "b"},
                "bar": {"deep": [1]},
                "moonpool": {"details": True},
            },
            x_request_id="my label",
        )
    )
    command = await door.worker.next(DecodeRequest)
    sampling = command.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (3, 0.0, 5)
    assert sampling.seed == 2**64 - 1
    door.worker.tokens(command, 0, [70, 71])
    door.worker.tokens(command, 2, [72], finish=FinishReason.LENGTH)
    response = await asking
    assert response.status_code == 200
    request_id = response.headers["x-request-id"]
    assert request_id == command.request.request_id
    assert response.headers["x-warning"] == ("ignored unknown parameters: bar, messages[1].foo")
    answer = response.json()
    assert answer["id"] == f"chatcmpl-{request_id}"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "def", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    num_prompt = len(command.request.prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "moonpool": {"cached_tokens_by_source": {"device": 0, "peer": 0, "store": 0}},
    }
    details = answer["moonpool"]
    assert details["request_id"] == request_id
    assert details["placement"]["decode_worker"] == "decode-0"
    assert sum(details["timing"]["ttft_parts_ms"].values()) == pytest.approx(
        details["timing"]["ttft_ms"]
    )
    assert await fetch_trace(door.router.client.address, request_id, key=None, deadline_s=5), (
        "the id that a client gets finds the trace"
    )


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("abc", None), (["abc"], None), ([5, 6, 7], (5, 6, 7)), ([[5, 6, 7]], (5, 6, 7))],
)
async def test_a_text_is_completed(
    door: Door, prompt: Any, token_ids: tuple[int, ...] | None
) -> None:
    asking = asyncio.create_task(door.post(TEXT, {"prompt": prompt}))
    command = await door.worker.next(DecodeRequest)
    assert command.request.sampling.max_tokens == 16
    if token_ids is not None:
        assert command.request.prompt_token_ids == token_ids
    door.worker.tokens(command, 0, [70, 2], finish=FinishReason.STOP)
    response = await asking
    answer = response.json()
    assert "x-warning" not in response.headers
    assert "moonpool" not in answer
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "d", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_chat_is_streamed(door: Door) -> None:
    body = {
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
        "moonpool": {"details": True},
    }
    asking = asyncio.create_task(door.post(CHAT, body))
    command = await door.worker.next(DecodeRequest)
    door.worker.tokens(command, 0, [70])
    door.worker.tokens(command, 1, [71, 72], finish=FinishReason.LENGTH)
    response = await asking
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last, usage = events_of(response.text)
    assert {event["id"] for event in (*chunks, last, usage)} == {
        f"chatcmpl-{response.headers['x-request-id']}"
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "def"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in (*chunks, last))
    assert last["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert last["moonpool"]["placement"]["decode_worker"] == "decode-0"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


async def test_a_text_is_streamed_without_usage(door: Door) -> None:
    asking = asyncio.create_task(door.post(TEXT, {"prompt": "x", "stream": True}))
    command = await door.worker.next(DecodeRequest)
    door.worker.tokens(command, 0, [70, 71], finish=FinishReason.LENGTH)
    events = events_of((await asking).text)
    assert "".join(event["choices"][0]["text"] for event in events) == "de"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in events)


async def test_what_fails_before_the_first_token_has_its_status_and_later_is_an_event(
    door: Door,
) -> None:
    body = {"messages": MESSAGES, "stream": True}
    timed = asyncio.create_task(door.post(CHAT, body, x_request_timeout_ms="150"))
    command = await door.worker.next(DecodeRequest)
    response = await timed
    assert await door.worker.next(AbortRequest)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert error_of(response)["code"] == "deadline_exceeded"
    assert error_of(response)["type"] == "timeout_error"

    timed = asyncio.create_task(door.post(CHAT, body, x_request_timeout_ms="300"))
    command = await door.worker.next(DecodeRequest)
    door.worker.tokens(command, 0, [70])
    response = await timed
    await door.worker.next(AbortRequest)
    assert response.status_code == 200
    first, failure = events_of(response.text)
    assert first["choices"][0]["delta"]["content"] == "d"
    assert failure["error"]["code"] == "deadline_exceeded"


@asynccontextmanager
async def busy(door: Door) -> AsyncIterator[None]:
    """The worker has no block left: what comes now waits in the router."""
    free, full = (
        door.worker.load,
        LoadReport(
            ledger=BlockLedger(num_total=1000, num_free=0, num_cached=0, num_referenced=1000)
        ),
    )
    await door.tell_load(full)
    try:
        yield
    finally:
        await door.tell_load(free)


async def test_a_deadline_that_passes_in_the_queue_is_another_status(door: Door) -> None:
    async with busy(door):
        response = await door.post(CHAT, {"messages": MESSAGES}, x_request_timeout_ms="100")
    assert response.status_code == 408
    assert error_of(response)["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"


async def test_a_trace_context_is_taken_over(door: Door) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traceparent = f"00-{trace_id}-b7ad6b7169203331-01"
    asking = asyncio.create_task(door.post(TEXT, {"prompt": "x"}, traceparent=traceparent))
    command = await door.worker.next(DecodeRequest)
    assert command.request.traceparent.split("-")[1] == trace_id
    # A worker that does not take it costs the client nothing.
    door.worker.refuse(command.attempt_id, RefuseReason.NO_BLOCKS)
    command = await door.worker.next(DecodeRequest)
    door.worker.tokens(command, 0, [70], finish=FinishReason.LENGTH)
    assert (await asking).status_code == 200


@pytest.mark.parametrize("top_k", [2**31, 2**32, 2**64])
async def test_a_top_k_beyond_the_vocabulary_is_all_of_it(door: Door, top_k: int) -> None:
    asking = asyncio.create_task(door.post(TEXT, {"prompt": "x", "top_k": top_k}))
    command = await door.worker.next(DecodeRequest)
    assert 0 < command.request.sampling.top_k < 2**31
    door.worker.tokens(command, 0, [70], finish=FinishReason.LENGTH)
    assert (await asking).status_code == 200


async def test_special_tokens_in_a_message_are_text(door: Door) -> None:
    content = "<|im_end|>\x00\u200d\U0001f600"
    asking = asyncio.create_task(
        door.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    )
    command = await door.worker.next(DecodeRequest)
    # The template closes one message; the user's own marker is not that token.
    assert command.request.prompt_token_ids.count(2) == 1
    door.worker.tokens(command, 0, [70], finish=FinishReason.LENGTH)
    assert (await asking).status_code == 200


# -- refusals --

CHAT_ROWS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": MESSAGES, "model": "gpt-4"}, 404, "model_not_found", "model"),
    ({"messages": MESSAGES, "model": "x" * 999}, 400, "string_too_long", "model"),
    ({}, 400, "missing_required_parameter", "messages"),
    ({"messages": []}, 400, "empty_array", "messages"),
    ({"messages": "hi"}, 400, "invalid_type", "messages"),
    ({"messages": [{"content": "x"}]}, 400, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400, "unsupported_content", "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
        400, "unsupported_parameter", "messages[0].tool_calls",
    ),
    ({"messages": MESSAGES, "chat_template": "x"}, 400, "unsupported_parameter", "chat_template"),
    (
        {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
        400, "unsupported_parameter", "chat_template_kwargs",
    ),
    (
        {"messages": [{"role": "user", "content": "a" * 600}]},
        400, "context_length_exceeded", "messages",
    ),
    ({"messages": MESSAGES, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": "12"}, 400, "invalid_value", "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": True}, 400, "invalid_value", "max_tokens"),
    ({"messages": MESSAGES, "max_tokens": 10**9}, 400, "context_length_exceeded", "max_tokens"),
    (
        {"messages": MESSAGES, "max_completion_tokens": 10**9},
        400, "context_length_exceeded", "max_completion_tokens",
    ),
    (
        {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2},
        400, "conflicting_parameters", "max_tokens",
    ),
    ({"messages": MESSAGES, "min_tokens": 2}, 400, "unsupported_parameter", "min_tokens"),
    ({"messages": MESSAGES, "temperature": -1}, 400, "invalid_value", "temperature"),
    ({"messages": MESSAGES, "temperature": 2.1}, 400, "invalid_value", "temperature"),
    ({"messages": MESSAGES, "temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"messages": MESSAGES, "top_p": 0}, 400, "invalid_value", "top_p"),
    ({"messages": MESSAGES, "top_p": 1.5}, 400, "invalid_value", "top_p"),
    ({"messages": MESSAGES, "top_k": -2}, 400, "invalid_value", "top_k"),
    ({"messages": MESSAGES, "top_k": 1.5}, 400, "invalid_value", "top_k"),
    ({"messages": MESSAGES, "min_p": 0.1}, 400, "unsupported_parameter", "min_p"),
    ({"messages": MESSAGES, "presence_penalty": 1}, 400, "unsupported_parameter", "presence_penalty"),
    ({"messages": MESSAGES, "frequency_penalty": -3}, 400, "unsupported_parameter", "frequency_penalty"),
    ({"messages": MESSAGES, "repetition_penalty": 0}, 400, "unsupported_parameter", "repetition_penalty"),
    ({"messages": MESSAGES, "n": 0}, 400, "unsupported_parameter", "n"),
    ({"messages": MESSAGES, "n": 10**9}, 400, "unsupported_parameter", "n"),
    ({"messages": MESSAGES, "n": True}, 400, "unsupported_parameter", "n"),
    ({"messages": MESSAGES, "logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({"messages": MESSAGES, "top_logprobs": 21}, 400, "unsupported_parameter", "top_logprobs"),
    ({"messages": MESSAGES, "logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
    ({"messages": MESSAGES, "stop": ["a"] * 5}, 400, "invalid_value", "stop"),
    ({"messages": MESSAGES, "stop": ""}, 400, "invalid_value", "stop"),
    ({"messages": MESSAGES, "stop": "x" * 10_000}, 400, "invalid_value", "stop"),
    ({"messages": MESSAGES, "stop": [1]}, 400, "invalid_value", "stop[0]"),
    ({"messages": MESSAGES, "stop_token_ids": [10**6]}, 400, "invalid_value", "stop_token_ids"),
    ({"messages": MESSAGES, "stop_token_ids": [1] * 1_025}, 400, "invalid_value", "stop_token_ids"),
    ({"messages": MESSAGES, "seed": 2**70}, 400, "invalid_value", "seed"),
    ({"messages": MESSAGES, "seed": "x"}, 400, "invalid_value", "seed"),
    ({"messages": MESSAGES, "stream": "yes"}, 400, "invalid_value", "stream"),
    ({"messages": MESSAGES, "stream_options": {}}, 400, "invalid_value", "stream_options"),
    (
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": 1}},
        400, "invalid_value", "stream_options.include_usage",
    ),
    ({"messages": MESSAGES, "tools": []}, 400, "empty_array", "tools"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools"),
    ({"messages": MESSAGES, "tool_choice": "auto"}, 400, "unsupported_parameter", "tool_choice"),
    (
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        400, "unsupported_parameter", "response_format",
    ),
    ({"messages": MESSAGES, "reasoning_effort": "high"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"messages": MESSAGES, "audio": {}}, 400, "unsupported_parameter", "audio"),
    ({"messages": MESSAGES, "kv_transfer_params": {}}, 400, "forbidden_parameter", "kv_transfer_params"),
    ({"messages": MESSAGES, "bootstrap_room": 1}, 400, "forbidden_parameter", "bootstrap_room"),
    ({"messages": MESSAGES, "cache_salt": ""}, 400, "invalid_value", "cache_salt"),
    ({"messages": MESSAGES, "cache_salt": "x" * 1025}, 400, "string_too_long", "cache_salt"),
    ({"messages": MESSAGES, "user": "x" * 513}, 400, "string_too_long", "user"),
    ({"messages": MESSAGES, "metadata": {"a": 1}}, 400, "invalid_value", "metadata"),
    ({"messages": MESSAGES, "priority": 5}, 400, "unsupported_parameter", "priority"),
    ({"messages": MESSAGES, "moonpool": {"x": 1}}, 400, "unknown_parameter", "moonpool.x"),
]  # fmt: skip

TEXT_ROWS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({}, 400, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, 400, "empty_prompt", "prompt"),
    ({"prompt": []}, 400, "empty_prompt", "prompt"),
    ({"prompt": [[]]}, 400, "empty_prompt", "prompt"),
    ({"prompt": 5}, 400, "invalid_type", "prompt"),
    ({"prompt": ["a", [1, 2]]}, 400, "invalid_type", "prompt"),
    ({"prompt": ["a", "b"]}, 400, "too_many_prompts", "prompt"),
    ({"prompt": [-1]}, 400, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1, 10**6]}, 400, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, 2.0]}, 400, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, True]}, 400, "invalid_token_id", "prompt[1]"),
    ({"prompt": [[1, "a"]]}, 400, "invalid_type", "prompt"),
    ({"prompt": [1] * 600}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": "a", "max_tokens": 600}, 400, "context_length_exceeded", "max_tokens"),
    ({"prompt": "a", "best_of": 2}, 400, "unsupported_parameter", "best_of"),
    ({"prompt": "a", "echo": True}, 400, "unsupported_parameter", "echo"),
    ({"prompt": "a", "suffix": "b"}, 400, "unsupported_parameter", "suffix"),
    ({"prompt": "a", "logprobs": 0}, 400, "unsupported_parameter", "logprobs"),
    ({"prompt": "a", "prompt_embeds": "AA=="}, 400, "forbidden_parameter", "prompt_embeds"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [(CHAT, *row) for row in CHAT_ROWS] + [(TEXT, *row) for row in TEXT_ROWS],
    ids=lambda value: str(value)[:48] if isinstance(value, dict) else "",
)
async def test_a_bad_field_is_named(
    door: Door, path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    response = await door.post(path, body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"messages": [],}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": Infinity}', "invalid_json"),
        (b"[1]", "invalid_type"),
        (b"5", "invalid_type"),
        (b"null", "invalid_type"),
        (b"[" * 10_000 + b"]" * 10_000, "json_too_deep"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "json_too_deep"),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else value,
)
async def test_a_body_that_is_no_json_object_is_refused(door: Door, body: bytes, code: str) -> None:
    response = await door.raw(post(TEXT, body))
    assert (response.status, response.error["code"]) == (400, code)


async def test_of_equal_keys_the_last_counts(door: Door) -> None:
    response = await door.raw(post(TEXT, b'{"prompt": "a", "n": 1, "n": 2}'))
    assert response.error["param"] == "n"


@pytest.mark.parametrize(
    ("data", "method", "status", "code"),
    [
        (post(TEXT, b"{}", content_type="text/plain"), "POST", 415, "unsupported_media_type"),
        (
            post(TEXT, b"{}", content_type="application/json; charset=latin-1"),
            "POST", 415, "unsupported_media_type",
        ),
        (
            post(TEXT, b"{}", "content-encoding: gzip"),
            "POST", 415, "unsupported_content_encoding",
        ),
        (post(TEXT, b" " * 100_001), "POST", 413, "request_too_large"),
        (post("/v1/foo", b"{}"), "POST", 404, "unknown_url"),
        (post("/metrics", b"{}"), "POST", 405, "method_not_supported"),
        (post(TEXT, b'{"prompt": "a"}', "x-request-timeout-ms: 0"), "POST", 400, "invalid_value"),
        (post(TEXT, b'{"prompt": "a"}', "x-request-timeout-ms: 1e3"), "POST", 400, "invalid_value"),
        (
            post(TEXT, b'{"prompt": "a"}', "x-request-timeout-ms: " + "1" * 5_000),
            "POST", 400, "invalid_value",
        ),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", "GET", 405, "method_not_supported"),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", "GET", 405, "method_not_supported"),
        (
            b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\n\r\n",
            "GET", 405, "method_not_supported",
        ),
        (
            b"GET /livez HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 20_000 + b"\r\n\r\n",
            "GET", 431, "request_header_too_large",
        ),
        (b"GET /livez HTTP/1.1\r\nbig: " + b"x" * 70_000, "GET", 431, "request_header_too_large"),
        (
            b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 64 + b"\r\n",
            "GET", 431, "request_header_too_large",
        ),
        (b"what is this\r\n\r\n", "GET", 400, "invalid_http"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else str(value),
)  # fmt: skip
async def test_http_itself_is_bounded(
    door: Door, data: bytes, method: str, status: int, code: str
) -> None:
    response = await door.raw(data, method)
    assert (response.status, response.error["code"]) == (status, code)
    if status == 405:
        assert response.headers["allow"]


async def test_a_body_that_grows_beyond_the_bound_is_refused_and_the_rest_dropped(
    door: Door,
) -> None:
    head = (
        f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    ).encode()
    chunk = b"%x\r\n" % 60_000 + b" " * 60_000 + b"\r\n"
    async with raw_http(door.port) as raw:
        await raw.send(head + chunk + chunk)
        assert (await raw.response()).status == 413
        await raw.send(chunk + b"0\r\n\r\n")
        # The connection lives on.
        await raw.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await raw.response("GET")).status == 200


async def test_expect_is_answered_and_requests_may_be_pipelined(door: Door) -> None:
    async with raw_http(door.port) as raw:
        await raw.send(post(TEXT, b"", "expect: 100-continue").replace(b"length: 0", b"length: 2"))
        async with asyncio.timeout(10):
            assert (await raw.reader.readline()).startswith(b"HTTP/1.1 100")
            await raw.reader.readline()
        await raw.send(b"{}")
        assert (await raw.response()).error["param"] == "prompt"
        await raw.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        assert (await raw.response("GET")).status == 200


async def test_models_versions_and_probes(door: Door) -> None:
    models = (await door.client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 512
    assert (await door.client.get("/v1/models/tiny")).json() == models["data"][0]
    missing = await door.client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"
    assert (await door.client.get("/version")).json()["version"]
    for path in ("/health", "/readyz"):
        assert (await door.client.get(path)).json() == {"status": "ready", "reasons": []}
    assert (await door.client.get("/livez")).json() == {"status": "alive"}


# -- clients that leave --


async def begin(door: Door, raw: RawHttp, path: str = CHAT, **fields: Any) -> DecodeRequest:
    """A request that a worker has."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    await raw.send(post(path, msgspec.json.encode(body | fields)))
    return await door.worker.next(DecodeRequest)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_polite", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    door: Door, is_stream: bool, is_polite: bool
) -> None:
    before = await door.metric('moonpool_cancelled_total{phase="wait"}')
    async with raw_http(door.port) as raw:
        command = await begin(door, raw, stream=is_stream)
        if is_polite:
            raw.writer.close()
        else:
            raw.writer.transport.abort()
        abort = await door.worker.next(AbortRequest)
    assert abort.attempt_id == command.attempt_id

    async def is_counted() -> bool:
        return await door.metric('moonpool_cancelled_total{phase="wait"}') == before + 1

    await eventually(is_counted, timeout_s=10, what="the client that left is counted")


async def test_a_client_that_leaves_while_its_request_is_queued_ends_it(door: Door) -> None:
    async with busy(door), raw_http(door.port) as raw:
        await raw.send(post(CHAT, msgspec.json.encode({"messages": MESSAGES})))
        await door.until_queued(1)
        raw.writer.close()
        await door.until_queued(0)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it(door: Door) -> None:
    async with raw_http(door.port) as raw:
        command = await begin(door, raw, stream=True)
        door.worker.tokens(command, 0, [70])
        async with asyncio.timeout(10):
            await raw.reader.readuntil(b'"content":"d"')
        raw.writer.close()
        await door.worker.next(AbortRequest)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_only_ends_its_sending_is_answered(door: Door, is_stream: bool) -> None:
    async with raw_http(door.port) as raw:
        command = await begin(door, raw, stream=is_stream, max_tokens=2)
        raw.half_close()
        # Long enough for a client that is gone to be noticed.
        assert await door.metric("moonpool_inflight_requests") == 1
        door.worker.tokens(command, 0, [70])
        door.worker.tokens(command, 1, [71], finish=FinishReason.LENGTH)
        response = await raw.response()
        assert response.status == 200
        assert set(response.interim) <= {102}
        assert await raw.is_closed()


# -- the books --


async def test_every_metric_of_a_router_is_there_and_moves(door: Door) -> None:
    assert set(ROUTER_METRICS) < set(METRICS)
    text = (await door.client.get("/metrics")).text
    for metric in ROUTER_METRICS:
        assert f"# TYPE {metric.name} {metric.kind.value}" in text, metric
    for sample in (
        f'moonpool_requests_total{{endpoint="{CHAT}",error_code="",model="tiny",status="200"}}',
        f'moonpool_requests_total{{endpoint="{TEXT}",error_code="invalid_json"',
        'moonpool_ttft_seconds_count{model="tiny"}',
        'moonpool_itl_seconds_count{model="tiny"}',
        'moonpool_e2e_seconds_count{model="tiny"}',
        'moonpool_stage_seconds_count{stage="tokenize"}',
        'moonpool_prompt_tokens_total{model="tiny"}',
        'moonpool_generation_tokens_total{model="tiny"}',
        'moonpool_worker_state{role="decode",state="up"}',
        'moonpool_retries_total{reason="refused"}',
        "moonpool_nats_connected",
        "moonpool_event_loop_lag_seconds_count",
        "moonpool_build_info{",
    ):
        assert await door.metric(sample) > 0, sample
    assert "request_id" not in text
