"""Real gRPC on loopback: errors, deadlines, keys, health, reflection, bounds, keepalive."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moonpool.api.v1 import worker_pb2, worker_pb2_grpc
from moonpool.config.api_keys import ApiKeys, key_digest
from moonpool.errors import (
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    MoonpoolError,
    OverloadedError,
    TenantLimitError,
    UnauthenticatedError,
    UnavailableError,
)
from moonpool.rpc import options
from moonpool.rpc.auth import KeyInterceptor
from moonpool.rpc.calls import call, is_serving, replies
from moonpool.rpc.channel import open_channel
from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import call_metadata, clean_label, read_metadata
from moonpool.rpc.server import RpcServer
from support.raw_http2 import call_headers, empty_message, greeting_without_window

_SERVICE = "moonpool.api.v1.Worker"
_DEADLINE_S = 5.0
_CHECK = "/grpc.health.v1.Health/Check"


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Describe raises or answers; Session echoes version strings, then raises."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.metadata: Any = None
        self.remaining_s: float | None = None
        self.cancelled = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.metadata = context.invocation_metadata()
        self.remaining_s = context.time_remaining()
        if self.failure is not None:
            raise self.failure
        return worker_pb2.WorkerHello(version="1")

    async def Ledger(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Session(self, requests: Any, context: Any) -> Any:  # noqa: N802
        try:
            async for request in requests:
                if self.failure is not None:
                    raise self.failure
                yield worker_pb2.WorkerMessage(
                    hello=worker_pb2.WorkerHello(version=request.hello.router_id)
                )
        finally:
            self.cancelled.set()


@asynccontextmanager
async def serving(
    servicer: WorkerServicer, **server_options: Any
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer(**server_options)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, _SERVICE)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.stop(grace_s=0)


async def describe(channel: grpc.aio.Channel, **arguments: Any) -> worker_pb2.WorkerHello:
    return await call(
        worker_pb2_grpc.WorkerStub(channel).Describe,
        worker_pb2.DescribeRequest(),
        worker_pb2.WorkerHello,
        peer="worker w",
        **{"deadline_s": _DEADLINE_S, **arguments},
    )


async def test_an_error_arrives_as_it_was_raised() -> None:
    raised = OverloadedError("full", code="queue_full", param="model", retry_after_s=1.5)
    async with serving(WorkerServicer(raised)) as (_, channel):
        with pytest.raises(OverloadedError) as caught:
            await describe(channel)
    got = caught.value
    assert (got.message, got.code, got.param, got.retry_after_s) == (
        "full", "queue_full", "model", 1.5,
    )  # fmt: skip


async def test_a_bug_is_internal_with_a_constant_text() -> None:
    async with serving(WorkerServicer(ValueError("/secret/path"))) as (_, channel):
        with pytest.raises(InternalError) as caught:
            await describe(channel)
    assert "secret" not in caught.value.message


async def test_errors_in_a_stream_and_an_early_end() -> None:
    servicer = WorkerServicer()
    async with serving(servicer) as (_, channel), asyncio.timeout(_DEADLINE_S):
        stub = worker_pb2_grpc.WorkerStub(channel)
        stream = stub.Session()
        await stream.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="r")))
        async for reply in replies(stream, worker_pb2.WorkerMessage, peer="w"):
            assert reply.hello.version == "r"
            break
        stream.cancel()
        await servicer.cancelled.wait()

        servicer.failure = FailedPreconditionError("no", param="namespace")
        stream = stub.Session()
        await stream.write(worker_pb2.RouterMessage(ping=worker_pb2.Ping()))
        with pytest.raises(FailedPreconditionError) as caught:
            async for _ in replies(stream, worker_pb2.WorkerMessage, peer="w"):
                pass
        assert caught.value.param == "namespace"


async def test_a_deadline_reaches_the_server_and_cancels_it() -> None:
    servicer = WorkerServicer()
    async with serving(servicer) as (_, channel), asyncio.timeout(_DEADLINE_S):
        await describe(channel, deadline_s=3.0)
        assert servicer.remaining_s is not None
        # gRPC sends a time in three digits, rounded up.
        assert 2.0 < servicer.remaining_s <= 3.01
        with pytest.raises(DeadlineExceededError):
            await call(
                worker_pb2_grpc.WorkerStub(channel).Ledger,
                worker_pb2.LedgerRequest(),
                worker_pb2.LedgerReply,
                peer="w",
                deadline_s=0.05,
            )
        await servicer.cancelled.wait()


async def test_metadata_carries_trace_and_label() -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    servicer = WorkerServicer()
    async with serving(servicer) as (_, channel):
        await describe(
            channel, metadata=call_metadata(traceparent=traceparent, request_label="mine")
        )
    context = read_metadata(servicer.metadata)
    assert (context.traceparent, context.request_label) == (traceparent, "mine")
    assert (
        read_metadata([("traceparent", "junk"), ("x-request-id", "a\nb" * 100)]).traceparent == ""
    )
    assert read_metadata(None).request_label == ""


def test_a_label_is_cut_before_it_is_cleaned() -> None:
    assert clean_label("a\nb") == "ab"
    assert clean_label("\x00" * 128 + "far behind") == ""


async def test_nobody_there_names_the_peer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with open_channel(f"127.0.0.1:{taken.getsockname()[1]}") as channel:
            with pytest.raises(UnavailableError, match="worker w"):
                await describe(channel)


async def test_a_taken_port_is_said() -> None:
    async with serving(WorkerServicer()) as (server, _):
        other = RpcServer(port=server.port)
        with pytest.raises(UnavailableError, match="Cannot listen"):
            await other.start()
        await other.stop(grace_s=0)


async def test_a_key_is_needed_where_there_is_one() -> None:
    async with serving(WorkerServicer(), key="k" * 16) as (server, channel):
        for metadata in ((), call_metadata(key="wrong")):
            with pytest.raises(UnauthenticatedError):
                await describe(channel, metadata=metadata)
        assert (await describe(channel, metadata=call_metadata(key="k" * 16))).version == "1"
        await server.set_serving(True)
        assert await is_serving(channel, peer="w", deadline_s=_DEADLINE_S)


async def test_a_stream_without_the_key_is_refused() -> None:
    async with serving(WorkerServicer(), key="k" * 16) as (_, channel):
        stream = worker_pb2_grpc.WorkerStub(channel).Session()
        with pytest.raises(UnauthenticatedError):
            async for _ in replies(stream, worker_pb2.WorkerMessage, peer="w"):
                pass


async def test_a_stranger_may_ask_for_health_but_not_watch_it() -> None:
    key = call_metadata(key="k" * 16)
    async with serving(WorkerServicer(), key="k" * 16) as (_, channel):
        assert not await is_serving(channel, peer="w", deadline_s=_DEADLINE_S)
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(UnauthenticatedError), errors_from("w"):
            await watch.read()
        watch = stub.Watch(health_pb2.HealthCheckRequest(), metadata=key)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


@asynccontextmanager
async def guarded(
    *, max_calls: int | None = None, **options: Any
) -> AsyncIterator[tuple[int, grpc.aio.Channel]]:
    """A server with nothing but health behind a key; its port, and a channel to it."""
    server = grpc.aio.server(
        interceptors=[KeyInterceptor(ApiKeys.single("k" * 16), **options)],
        maximum_concurrent_rpcs=max_calls,
    )
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(_DEADLINE_S):
            yield port, channel
    finally:
        await server.stop(0)


async def check(channel: grpc.aio.Channel, *, key: str = "") -> bool:
    """Whether health is told, with a key or without; OverloadedError if there is no place."""
    with errors_from("w"):
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), metadata=call_metadata(key=key)
        )
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_stranger_that_asks_nothing_is_sent_away() -> None:
    async with guarded(stranger_timeout_s=0.05) as (_, channel):
        silent = channel.stream_stream(_CHECK)()
        with pytest.raises(InvalidRequestError, match="in time"), errors_from("w"):
            await silent.read()


@pytest.mark.parametrize("asks", [False, True], ids=["silent", "takes no answer"])
async def test_strangers_that_stay_leave_room_for_whoever_has_a_key(asks: bool) -> None:
    async with guarded(max_calls=6, max_strangers=2, stranger_timeout_s=60.0) as (port, channel):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting_without_window())
        for stream in range(1, 19, 2):
            message = empty_message(stream=stream) if asks else b""
            writer.write(call_headers(_CHECK, stream=stream) + message)
        # A refusal is all headers, for which no window is needed.
        await reader.readuntil(b"As many calls without a key")
        while not await _has_place(channel, key="k" * 16):
            pass
        with pytest.raises(OverloadedError, match="without a key") as caught:
            await check(channel)
        assert type(caught.value) is OverloadedError
        writer.close()
        while not await _has_place(channel):
            pass


async def _has_place(channel: grpc.aio.Channel, *, key: str = "") -> bool:
    try:
        return await check(channel, key=key)
    except OverloadedError:
        return False


async def test_one_call_more_than_a_server_takes_is_refused() -> None:
    servicer = WorkerServicer()
    async with serving(servicer, max_calls=1) as (_, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        held = stub.Session()
        await held.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="1")))
        assert (await held.read()).hello.version == "1"
        with pytest.raises(OverloadedError) as caught:
            await describe(channel)
        assert caught.value.is_retryable
        held.cancel()
        await servicer.cancelled.wait()
        async with asyncio.timeout(_DEADLINE_S):
            while not await _is_answered(channel):
                pass


async def _is_answered(channel: grpc.aio.Channel, **arguments: Any) -> bool:
    try:
        await describe(channel, **arguments)
    except OverloadedError:
        return False
    return True


async def test_a_tenant_leaves_the_others_their_part_of_the_calls() -> None:
    keys = ApiKeys({key_digest(b"of a"): "a", key_digest(b"of b"): "b"})
    of_a, of_b = call_metadata(key="of a"), call_metadata(key="of b")
    async with serving(WorkerServicer(), key=keys, max_calls_per_tenant=1) as (_, channel):
        # It says nothing, and holds its call all the same.
        stub = worker_pb2_grpc.WorkerStub(channel)
        silent = stub.Session(metadata=of_a)
        async with asyncio.timeout(_DEADLINE_S):
            while await _is_answered(channel, metadata=of_a):
                # It came while another call of the tenant's was open, and was refused.
                if silent.done():
                    silent = stub.Session(metadata=of_a)
        with pytest.raises(TenantLimitError):
            await describe(channel, metadata=of_a)
        assert (await describe(channel, metadata=of_b)).version == "1"
        silent.cancel()
        async with asyncio.timeout(_DEADLINE_S):
            while not await _is_answered(channel, metadata=of_a):
                pass


async def test_calls_of_all_kinds_are_among_a_tenants() -> None:
    key = call_metadata(key="k" * 16)
    async with serving(WorkerServicer(), key="k" * 16, max_calls_per_tenant=1) as (_, channel):
        assert (await describe(channel, metadata=key)).version == "1"
        session = worker_pb2_grpc.WorkerStub(channel).Session(metadata=key)
        for version in ("1", "2"):
            hello = worker_pb2.RouterHello(router_id=version)
            await session.write(worker_pb2.RouterMessage(hello=hello))
            assert (await session.read()).hello.version == version
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), metadata=key
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(TenantLimitError):
            await describe(channel, metadata=key)
        watch.cancel()
        async with asyncio.timeout(_DEADLINE_S):
            while not await _is_answered(channel, metadata=key):
                pass


async def test_an_open_address_without_a_key_refuses_to_start() -> None:
    with pytest.raises(ConfigError, match="needs a key"):
        RpcServer(host="0.0.0.0")


async def test_health_follows_and_reflection_names_the_services() -> None:
    async with serving(WorkerServicer()) as (server, channel):
        assert not await is_serving(channel, peer="w", deadline_s=_DEADLINE_S)
        await server.set_serving(True)
        for name in ("", _SERVICE):
            assert await is_serving(channel, peer="w", deadline_s=_DEADLINE_S, service_name=name)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        with pytest.raises(MoonpoolError) as caught:
            await is_serving(channel, peer="w", deadline_s=_DEADLINE_S, service_name="x")
        assert caught.value.code == "not_found"

        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=_SERVICE))
        reply = await stream.read()
        stream.cancel()
        files = [
            FileDescriptorProto.FromString(raw).name
            for raw in reply.file_descriptor_response.file_descriptor_proto
        ]
        assert "moonpool/api/v1/worker.proto" in files


async def test_a_message_beyond_the_bound_is_refused_and_the_server_lives() -> None:
    async with serving(WorkerServicer(), max_message_bytes=1_024) as (_, channel):
        stream = worker_pb2_grpc.WorkerStub(channel).Session()
        await stream.write(
            worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="x" * 4_096))
        )
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in replies(stream, worker_pb2.WorkerMessage, peer="w"):
                pass
        assert (caught.value.code, caught.value.is_retryable) == ("request_too_large", False)
        assert (await describe(channel)).version == "1"


def test_keepalive_notices_silence_within_five_seconds_and_is_tolerated() -> None:
    server = dict(options.server_options(1))
    channel = dict(options.channel_options(1))
    for end in (server, channel):
        assert end["grpc.keepalive_time_ms"] + end["grpc.keepalive_timeout_ms"] <= 5_000
    # A quiet stream is cut after 10 s if the server counts its pings as abuse.
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= 1_000
    assert server["grpc.keepalive_permit_without_calls"] == 1


_SERVER = """
import asyncio
from moonpool.api.v1 import worker_pb2, worker_pb2_grpc
from moonpool.rpc.server import RpcServer

class Servicer(worker_pb2_grpc.WorkerServicer):
    async def Session(self, requests, context):
        async for _ in requests:
            yield worker_pb2.WorkerMessage()

async def main():
    server = RpcServer()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, Servicer(), "moonpool.api.v1.Worker")
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    peer = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert peer.stdout is not None
        yield peer, f"127.0.0.1:{int(peer.stdout.readline())}"
    finally:
        peer.kill()
        peer.communicate()


async def test_a_peer_that_freezes_is_dead_after_five_seconds() -> None:
    # Its kernel goes on acknowledging: only an unanswered ping tells.
    with other_process() as (peer, address):
        async with open_channel(address) as channel, asyncio.timeout(20):
            stream = worker_pb2_grpc.WorkerStub(channel).Session()
            await stream.write(worker_pb2.RouterMessage(ping=worker_pb2.Ping()))
            await stream.read()
            peer.send_signal(signal.SIGSTOP)
            frozen_at = asyncio.get_running_loop().time()
            with pytest.raises(UnavailableError):
                async for _ in replies(stream, worker_pb2.WorkerMessage, peer="w"):
                    pass
            assert asyncio.get_running_loop().time() - frozen_at < 7.0
