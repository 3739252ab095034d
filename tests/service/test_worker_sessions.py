"""A worker and its routers: hellos, refusals, load, announcements, drain, and the engine's death."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from moonpool.bus.memory import MemoryBus
from moonpool.bus.protocol import BusMessage, Subscription
from moonpool.bus.subjects import Subjects
from moonpool.core.protocol import HandBackReason, HandedBack, Refused, RefuseReason, TokensReady
from moonpool.errors import FailedPreconditionError, MoonpoolError, UnauthenticatedError
from moonpool.routing.worker_view import WorkerRole
from moonpool.rpc.errors import error_from
from moonpool.wire.control import Who, decode_announce, encode_who
from moonpool.worker.engine_process import EngineDiedError
from support.eventually import eventually
from support.requests import make_request
from support.router_client import RouterClient
from support.thread_engine import LayerGate
from support.worker_pair import expected_answer, fake_workers


async def refusal(client: RouterClient) -> MoonpoolError:
    """What the worker says to a router that it does not take."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with client:
            pass
    return error_from(caught.value, "the worker")


async def test_hello_says_who_the_worker_is(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", "decode", max_num_seqs=3, num_blocks=32)
        hello = router.hello
        assert hello is not None
        assert (hello.worker.worker_id, hello.role) == ("d0", WorkerRole.DECODE)
        assert hello.grpc_address == worker.address
        assert (hello.max_num_seqs, hello.max_model_len) == (3, 2048)
        (region,) = hello.regions
        assert region.layout.num_blocks == 32
        assert region.worker == hello.worker
        # The namespace that it tells is one that it takes.
        async with worker.router("another", namespace=hello.namespace):
            pass


async def test_another_namespace_is_refused_in_words(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0")
        assert router.hello is not None
        ours = router.hello.namespace
        theirs = replace(ours, compute_dtype="bfloat16", block_size=32)
        error = await refusal(worker.router("wrong", namespace=theirs))
        assert isinstance(error, FailedPreconditionError)
        assert "compute_dtype: bfloat16 != float32" in error.message
        assert "block_size: 32 != 16" in error.message


async def test_another_secret_is_refused(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, _ = await workers.start("d0")
        error = await refusal(worker.router("wrong", secret_fingerprint="0123456789abcdef"))
        assert isinstance(error, FailedPreconditionError)
        assert "another cluster secret (fingerprint 0123456789abcdef" in error.message
        error = await refusal(worker.router("wrong", rpc_key="guess"))
        assert isinstance(error, UnauthenticatedError)


async def test_requests_of_two_routers_do_not_meet(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0")
        mine = [make_request(f"a{n}", prompt=20 + n, max_tokens=8) for n in range(3)]
        theirs = make_request("b", prompt=30, max_tokens=400)
        async with worker.router("other") as other:
            other.decode(theirs)
            await other.until(theirs, TokensReady)
            for request in mine:
                router.decode(request)
            for request in mine:
                assert await router.answer(request) == expected_answer(request)
            assert {r.message.attempt_id.request_id for r in router.reports} == {"a0", "a1", "a2"}
        await worker.until_quiet()


async def test_abort_ends_a_request_and_its_lower_attempts(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0")
        request = make_request(prompt=20, max_tokens=1000)
        router.decode(request, attempt=3)
        await router.until(request, TokensReady, attempt=3)
        router.abort(request, attempt=5)
        await worker.until_quiet()
        # What is aborted stays so; a higher attempt is new.
        router.decode(request, attempt=4)
        short = make_request(prompt=20, max_tokens=3)
        router.decode(short, attempt=6)
        assert await router.answer(short, attempt=6) == expected_answer(short)


async def test_a_frame_tells_of_room_without_being_asked(tmp_path: Path) -> None:
    gate = LayerGate([1])
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", gate=gate)
        request = make_request(prompt=100, max_tokens=900)
        async with worker.router("other") as other:
            other.decode(request)
            await eventually(
                lambda: any(load.ledger.num_referenced for load in router.loads),
                timeout_s=5.0,
                what="the load of others is told",
            )
            gate.open()
            await other.until(request, TokensReady)
        await eventually(
            lambda: router.loads[-1].ledger.num_referenced == 0,
            timeout_s=5.0,
            what="room is told",
        )


async def test_it_tells_of_its_engines_steps(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", "decode")
        request = make_request(prompt=20, max_tokens=5)
        router.decode(request)
        await router.answer(request)
        await worker.until_quiet()
        steps = await worker.steps()
        # A prefill of 20 tokens, which draws the first one; four more.
        assert [(step.step, step.num_tokens) for step in steps] == [
            (1, 20),
            (2, 1),
            (3, 1),
            (4, 1),
            (5, 1),
        ]
        moments = [
            moment for step in steps for moment in (step.planned_unix_ns, step.computed_unix_ns)
        ]
        assert moments == sorted(moments)
        assert await worker.steps(after_step=3) == steps[3:]


async def test_it_announces_itself_each_second_and_when_asked(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", "both")
        subjects = Subjects("test")
        async with MemoryBus(workers.broker) as bus:
            heard = await bus.subscribe(subjects.announces)
            first = decode_announce((await next_message(heard)).data)
            assert first.worker == router.key
            assert first.role is WorkerRole.BOTH
            assert first.grpc_address == worker.address
            assert first.load.ledger.num_total == 64
            # Twenty in ten seconds: half of them at least because it was asked.
            async with asyncio.timeout(10.0):
                for number in range(1, 21):
                    await bus.publish(subjects.who, encode_who(Who(router_id="router-0")))
                    again = decode_announce((await next_message(heard)).data)
                    assert again.sequence == first.sequence + number
            worker.running.request_stop()
            async with asyncio.timeout(5.0):
                while not again.is_leaving:
                    again = decode_announce((await next_message(heard)).data)
            async with asyncio.timeout(5.0):
                await worker.running.life.wait_stop()


async def test_a_draining_worker_refuses_and_finishes(tmp_path: Path) -> None:
    gate = LayerGate([1])
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0", gate=gate)
        running, late = make_request("r1", max_tokens=8), make_request("r2", max_tokens=8)
        router.decode(running)
        await eventually(lambda: gate.is_reached, timeout_s=5.0, what="it runs")
        worker.service.shell.begin_drain()
        router.decode(late)
        gate.open()
        assert await router.answer(running) == expected_answer(running)
        refused = await router.until(late, Refused)
        assert isinstance(refused, Refused)
        assert refused.reason is RefuseReason.DRAINING
        assert router.loads[-1].is_draining


async def test_what_cannot_finish_is_handed_back(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0")
        request = make_request(max_tokens=900)
        router.decode(request)
        await router.until(request, TokensReady)
        worker.service.shell.hand_back()
        back = await router.until(request, HandedBack)
        assert isinstance(back, HandedBack)
        assert back.reason is HandBackReason.DRAINING


async def test_a_router_that_says_nonsense_is_cut_and_nobody_else(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("d0")
        async with worker.router("other") as other:
            # A request's id is a name; whose attempt this is cannot be told.
            other.decode(make_request("two words"))
            failure = await other.until_closed()
            assert isinstance(failure, grpc.aio.AioRpcError)
            assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        request = make_request(max_tokens=3)
        router.decode(request)
        assert await router.answer(request) == expected_answer(request)


async def test_a_request_that_cannot_be_read_is_refused_and_no_other(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        _, router = await workers.start("d0")
        bad, good = make_request("r1", prompt=()), make_request("r2", max_tokens=3)
        router.decode(bad)
        router.decode(good)
        refused = await router.until(bad, Refused)
        assert isinstance(refused, Refused)
        assert refused.reason is RefuseReason.NEVER_FITS
        assert await router.answer(good) == expected_answer(good)


async def test_the_engines_death_is_the_workers(tmp_path: Path) -> None:
    request = make_request(prompt=8, max_tokens=8)

    async def serve() -> None:
        async with fake_workers(tmp_path) as workers:
            _, router = await workers.start("d0", failpoints="engine.after_step=error:boom@3")
            router.decode(request)
            await router.answer(request)

    with pytest.raises(BaseExceptionGroup) as caught:
        await serve()
    (died,) = leaves(caught.value)
    assert isinstance(died, EngineDiedError)
    assert "boom" in died.message


async def next_message(subscription: Subscription, *, timeout_s: float = 5.0) -> BusMessage:
    async with asyncio.timeout(timeout_s):
        async for message in subscription:
            return message
    raise AssertionError("the subscription ended")


def leaves(group: BaseException) -> list[BaseException]:
    if isinstance(group, BaseExceptionGroup):
        return [leaf for inner in group.exceptions for leaf in leaves(inner)]
    return [group]
