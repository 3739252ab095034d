"""Both doors of a whole cluster of real processes on a tiny model: the official `openai` package, and the bench.

The text is gibberish, but it is always the same gibberish: greedy and seeded answers repeat. Prompts
above the threshold are prefilled on one worker and decoded on the other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from moonpool.cluster.local_cluster import LocalCluster
from moonpool.config.schema import ClusterConfig
from support.eventually import eventually
from support.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

KEY = "a-key-for-tests"
SHORT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello."}]
LONG: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in gibberish."},
    {"role": "user", "content": "Why is the sky blue? " * 12},
]
DETAILS = {"moonpool": {"details": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    cluster: LocalCluster
    url: str

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        given = {"api_key": KEY, "timeout": 30, "max_retries": 0} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    home = tmp_path_factory.mktemp("openai")
    config = ClusterConfig.model_validate(
        {
            "data_dir": home / "data",
            "model": str(write_tiny_llama(home / "tiny")),
            "dtype": "float32",
            "local_prefill_tokens": 64,
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "api_key": KEY,
                # Which way a prompt takes is asked for, not what is faster.
                "placement": {"disagg": "threshold"},
            },
            "worker": {"num_blocks": 256, "max_num_batched_tokens": 512, "is_checked": True},
        }
    )
    async with LocalCluster(config) as cluster:
        yield Served(cluster=cluster, url=cluster.endpoints.http_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served.client() as client:
        yield client


async def greedy(
    client: openai.AsyncOpenAI, messages: list[ChatCompletionMessageParam], **options: Any
) -> ChatCompletion:
    given = {"max_completion_tokens": 24, "temperature": 0} | options
    return await client.chat.completions.create(model="tiny", messages=messages, **given)


async def test_a_long_chat_is_prefilled_on_one_worker_and_decoded_on_another(
    client: openai.AsyncOpenAI,
) -> None:
    answer = await greedy(client, LONG, extra_body=DETAILS)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 200
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")
    assert answer.model_extra is not None
    placement = answer.model_extra["moonpool"]["placement"]
    assert (placement["prefill_worker"], placement["decode_worker"]) == ("prefill-0", "decode-0")

    again = await greedy(client, LONG)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 100


async def test_a_stream_says_the_same_in_pieces(client: openai.AsyncOpenAI) -> None:
    whole = await greedy(client, SHORT)
    stream = await client.chat.completions.create(
        model="tiny",
        messages=SHORT,
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


async def test_texts_and_tokens_are_completed(client: openai.AsyncOpenAI) -> None:
    text = await client.completions.create(model="tiny", prompt="Once upon", temperature=0)
    assert text.object == "text_completion"
    assert text.usage is not None
    assert text.usage.completion_tokens == 16, "OpenAI's default"
    tokens = await client.completions.create(
        model="tiny", prompt=[[5, 6, 7, 8]], max_tokens=4, temperature=0
    )
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 4
    stream = await client.completions.create(
        model="tiny", prompt="Once upon", temperature=0, stream=True
    )
    assert "".join([c.choices[0].text async for c in stream]) == text.choices[0].text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(
    client: openai.AsyncOpenAI, is_stream: bool
) -> None:
    whole = (await greedy(client, SHORT)).choices[0].message.content
    assert whole is not None
    stop = whole[8:11]
    expected = whole[: whole.index(stop)]
    if is_stream:
        stream = await client.chat.completions.create(
            model="tiny", messages=SHORT, temperature=0, stop=[stop, "never"], stream=True
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = await greedy(client, SHORT, stop=stop)
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == (expected, "stop")


async def test_a_seed_repeats_an_answer(client: openai.AsyncOpenAI) -> None:
    async def say(seed: int, messages: list[ChatCompletionMessageParam]) -> str | None:
        answer = await greedy(client, messages, temperature=1.0, top_p=0.95, seed=seed)
        return answer.choices[0].message.content

    for messages in (SHORT, LONG):
        first, again, other = [await say(seed, messages) for seed in (7, 7, 8)]
        assert first == again
        assert first != other


async def test_errors_are_the_packages_own_classes(served: Served) -> None:
    async with served.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await greedy(client, SHORT, temperature=3)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "invalid_value", "temperature", "invalid_request_error",
        )  # fmt: skip
        assert bad.value.request_id
        with pytest.raises(openai.BadRequestError, match="maximum context length") as bad:
            await greedy(client, SHORT, max_completion_tokens=10**6)
        assert (bad.value.code, bad.value.param) == (
            "context_length_exceeded", "max_completion_tokens",
        )  # fmt: skip
        with pytest.raises(openai.BadRequestError) as bad:
            await greedy(client, SHORT, n=2)
        assert (bad.value.code, bad.value.param) == ("unsupported_parameter", "n")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4o", messages=SHORT)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="tiny", input="x")
    async with served.client(api_key="not-the-key") as client:
        with pytest.raises(openai.AuthenticationError) as denied:
            await client.models.list()
        assert denied.value.code == "invalid_api_key"


async def test_deadlines_are_timeouts_and_not_retried(served: Served) -> None:
    num_requests = itertools.count()

    async def count(_request: object) -> None:
        next(num_requests)

    # Minutes of work for a moment of time.
    endless: dict[str, Any] = {
        "max_completion_tokens": 1_900, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    soon = {"x-request-timeout-ms": "300"}
    async with served.client(max_retries=2) as client:
        client._client.event_hooks["request"].append(count)
        with pytest.raises(openai.InternalServerError) as late:
            await greedy(client, SHORT, extra_headers=soon, **endless)
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        assert next(num_requests) == 1, "the same would only be late again"
        # Before the first token it is an answer of its own (an InternalServerError), else in the stream.
        with pytest.raises(openai.APIError, match="deadline") as broken:
            async for _ in await client.chat.completions.create(
                model="tiny", messages=SHORT, stream=True, extra_headers=soon, **endless
            ):
                pass
        assert broken.value.code == "deadline_exceeded"
    async with served.client(timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            await greedy(client, SHORT, **endless)
    await served.cluster.wait_quiet()


async def is_decoding(served: Served) -> bool:
    return (await served.cluster.ledger("decode-0")).ledger.num_running > 0


async def test_leaving_frees_what_a_request_held(served: Served) -> None:
    async with served.client() as client:
        for messages in (SHORT, LONG):
            stream = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                stream=True,
                max_completion_tokens=1_500,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                await anext(aiter(stream))
            await served.cluster.wait_quiet()
            waiting = asyncio.create_task(
                greedy(
                    client,
                    messages,
                    max_completion_tokens=1_500,
                    extra_body={"ignore_eos": True},
                )
            )
            await eventually(lambda: is_decoding(served), timeout_s=10, what="the request runs")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await served.cluster.wait_quiet()


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert await client.models.retrieve("tiny") == models[0]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_the_blocking_client_works_too(served: Served) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            answer = client.chat.completions.create(
                model="tiny", messages=SHORT, max_completion_tokens=24, temperature=0
            )
            raw = client.chat.completions.with_raw_response.create(
                model="tiny", messages=SHORT, max_tokens=2, extra_body={"foo": 1}
            )
            assert raw.headers["x-warning"] == "ignored unknown parameters: foo"
            return answer.choices[0].message.content

    async with served.client() as client:
        expected = (await greedy(client, SHORT)).choices[0].message.content
    assert await asyncio.to_thread(ask) == expected


async def bench(*arguments: str) -> str:
    """What `moonpool bench` prints, with a key."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moonpool_loadtest.bench", "--api-key", KEY),
        *("--request-rate", "20", "--num-prompts", "12", "--output-len", "8"),
        *("--prompt", "tokens", "--vocab-size", "320"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()


async def test_a_small_benchmark_through_both_doors(served: Served, tmp_path: Path) -> None:
    output = tmp_path / "grpc.json"
    table = await bench(
        *("--address", served.cluster.endpoints.grpc_address, "--output", str(output)),
        *("--input-len", "16:120", "--prefix-len", "32", "--slo-ttft-ms", "30000"),
    )
    over_http = json.loads(
        await bench("--base-url", f"{served.url}/v1", "--input-len", "24", "--json")
    )
    await served.cluster.wait_quiet()
    assert "goodput  12 of 12 (100.0%)" in table
    document = json.loads(output.read_text())
    metrics = document["metrics"]
    assert metrics["num_by_outcome"] == {"ok": 12, "refused": 0, "timeout": 0, "failed": 0}
    assert metrics["num_output_tokens"] == 12 * 8
    assert metrics["num_cached_tokens"] >= 11 * 32 // 2
    for record in document["requests"]:
        assert len(record["token_ids"]) == len(record["token_times_s"]) == 8
        assert record["told"]["decode_worker"] == "decode-0"
        # The client's time holds the server's.
        ttft_s = record["token_times_s"][0] - record["sent_s"]
        assert ttft_s >= record["told"]["ttft_ms"] / 1e3 - 0.01
    prefilled_on = {record["told"]["prefill_worker"] for record in document["requests"]}
    assert prefilled_on == {"", "prefill-0"}
    assert over_http["metrics"]["num_by_outcome"]["ok"] == 12
    assert over_http["metrics"]["num_output_tokens"] == 12 * 8
    assert over_http["metrics"]["num_prompt_tokens"] == 12 * 24


async def test_metrics_of_all_processes_move(served: Served) -> None:
    fresh: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "How many requests were there? " * 12}
    ]
    async with served.client() as client:
        # Prefilled elsewhere; found where it was decoded; left.
        for _ in range(2):
            await greedy(client, fresh)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=SHORT,
            stream=True,
            max_completion_tokens=1_500,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            await anext(aiter(stream))
    await served.cluster.wait_followed()
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(headers=headers) as client:
        router = (await client.get(f"{served.url}/metrics")).text
        port = served.cluster.part("decode-0").fact("metrics_port")
        decode = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    for name in (
        'moonpool_route_decisions_total{reason="above_threshold"}',
        'moonpool_ttft_seconds_count{model="tiny"}',
        'moonpool_itl_seconds_count{model="tiny"}',
        'moonpool_stage_seconds_count{stage="deliver"}',
        'moonpool_cancelled_total{phase="stream"}',
        'moonpool_actual_hit_tokens_total{model="tiny",source="device"}',
        'moonpool_index_blocks{worker="decode-0"}',
        'moonpool_index_batches_total{outcome="read"}',
    ):
        assert f"\n{name} " in router, name
    for name in (
        'moonpool_kv_transfer_bytes_total{backend="shm"}',
        'moonpool_kv_transfer_seconds_count{backend="shm"}',
        'moonpool_step_seconds_count{part="forward"}',
        'moonpool_kv_event_batches_total{outcome="sent"}',
    ):
        assert f"\n{name} " in decode, name
