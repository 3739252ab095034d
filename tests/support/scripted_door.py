"""A gRPC door whose answers a test writes: one script per call, on the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.api.v1 import inference_pb2_grpc
from moonpool.errors import MoonpoolError
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    GenerationEvent,
    PlacementSummary,
    Timing,
    Usage,
)
from moonpool.inference.output import FinishReason
from moonpool.rpc.server import RpcServer
from moonpool.wire.inference import generation_event_to_pb

#: Events are sent, an error is raised, STAY waits until the client leaves, a callable is called.
STAY = object()
Step = GenerationEvent | MoonpoolError | object | Callable[[], None]


def chunk(text: str, first_position: int, *token_ids: int) -> GenerationChunk:
    return GenerationChunk(
        request_id=RequestId("r1"), text=text, token_ids=token_ids, first_position=first_position
    )


def done(num_tokens: int = 2, *, num_cached_tokens: int = 3) -> GenerationDone:
    return GenerationDone(
        request_id=RequestId("r1"),
        model="tiny",
        finish_reason=FinishReason.LENGTH,
        usage=Usage(
            num_prompt_tokens=5,
            num_completion_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
        ),
        timing=Timing(ttft_ms=3.0, ttft_parts_ms={"queue": 1.0, "prefill": 2.0}),
        placement=PlacementSummary(
            prefill_worker="prefill-0", decode_worker="decode-0", num_attempts=1, reason="remote"
        ),
    )


ANSWER: tuple[Step, ...] = (chunk("ab", 0, 65), chunk("c", 1, 66), done())


class ScriptedDoor(inference_pb2_grpc.InferenceServicer):
    """Plays `scripts` in order, the last one again and again."""

    def __init__(self, scripts: Sequence[Sequence[Step]]) -> None:
        self._scripts = scripts
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.remaining_s: list[float | None] = []
        #: A client left before the end.
        self.left = asyncio.Event()
        self.num_listings = 0

    async def Generate(  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateReply]:
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        try:
            for step in script:
                if step is STAY:
                    await asyncio.Event().wait()
                elif isinstance(step, MoonpoolError):
                    raise step
                elif isinstance(step, GenerationChunk | GenerationDone):
                    yield generation_event_to_pb(step)
                elif callable(step):
                    step()
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def ListModels(  # noqa: N802 - the name is the protocol's
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsReply:
        self.num_listings += 1
        return pb.ListModelsReply(models=[pb.ModelInfo(id="tiny", max_model_len=512)])


@asynccontextmanager
async def scripted_door(
    *scripts: Sequence[Step], key: str | None = None
) -> AsyncIterator[tuple[ScriptedDoor, str]]:
    """The door and its address."""
    door = ScriptedDoor(scripts or (ANSWER,))
    server = RpcServer(key=key)
    server.add(
        inference_pb2_grpc.add_InferenceServicer_to_server, door, "moonpool.api.v1.Inference"
    )
    await server.start()
    try:
        yield door, server.address
    finally:
        await server.stop(grace_s=0)
