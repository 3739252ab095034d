"""The router between a real gRPC client and workers that the test plays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from moonpool.api.v1 import inference_pb2, inference_pb2_grpc
from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.subjects import Subjects
from moonpool.clock import SystemClock
from moonpool.core.protocol import BlockLedger, HandBackReason, RefuseReason
from moonpool.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    QueueDeadlineError,
    UnavailableError,
)
from moonpool.handoff.messages import AbortRequest, DecodeRequest, PrefillRequest
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    TokenPrompt,
)
from moonpool.inference.output import FinishReason
from moonpool.kv.block_key import block_keys
from moonpool.kv.events import BlockStored
from moonpool.kv.published_set import PublishedSet, SetSnapshot
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.admin import fetch_trace
from moonpool.rpc.channel import open_channel
from moonpool.service.life import StopPolicy, running
from moonpool.telemetry import names
from moonpool.telemetry.spans import SpanContext
from moonpool.wire.spans import Span
from moonpool_router.app import RouterService
from support.eventually import eventually
from support.fake_worker import FakeWorker, fake_worker
from support.kv import make_chain
from support.router import Answered, Client, ask, fake_cluster, router, tiny_router_config
from support.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))


def speak(
    worker: FakeWorker, command: DecodeRequest, token_ids: list[int], *, start: int = 0
) -> None:
    """All tokens, one frame each, the last with LENGTH."""
    for position, token_id in enumerate(token_ids, start):
        is_last = position == start + len(token_ids) - 1
        worker.tokens(
            command, position, [token_id], finish=FinishReason.LENGTH if is_last else None
        )


async def test_a_text_becomes_tokens_and_tokens_become_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask("hello", max_tokens=5)))
        command = await worker.next(DecodeRequest)
        assert command.source is None
        assert list(command.request.prompt_token_ids) == tokenizer.encode(
            "hello", add_special_tokens=True
        )
        assert command.request.sampling.is_greedy
        answer = tokenizer.encode("world")
        speak(worker, command, answer)
        answered = await asking
    assert answered.text == "world"
    assert answered.token_ids == answer
    assert answered.done is not None
    assert answered.done.finish_reason is FinishReason.LENGTH
    assert answered.done.usage.num_completion_tokens == len(answer)
    assert answered.done.placement.decode_worker == "decode-0"
    assert answered.done.placement.prefill_worker == ""
    timing = answered.done.timing
    assert sum(timing.ttft_parts_ms.values()) == pytest.approx(timing.ttft_ms)


async def test_whoever_cannot_be_read_on_the_bus_is_warned_of_once(tmp_path: Path) -> None:
    async with router(tmp_path) as r:
        subjects = Subjects(r.cluster.name)
        senders = [subjects.announce("d0"), subjects.kv_events("d0"), subjects.announce("d1")]
        with capture_logs() as logs:

            def levels(subject: str) -> list[str]:
                return [
                    entry["log_level"]
                    for entry in logs
                    if entry["event"] == "bus.unreadable" and entry["subject"] == subject
                ]

            async def are_heard_twice() -> bool:
                for subject in senders:
                    await r.bus.publish(subject, b"\xff")
                return all(len(levels(subject)) > 1 for subject in senders)

            await eventually(are_heard_twice, timeout_s=5, what="all are dropped")
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{r.running.facts['http_url']}/metrics")).text
    for subject in senders:
        first, *others = levels(subject)
        assert (first, set(others)) == ("warning", {"debug"})
    (lost,) = [
        line for line in text.splitlines() if 'lost_messages_total{reason="unreadable"' in line
    ]
    # Of announcements; those of KV events are counted with the index.
    assert float(lost.split()[-1]) >= 4


class SelfContradicting(PublishedSet):
    """A worker's, whose snapshots have other keys than their heads tell of."""

    def snapshot(self) -> SetSnapshot:
        whole = super().snapshot()
        return replace(whole, keys=whole.keys ^ np.uint64(4))


async def test_a_snapshot_that_contradicts_itself_is_asked_for_again(tmp_path: Path) -> None:
    config = tiny_router_config(tmp_path)
    broker = MemoryBroker()
    service = RouterService(config, bus=MemoryBus(broker), clock=SystemClock())
    chain = make_chain("abc")

    def num_asked(outcome: str) -> float:
        return service.metrics.value(names.INDEX_SNAPSHOTS, outcome=outcome)

    async with (
        running(service),
        MemoryBus(broker) as bus,
        fake_worker(fake_cluster(config), bus) as worker,
    ):
        await eventually(lambda: num_asked("loaded") == 1, timeout_s=5, what="it has joined")
        worker.published = SelfContradicting()
        worker.published.apply([BlockStored(hashes=tuple(chain), parent_hash=None)])
        await worker.announce()
        await eventually(lambda: num_asked("failed") > 1, timeout_s=5, what="it was asked again")
        assert service.index.num_blocks == 0
        worker.published = PublishedSet()
        worker.published.apply([BlockStored(hashes=tuple(chain), parent_hash=None)])
        await eventually(lambda: num_asked("loaded") == 2, timeout_s=5, what="it was believed")
        await eventually(
            lambda: service.index.match(block_keys(chain)) == {worker.key: 3},
            timeout_s=5,
            what="it is known what the worker holds",
        )


async def test_the_books_hold_what_happened(tmp_path: Path) -> None:
    config = tiny_router_config(tmp_path)
    broker = MemoryBroker()
    service = RouterService(config, bus=MemoryBus(broker), clock=SystemClock())
    cluster = fake_cluster(config)
    async with running(service) as life, MemoryBus(broker) as bus:
        address = str(life.facts["grpc_address"])
        async with open_channel(address) as channel, fake_worker(cluster, bus) as worker:
            client = Client(channel, address)
            await worker.joined()
            await eventually(client.is_serving, timeout_s=5, what="serving")
            with pytest.raises(InvalidRequestError):
                await client.generate(ask(temperature=9.0))
            asking = asyncio.create_task(client.generate(ask(max_tokens=2)))
            speak(worker, await worker.next(DecodeRequest), [65, 66])
            await asking
            call = client.call(ask())
            await worker.next(DecodeRequest)
            call.cancel()
            await worker.next(AbortRequest)
            lines = service.render_metrics().decode().splitlines()
    requests = sorted(line for line in lines if line.startswith("moonpool_requests_total{"))
    assert [line.split("{")[1] for line in requests] == [
        'endpoint="grpc",error_code="",model="tiny",status="200"} 1.0',
        'endpoint="grpc",error_code="cancelled",model="tiny",status="499"} 1.0',
        'endpoint="grpc",error_code="invalid_value",model="tiny",status="400"} 1.0',
    ]
    assert 'moonpool_generation_tokens_total{model="tiny"} 2.0' in lines
    assert 'moonpool_cancelled_total{phase="wait"} 1.0' in lines
    assert 'moonpool_worker_state{role="decode",state="up"} 1.0' in lines
    assert 'moonpool_rejected_total{reason="invalid_value"} 1.0' in lines


async def test_a_long_prompt_is_prefilled_elsewhere_and_its_first_token_comes_early(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus) as decode,
        fake_worker(r.cluster, r.bus, "prefill-0", role=WorkerRole.PREFILL) as prefill,
    ):
        await r.ready(2)
        call = r.client.call(ask(TokenPrompt(token_ids=(9,) * 100), max_tokens=3))
        answered = Answered()
        on_prefill = await prefill.next(PrefillRequest)
        on_decode = await decode.next(DecodeRequest)
        assert on_decode.source is not None
        assert on_decode.source.key == prefill.key
        assert on_decode.attempt_id == on_prefill.attempt_id
        root = SpanContext.parse(on_decode.request.traceparent)
        assert root is not None
        span = Span(
            trace_id=root.trace_id,
            span_id="1" * 16,
            parent_span_id=root.span_id,
            name="prefill",
            start_unix_ns=1,
            end_unix_ns=2,
        )
        prefill.tokens(on_prefill, 0, [65], spans=[span])
        await r.client.read(call, answered, num_tokens=1)
        speak(decode, on_decode, [65, 66, 67])
        await r.client.read(call, answered)
        assert answered.token_ids == [65, 66, 67]
        assert answered.done is not None
        assert answered.done.placement.prefill_worker == "prefill-0"
        assert set(answered.done.timing.ttft_parts_ms) == {
            "tokenize",
            "queue",
            "worker_queue",
            "prefill",
            "deliver",
        }
        spans = await fetch_trace(
            r.client.address, answered.done.request_id, key=None, deadline_s=5
        )
        assert {span.name for span in spans} >= {"prefill", "tokenize", "queue", "attempt"}
        assert any(span.name.startswith("text_completion") for span in spans)
        # What P still holds for the reader is released by an abort that names the attempt.
        assert (await prefill.next(AbortRequest)).attempt_id == on_prefill.attempt_id


async def test_a_stop_string_across_tokens_ends_the_answer_everywhere(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask(stop=["\nUs"], max_tokens=50)))
        command = await worker.next(DecodeRequest)
        pieces = ["a", "b", "\n", "U", "s", "e", "r"]
        ids = [token for piece in pieces for token in tokenizer.encode(piece)]
        assert len(ids) == len(pieces)
        worker.tokens(command, 0, ids)
        assert (await worker.next(AbortRequest)).attempt_id == command.attempt_id
        answered = await asking
    assert answered.text == "ab"
    assert answered.token_ids == ids[:5]
    assert answered.done is not None
    assert answered.done.finish_reason is FinishReason.STOP
    assert answered.done.usage.num_completion_tokens == 5


async def test_chat_is_rendered_by_the_models_template(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        prompt = ChatPrompt(messages=(ChatMessage(role="user", content="hi <|im_end|>"),))
        asking = asyncio.create_task(r.client.generate(ask(prompt, max_tokens=1)))
        command = await worker.next(DecodeRequest)
        # The user's own <|im_end|> is text; the template's are tokens.
        assert command.request.prompt_token_ids.count(2) == 1
        speak(worker, command, [65])
        await asking


async def test_a_worker_that_dies_midway_costs_no_token_and_doubles_none(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus, "decode-0") as first,
        fake_worker(r.cluster, r.bus, "decode-1") as second,
    ):
        await r.ready(2)
        call = r.client.call(ask(max_tokens=6))
        answered = Answered()
        command = await first.next(DecodeRequest)
        first.tokens(command, 0, [65, 66, 67])
        await r.client.read(call, answered, num_tokens=3)
        first.cut()
        replay = await second.next(DecodeRequest)
        assert replay.attempt == 2
        assert replay.request.emitted_token_ids == (65, 66, 67)
        assert replay.request.prompt_token_ids == command.request.prompt_token_ids
        speak(second, replay, [68, 69, 70], start=3)
        await r.client.read(call, answered)
    assert answered.token_ids == [65, 66, 67, 68, 69, 70]
    assert answered.done is not None
    assert answered.done.placement.num_attempts == 2
    assert answered.done.placement.decode_worker == "decode-1"


async def test_a_request_that_kills_two_workers_is_not_given_to_a_third(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus, "decode-0") as first,
        fake_worker(r.cluster, r.bus, "decode-1") as second,
    ):
        await r.ready(2)
        asking = asyncio.create_task(r.client.generate(ask()))
        await first.next(DecodeRequest)
        first.cut()
        await second.next(DecodeRequest)
        second.cut()
        with pytest.raises(InternalError) as caught:
            await asking
        assert caught.value.code == "poison_request"


async def test_refusals_and_hand_backs_only_take_a_new_attempt(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask(max_tokens=2)))
        command = await worker.next(DecodeRequest)
        worker.refuse(command.attempt_id, RefuseReason.NO_BLOCKS)
        command = await worker.next(DecodeRequest)
        assert command.attempt == 2
        worker.tokens(command, 0, [65])
        worker.hand_back(command.attempt_id, HandBackReason.PREEMPTED)
        command = await worker.next(DecodeRequest)
        assert (command.attempt, command.request.emitted_token_ids) == (3, (65,))
        speak(worker, command, [66], start=1)
        assert (await asking).token_ids == [65, 66]


async def test_a_client_that_goes_away_ends_the_request_on_its_worker(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        call = r.client.call(ask())
        command = await worker.next(DecodeRequest)
        worker.tokens(command, 0, [65])
        await r.client.read(call, Answered(), num_tokens=1)
        call.cancel()
        assert (await worker.next(AbortRequest)).attempt_id == command.attempt_id
        status = await r.client.status()
        assert (status.num_queued, status.num_running) == (0, 0)


async def test_a_deadline_reaches_the_worker(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask(), timeout_s=2.0))
        command = await worker.next(DecodeRequest)
        # What gRPC says is left of a deadline may be some milliseconds more than was given.
        assert 0 < command.deadline_s <= 2.1
        with pytest.raises(DeadlineExceededError):
            await asking
        assert (await worker.next(AbortRequest)).attempt_id == command.attempt_id


async def test_without_a_decode_worker_it_is_not_ready_and_says_why(tmp_path: Path) -> None:
    async with router(tmp_path) as r:
        assert not await r.client.is_serving()
        assert (await r.client.status()).not_ready_because == "No worker has joined yet."
        with pytest.raises(UnavailableError, match="No worker has joined") as caught:
            await r.client.generate(ask())
        assert (caught.value.code, caught.value.retry_after_s) == ("model_loading", 2.0)
        async with fake_worker(r.cluster, r.bus, "prefill-0", role=WorkerRole.PREFILL):
            await r.ready()
            status = await r.client.status()
            assert status.not_ready_because == (
                "Prefill workers have joined, but no worker that can decode."
            )
            assert not await r.client.is_serving()
            async with fake_worker(r.cluster, r.bus):
                await r.ready(2)
                assert await r.client.is_serving()
            await eventually(r.client.is_not_serving, timeout_s=5, what="not serving any more")


async def test_what_does_not_fit_is_refused_and_shown(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus, "decode-0"),
    ):
        await r.ready()
        async with (
            fake_worker(r.cluster, r.bus, "decode-1", fingerprint="f" * 64),
            fake_worker(r.cluster, r.bus, "decode-2", secret_fingerprint="0" * 16),
            fake_worker(r.cluster, r.bus, "decode-3", block_size=32),
        ):

            async def all_known() -> bool:
                status = await r.client.status()
                return sum(worker.state == "refused" for worker in status.workers) == 3

            await eventually(all_known, timeout_s=5, what="three are refused")
            status = await r.client.status()
    because = {worker.worker_id: worker.because for worker in status.workers}
    assert because["decode-0"] == ""
    assert because["decode-1"].startswith(f"model: tiny {'f' * 16} there, ")
    assert because["decode-2"].startswith(f"cluster secret: {'0' * 16} there, ")
    assert because["decode-3"] == "block_size: 32 != 16"


async def test_a_worker_may_refuse_the_router(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        session = await worker.joined()
        worker.refusal = FailedPreconditionError("another model than mine")
        worker.cut()
        async with asyncio.timeout(5):
            await session.closed.wait()

        async def is_refused() -> bool:
            (status,) = (await r.client.status()).workers
            return (status.state, status.because) == ("refused", "another model than mine")

        await eventually(is_refused, timeout_s=5, what="the refusal is shown")


async def test_the_door_lists_its_model_and_its_services(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus):
        await r.ready()
        stub = inference_pb2_grpc.InferenceStub(r.client.channel)  # type: ignore[no-untyped-call]  # generated
        models = (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)).models
        # The model takes 2,048 tokens; no worker takes more than 512.
        assert [(model.id, model.max_model_len) for model in models] == [("tiny", 512)]
        reflection = reflection_pb2_grpc.ServerReflectionStub(r.client.channel)
        call = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        services = {service.name for service in (await call.read()).list_services_response.service}
    assert {"moonpool.api.v1.Inference", "moonpool.api.v1.RouterAdmin"} <= services


async def test_losing_the_bus_loses_nobody(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        r.broker.stop()
        await eventually(r.client.is_without_bus, timeout_s=5, what="the router knows of the loss")
        asking = asyncio.create_task(r.client.generate(ask(max_tokens=1)))
        speak(worker, await worker.next(DecodeRequest), [65])
        assert (await asking).token_ids == [65]
        # The stream is cut, nobody announces anything: the address is tried again by itself.
        worker.cut()
        await eventually(
            lambda: worker.session is not None and worker.session.closed.is_set(),
            timeout_s=5,
            what="the old stream is gone",
        )
        await worker.joined()
        await r.ready()


async def test_a_short_gap_without_workers_is_waited_out(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        session = await worker.joined()
        worker.cut()
        async with asyncio.timeout(5):
            await session.closed.wait()
        # It is asked again at once; meanwhile the request waits instead of failing.
        asking = asyncio.create_task(r.client.generate(ask(max_tokens=1)))
        speak(worker, await worker.next(DecodeRequest), [65])
        assert (await asking).token_ids == [65]


async def test_a_draining_worker_is_no_worker(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        worker.load = replace(worker.load, is_draining=True)
        worker.send()
        await eventually(r.client.is_not_serving, timeout_s=5, what="not serving")
        worker.load = replace(worker.load, is_draining=False)
        worker.send()
        await eventually(r.client.is_serving, timeout_s=5, what="serving again")


async def test_nobody_waits_for_a_worker_for_ever(tmp_path: Path) -> None:
    async with (
        router(tmp_path, queue_timeout_s=0.3) as r,
        fake_worker(r.cluster, r.bus) as worker,
    ):
        await r.ready()
        worker.load = replace(
            worker.load,
            ledger=BlockLedger(num_total=1000, num_free=0, num_cached=0, num_referenced=1000),
        )
        worker.send()

        async def is_full() -> bool:
            (status,) = (await r.client.status()).workers
            return status.load is not None and status.load.ledger.num_free == 0

        await eventually(is_full, timeout_s=5, what="the router knows that there is no room")
        with pytest.raises(QueueDeadlineError, match="No worker had room"):
            await r.client.generate(ask())
        assert (await r.client.status()).num_queued == 0


async def test_a_seed_is_found_without_the_bus(tmp_path: Path) -> None:
    config = tiny_router_config(tmp_path)
    broker = MemoryBroker(is_up=False)
    async with (
        MemoryBus(broker) as bus,
        fake_worker(fake_cluster(config), bus) as worker,
    ):
        settings = config.router.model_copy(update={"seeds": (worker.hello.grpc_address,)})
        config = config.model_copy(update={"router": settings})
        service = RouterService(config, bus=MemoryBus(broker), clock=SystemClock())
        async with running(service):
            await worker.joined()


async def test_a_router_that_connects_asks_who_is_there(tmp_path: Path) -> None:
    async with router(tmp_path) as r:
        subscription = await r.bus.subscribe("moonpool.local.router.who")
        r.broker.stop()
        r.broker.start()
        async with asyncio.timeout(5):
            async for message in subscription:
                assert message.data
                break


async def test_a_drain_refuses_what_is_new_and_lets_streams_end(tmp_path: Path) -> None:
    policy = StopPolicy(drain_grace_s=0.0, drain_timeout_s=5.0)
    async with (
        router(tmp_path, policy=policy) as r,
        fake_worker(r.cluster, r.bus) as worker,
    ):
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask(max_tokens=2)))
        command = await worker.next(DecodeRequest)
        worker.tokens(command, 0, [65])
        r.running.request_stop()
        await eventually(r.client.is_not_serving, timeout_s=5, what="draining")
        with pytest.raises(UnavailableError) as caught:
            await r.client.generate(ask())
        assert caught.value.code == "shutting_down"
        speak(worker, command, [66], start=1)
        assert (await asking).token_ids == [65, 66]


async def test_what_outlasts_the_drain_is_told_to_come_again(tmp_path: Path) -> None:
    policy = StopPolicy(drain_grace_s=0.0, drain_timeout_s=0.2)
    async with (
        router(tmp_path, policy=policy) as r,
        fake_worker(r.cluster, r.bus) as worker,
    ):
        await r.ready()
        asking = asyncio.create_task(r.client.generate(ask(max_tokens=2)))
        session = await worker.joined()
        await worker.next(DecodeRequest)
        r.running.request_stop()
        with pytest.raises(UnavailableError) as caught:
            await asking
        assert caught.value.code == "shutting_down"
        async with asyncio.timeout(5):
            await session.closed.wait()


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (GenerationRequest(prompt=TokenPrompt(token_ids=()), model=""), "empty_prompt", "prompt"),
        (ask(TokenPrompt(token_ids=(100_000,))), "invalid_token_id", "prompt[0]"),
        (ask(temperature=-1.0), "invalid_value", "temperature"),
        (ask(max_tokens=10_000), "context_length_exceeded", "max_tokens"),
        (ask(TokenPrompt(token_ids=(5,) * 512)), "context_length_exceeded", "prompt"),
        (ask(ChatPrompt(messages=())), "empty_array", "messages"),
        (ask(stop=["", "x"]), "invalid_value", "stop"),
    ],
)
async def test_bad_requests_name_their_field(
    tmp_path: Path, request_: GenerationRequest, error: str, param: str
) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus):
        await r.ready()
        with pytest.raises(InvalidRequestError) as caught:
            await r.client.generate(request_)
        assert (caught.value.code, caught.value.param) == (error, param)


async def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus):
        await r.ready()
        with pytest.raises(NotFoundError) as caught:
            await r.client.generate(
                GenerationRequest(prompt=TokenPrompt(token_ids=(5,)), model="other")
            )
        assert caught.value.code == "model_not_found"


async def test_two_incarnations_of_a_worker_are_one_worker(tmp_path: Path) -> None:
    async with (
        router(tmp_path) as r,
        fake_worker(r.cluster, r.bus, incarnation="a" * 16) as old,
    ):
        await r.ready()
        old_session = await old.joined()
        async with fake_worker(r.cluster, r.bus, incarnation="b" * 16) as new:
            await new.joined()
            async with asyncio.timeout(5):
                await old_session.closed.wait()
            await old.announce()
            await r.ready()
            asking = asyncio.create_task(r.client.generate(ask(max_tokens=1)))
            speak(new, await new.next(DecodeRequest), [65])
            await asking
            status = await r.client.status()
    assert [str(worker.key) for worker in status.workers if worker.is_live] == [str(new.key)]
