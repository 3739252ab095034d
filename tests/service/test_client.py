"""The SDK against real gRPC: a door that a test scripts, and a real router."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from moonpool.client import (
    APIConnectionError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    CancelledByClientError,
    Client,
    FinishReason,
    GenerationResult,
    InternalServerError,
    Model,
    NotFoundError,
    OverloadedError,
    RetryPolicy,
    UnavailableError,
)
from moonpool.client.retry import CallAttempts
from moonpool.errors import InvalidRequestError, WorkerLostError
from moonpool.handoff.messages import AbortRequest, DecodeRequest
from support.fake_worker import FakeWorker, fake_worker
from support.router import router
from support.scripted_door import ANSWER, STAY, chunk, done, scripted_door

ValueT = TypeVar("ValueT")

QUICK = RetryPolicy(min_pause_s=0.001, max_pause_s=0.002)


async def in_thread(function: Callable[[], ValueT]) -> ValueT:
    async with asyncio.timeout(10):
        return await asyncio.to_thread(function)


async def arrived(event: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await event.wait()


def check_answer(result: GenerationResult) -> None:
    assert result.text == "abc"
    assert result.token_ids == (65, 66)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.num_cached_tokens == 3
    assert sum(result.timing.ttft_parts_ms.values()) == result.timing.ttft_ms
    assert result.placement.prefill_worker == "prefill-0"
    assert result.request_id == "r1"
    with pytest.raises(TypeError):
        result.timing.ttft_parts_ms["queue"] = 0.0  # type: ignore[index]  # that it is refused


# -- reading --


async def test_chunks_come_as_they_are_sent() -> None:
    async with scripted_door() as (_, address), AsyncClient(address) as client:
        generation = client.generate("hello")
        chunks = [piece async for piece in generation]
        assert [(piece.text, piece.token_ids) for piece in chunks] == [("ab", (65,)), ("c", (66,))]
        check_answer(await generation.result())
        check_answer(await client.complete("hello"))


async def test_the_blocking_client_reads_the_same() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            generation = client.generate("hello")
            assert generation.request_id is None
            assert [piece.text for piece in generation] == ["ab", "c"]
            check_answer(generation.result())
            check_answer(client.complete("hello"))

    async with scripted_door() as (_, address):
        await in_thread(lambda: use(address))


async def test_one_client_serves_many_threads() -> None:
    async with scripted_door() as (door, address):
        with Client(address) as client:
            results = await asyncio.gather(
                *(in_thread(lambda: client.complete("hello")) for _ in range(8))
            )
        assert len(door.requests) == 8
    for result in results:
        check_answer(result)


async def test_everything_that_is_said_travels() -> None:
    async with scripted_door() as (door, address), AsyncClient(address, api_key="k") as client:
        await client.complete(
            messages=[{"role": "user", "content": "hi"}],
            model="tiny",
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            seed=-3,
            max_tokens=7,
            stop="x",
            stop_token_ids=[4],
            ignore_eos=True,
            cache_salt="salt",
            client_request_id="mine",
            traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
            timeout_s=20.0,
        )
        await client.complete(token_ids=(1, 2, 3))
    request, second = door.requests
    assert [(part.role, part.content) for part in request.chat.messages] == [("user", "hi")]
    assert request.model == "tiny"
    sampling = request.sampling
    assert sampling.temperature == 0.5
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (0, -3, 7)
    assert list(sampling.stop) == ["x"]
    assert list(sampling.stop_token_ids) == [4]
    assert sampling.ignore_eos
    assert (request.cache_salt, request.client_request_id) == ("salt", "mine")
    assert door.metadata[0]["authorization"] == "Bearer k"
    assert door.metadata[0]["traceparent"].startswith("00-111")
    assert door.remaining_s[0] is not None
    assert 15 < door.remaining_s[0] <= 20
    assert list(second.tokens.token_ids) == [1, 2, 3]
    assert not second.sampling.HasField("temperature")


async def test_models_are_listed() -> None:
    async with scripted_door() as (_, address):
        async with AsyncClient(address) as client:
            assert await client.list_models() == (Model(id="tiny", max_model_len=512),)
        with Client(address) as blocking:
            listed = await in_thread(blocking.list_models)
    assert listed == (Model(id="tiny", max_model_len=512),)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "u", "content": "c", "name": "n"}]}, "messages[0].name"),
        ({"token_ids": [-1]}, None),
        ({"prompt": "a", "seed": 2**70}, None),
        ({"prompt": "a", "top_k": -5}, None),
    ],
)
def test_what_cannot_be_sent_is_told_at_once(
    arguments: dict[str, object], param: str | None
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(BadRequestError) as refused:
        client.generate(**arguments)  # type: ignore[arg-type]  # what mypy would find
    assert refused.value.param == param


# -- leaving --


async def test_leaving_the_loop_cancels_on_the_server() -> None:
    async with (
        scripted_door([chunk("a", 0, 1), STAY]) as (door, address),
        AsyncClient(address) as client,
    ):
        async with client.generate("hello") as generation:
            async for _ in generation:
                break
        await arrived(door.left)
        with pytest.raises(CancelledByClientError):
            await generation.result()


async def test_a_dropped_generation_is_cancelled_too() -> None:
    async with (
        scripted_door([chunk("a", 0, 1), STAY]) as (door, address),
        AsyncClient(address) as client,
    ):
        async for _ in client.generate("hello"):
            break
        await arrived(door.left)
        door.left.clear()
        with Client(address) as blocking:

            def leave() -> None:
                for _ in blocking.generate("hello"):
                    break

            await in_thread(leave)
            await arrived(door.left)


async def test_close_wakes_the_thread_that_reads() -> None:
    async with scripted_door([chunk("a", 0, 1), STAY]) as (door, address):
        with Client(address) as client:
            generation = client.generate("hello")
            await in_thread(lambda: next(generation))
            reading = asyncio.create_task(in_thread(lambda: next(generation)))
            await asyncio.sleep(0)
            generation.close()
            with pytest.raises(CancelledByClientError):
                await reading
            await arrived(door.left)


async def test_close_is_an_error_for_the_task_that_reads_and_no_cancellation() -> None:
    async with (
        scripted_door([chunk("a", 0, 1), STAY]) as (_, address),
        AsyncClient(address) as client,
    ):
        generation = client.generate("hello")
        await anext(generation)
        reading = asyncio.create_task(generation.result())
        await asyncio.sleep(0)
        generation.close()
        with pytest.raises(CancelledByClientError):
            await reading


async def test_a_cancelled_reader_stays_cancelled_and_the_server_hears_of_it() -> None:
    async with (
        scripted_door([chunk("a", 0, 1), STAY]) as (door, address),
        AsyncClient(address) as client,
    ):
        generation = client.generate("hello")
        await anext(generation)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await generation.result()
        await arrived(door.left)


async def test_closing_the_client_ends_what_runs() -> None:
    async with scripted_door([chunk("a", 0, 1), STAY]) as (door, address):
        async with AsyncClient(address) as client:
            generation = client.generate("hello")
            await anext(generation)
        with pytest.raises(CancelledByClientError):
            await anext(generation)
        await arrived(door.left)
        with pytest.raises(ValueError, match="closed"):
            client.generate("again")


# -- failing and trying again --


async def test_what_passes_is_tried_again_before_the_first_token() -> None:
    scripts = ([OverloadedError("full")], [WorkerLostError("lost")], ANSWER)
    async with scripted_door(*scripts) as (door, address):
        async with AsyncClient(address, retry=QUICK) as client:
            check_answer(await client.complete("hello"))
        assert len(door.requests) == 3
    async with scripted_door(*scripts) as (door, address):
        with Client(address, retry=QUICK) as blocking:
            check_answer(await in_thread(lambda: blocking.complete("hello")))
        assert len(door.requests) == 3


async def test_after_the_first_token_an_error_stands() -> None:
    async with (
        scripted_door([chunk("a", 0, 1), WorkerLostError("lost")]) as (door, address),
        AsyncClient(address, retry=QUICK) as client,
    ):
        generation = client.generate("hello")
        assert (await anext(generation)).text == "a"
        for _ in range(2):
            with pytest.raises(WorkerLostError):
                await anext(generation)
        assert len(door.requests) == 1


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [(InvalidRequestError("no", param="seed"), 1), (OverloadedError("full"), 3)],
)
async def test_an_error_keeps_its_class_and_words(
    error: InvalidRequestError, num_calls: int
) -> None:
    async with scripted_door([error]) as (door, address):
        async with AsyncClient(address, retry=QUICK) as client:
            with pytest.raises(type(error)) as raised:
                await client.complete("hello")
        with (
            Client(address, retry=RetryPolicy(max_retries=0)) as blocking,
            pytest.raises(type(error)),
        ):
            await in_thread(lambda: blocking.complete("hello"))
        assert len(door.requests) == num_calls + 1
    assert raised.value.message == error.message
    assert raised.value.param == error.param


async def test_the_deadline_ends_a_call_and_its_retries() -> None:
    async with scripted_door([STAY], [OverloadedError("full", retry_after_s=60)]) as (
        door,
        address,
    ):
        async with AsyncClient(address) as client:
            with pytest.raises(APITimeoutError):
                await client.complete("hello", timeout_s=0.2)
            await arrived(door.left)
            with pytest.raises(OverloadedError):
                await client.complete("hello", timeout_s=5)
        with Client(address, timeout_s=5) as blocking, pytest.raises(OverloadedError):
            await in_thread(lambda: blocking.complete("hello"))
        assert len(door.requests) == 3


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with Client(address, retry=QUICK) as client:
        with pytest.raises(APIConnectionError, match=address):
            client.complete("hello")
        with pytest.raises(UnavailableError):
            client.list_models()


async def test_a_wrong_key_is_refused() -> None:
    async with (
        scripted_door(key="right") as (_, address),
        AsyncClient(address, api_key="wrong") as client,
    ):
        with pytest.raises(AuthenticationError):
            await client.complete("hello")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([chunk("a", 0, 1), chunk("c", 2, 3), done()], "answer_out_of_order"),
        ([chunk("a", 0, 1)], "answer_cut_off"),
    ],
)
async def test_a_damaged_answer_is_an_error(script: list[object], code: str) -> None:
    async with scripted_door(script) as (_, address), AsyncClient(address) as client:
        with pytest.raises(InternalServerError) as raised:
            await client.complete("hello")
    assert raised.value.code == code


def test_pauses_grow_obey_the_server_and_end_at_the_deadline() -> None:
    policy = RetryPolicy(max_retries=4, min_pause_s=1.0, max_pause_s=3.0)
    attempts = CallAttempts(policy, deadline=100.0)
    overloaded = OverloadedError("full")
    pauses = [attempts.pause_s(overloaded, now=0.0, draw=1.0) for _ in range(3)]
    assert pauses == [1.0, 2.0, 3.0]
    told = OverloadedError("full", retry_after_s=7.0)
    assert attempts.pause_s(told, now=0.0, draw=0.0) == 7.0
    assert attempts.pause_s(overloaded, now=0.0, draw=0.0) is None
    late = CallAttempts(policy, deadline=100.0)
    assert late.pause_s(overloaded, now=99.5, draw=0.0) is None
    assert late.remaining_s(99.5) == 0.5
    assert late.remaining_s(101.0) == 0.0
    assert CallAttempts(policy, deadline=None).remaining_s(5.0) is None
    assert CallAttempts(policy, deadline=None).pause_s(NotFoundError("?"), now=0, draw=0) is None


# -- with a real router --


async def test_the_readme_says_how_and_a_router_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    snippet = readme.split("```python\n")[1].split("```")[0]

    async def answer(worker: FakeWorker) -> None:
        command = await worker.next(DecodeRequest)
        worker.tokens(command, 0, [75, 76])
        worker.tokens(command, 2, [77], finish=FinishReason.LENGTH)

    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        program = snippet.replace("127.0.0.1:8001", r.client.address)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        await answer(worker)
        async with asyncio.timeout(20):
            out, err = await process.communicate()
        assert err == b""
        assert len(out) == 3

        async with AsyncClient(r.client.address) as client:
            generation = client.generate("hello", max_tokens=8, temperature=0)
            command = await worker.next(DecodeRequest)
            worker.tokens(command, 0, [75])
            assert (await anext(generation)).token_ids == (75,)
            generation.close()
            assert (await worker.next(AbortRequest)).attempt_id == command.attempt_id
            with pytest.raises(NotFoundError):
                await client.complete("hello", model="other")


def test_importing_the_client_is_light() -> None:
    program = (
        "import sys, moonpool.client;"
        "print([m for m in ('torch', 'structlog', 'rich', 'tokenizers', 'numpy', 'pydantic')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert out.stdout == b"[]\n"
