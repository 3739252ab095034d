"""The gRPC door by itself: a client that does not read, and one that does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moonpool.api.v1 import inference_pb2, inference_pb2_grpc
from moonpool.config.api_keys import ApiKeys, key_digest
from moonpool.errors import InvalidRequestError, TenantLimitError, UnauthenticatedError
from moonpool.ids import RequestId
from moonpool.inference.generation import GenerationChunk, GenerationEvent, GenerationRequest
from moonpool.rpc.calls import replies
from moonpool.rpc.channel import open_channel
from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.server import RpcServer
from moonpool_router import inference_door
from moonpool_router.inference_door import InferenceDoor

_CHUNK = GenerationChunk(
    request_id=RequestId("r"), text="x" * 65_536, token_ids=(), first_position=0
)


class Endless:
    """An answer that never ends."""

    request_id = RequestId("r")

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        while True:
            yield _CHUNK
            await asyncio.sleep(0)


class EndlessDoor:
    model_name = "m"
    max_model_len = 16

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.labels: list[str] = []
        self.tenants: list[str] = []

    @asynccontextmanager
    async def submit(self, request: GenerationRequest, *, endpoint: str) -> AsyncIterator[Endless]:
        self.labels.append(request.client_request_id)
        self.tenants.append(request.tenant)
        try:
            yield Endless()
        finally:
            self.left.set()


@asynccontextmanager
async def serving(
    front: EndlessDoor, *, stall_s: float = 5.0, keys: ApiKeys | None = None
) -> AsyncIterator[str]:
    server = RpcServer(key=keys, max_calls_per_tenant=1 if keys is not None else None)
    server.add(
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceDoor(front, keys=keys, stall_s=stall_s),
        inference_door.SERVICE,
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0)


def request() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hello")


async def test_a_client_that_does_not_read_loses_its_request() -> None:
    front = EndlessDoor()
    async with serving(front, stall_s=0.2) as address, open_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request())  # type: ignore[no-untyped-call]  # generated
        await call.read()
        async with asyncio.timeout(10):
            await front.left.wait()


async def test_a_calls_label_is_its_requests_unless_that_has_its_own() -> None:
    front = EndlessDoor()
    async with serving(front, stall_s=5.0) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        for own in ("", "own"):
            message = inference_pb2.GenerateRequest(text="hello", client_request_id=own)
            call = stub.Generate(message, metadata=call_metadata(request_label="the call's"))
            await call.read()
            call.cancel()
    assert front.labels == ["the call's", "own"]


async def test_a_request_is_its_keys_tenants() -> None:
    front = EndlessDoor()
    keys = ApiKeys({key_digest(b"of a"): "a", key_digest(b"of b"): "b"})
    async with serving(front, keys=keys) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        for key in ("of b", "of a"):
            call = stub.Generate(request(), metadata=call_metadata(key=key))
            await call.read()
            call.cancel()
            async with asyncio.timeout(10):
                await front.left.wait()
        for key in ("", "of c", "of a "):
            call = stub.Generate(request(), metadata=call_metadata(key=key))
            with pytest.raises(UnauthenticatedError):
                async for _ in replies(call, inference_pb2.GenerateReply, peer="door"):
                    pass
    assert front.tenants == ["b", "a"]


async def test_a_client_that_does_not_read_frees_its_tenants_call() -> None:
    front = EndlessDoor()
    keys = ApiKeys({key_digest(b"of a"): "a"})
    key = call_metadata(key="of a")
    async with serving(front, stall_s=0.2, keys=keys) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Generate(request(), metadata=key)
        await call.read()
        async with asyncio.timeout(10):
            await front.left.wait()
            while len(front.labels) < 2:
                second = stub.Generate(request(), metadata=key)
                with contextlib.suppress(TenantLimitError), errors_from("door"):
                    await second.read()
                second.cancel()


async def test_without_keys_every_request_is_the_default_tenants() -> None:
    front = EndlessDoor()
    async with serving(front) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Generate(request(), metadata=call_metadata(key="anything"))
        await call.read()
        call.cancel()
    assert front.tenants == ["default"]


async def test_a_prompt_longer_than_the_model_takes_goes_no_further() -> None:
    front = EndlessDoor()
    async with serving(front) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        prompt = inference_pb2.TokenPrompt(token_ids=range(front.max_model_len))
        call = stub.Generate(inference_pb2.GenerateRequest(tokens=prompt))
        with pytest.raises(InvalidRequestError, match="maximum context length is 16 tokens"):
            async for _ in replies(call, inference_pb2.GenerateReply, peer="door"):
                pass
    assert front.labels == []


async def test_a_client_that_reads_keeps_it_and_one_that_cancels_ends_it() -> None:
    front = EndlessDoor()
    async with serving(front, stall_s=0.2) as address, open_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request())  # type: ignore[no-untyped-call]  # generated
        for _ in range(200):
            reply = await call.read()
            assert reply.chunk.text
        assert not front.left.is_set()
        call.cancel()
        async with asyncio.timeout(10):
            await front.left.wait()
