"""One streamed generation over gRPC, as domain events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.api.v1 import inference_pb2_grpc
from moonpool.inference.generation import GenerationEvent, GenerationRequest
from moonpool.rpc.calls import replies
from moonpool.rpc.metadata import call_metadata
from moonpool.wire.inference import generation_event_from_pb, generation_request_to_pb


@asynccontextmanager
async def open_generation(
    channel: grpc.aio.Channel, request: GenerationRequest, *, peer: str, key: str | None = None
) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
    """Start a generation; leaving the context cancels it, wherever it is.

    The events are GenerationChunk ..., then GenerationDone. Reading them raises the MoonpoolError
    that the router raised, or one that says what the transport saw.

    Args:
        peer: Named in errors.
        key: The door's API key, if it has one.
    """
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
    stream = stub.Generate(
        generation_request_to_pb(request),
        timeout=request.deadline_s,
        metadata=call_metadata(key=key or "", traceparent=request.traceparent),
    )
    async with aclosing(_events(stream, peer)) as events:
        try:
            yield events
        finally:
            stream.cancel()


async def _events(stream: object, peer: str) -> AsyncGenerator[GenerationEvent, None]:
    async with aclosing(replies(stream, pb.GenerateReply, peer=peer)) as messages:
        async for message in messages:
            yield generation_event_from_pb(message)
