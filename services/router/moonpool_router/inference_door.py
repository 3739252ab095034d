"""The public gRPC door: Inference.Generate and ListModels over the request pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.api.v1 import inference_pb2_grpc
from moonpool.config.api_keys import ApiKeys
from moonpool.errors import UnauthenticatedError
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.rpc.metadata import bearer_key, read_metadata
from moonpool.wire.inference import generation_event_to_pb, generation_request_from_pb
from moonpool_router.pipeline import CLIENT_STALL_S, Frontdoor

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
#: In the books.
ENDPOINT = "grpc"

log = structlog.get_logger("moonpool.router")


class InferenceDoor(inference_pb2_grpc.InferenceServicer):
    """Errors leave as MoonpoolError; the server's interceptor maps them.

    Args:
        keys: Those that the server takes; None: everyone comes in, as the default tenant.
    """

    def __init__(
        self,
        pipeline: Frontdoor,
        *,
        keys: ApiKeys | None = None,
        stall_s: float = CLIENT_STALL_S,
    ) -> None:
        self._pipeline = pipeline
        self._keys = keys
        self._stall_s = stall_s

    async def Generate(  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateReply]:
        """Stream an answer. Ends the request when the client cancels or does not read."""
        call = read_metadata(context.invocation_metadata())
        generation = generation_request_from_pb(
            request,
            deadline_s=context.time_remaining(),
            traceparent=call.traceparent,
            request_label=call.request_label,
            tenant=self._tenant(context),
            max_model_len=self._pipeline.max_model_len,
        )
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        async with self._pipeline.submit(generation, endpoint=ENDPOINT) as answer:
            async for event in answer:
                # While this generator is suspended in `yield`, gRPC writes; a client that does not
                # read holds it there.
                stall = loop.call_later(self._stall_s, _give_up, task, answer.request_id)
                try:
                    yield generation_event_to_pb(event)
                finally:
                    stall.cancel()

    async def ListModels(  # noqa: N802 - the name is the protocol's
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsReply:
        """The one model that is served."""
        model = pb.ModelInfo(
            id=self._pipeline.model_name, max_model_len=self._pipeline.max_model_len
        )
        return pb.ListModelsReply(models=[model])

    def _tenant(self, context: grpc.aio.ServicerContext) -> str:
        if self._keys is None:
            return DEFAULT_TENANT
        tenant = self._keys.tenant_of(bearer_key(context.invocation_metadata()))
        if tenant is None:
            raise UnauthenticatedError("The API key is not valid here.")
        return tenant


def _give_up(task: asyncio.Task[None], request_id: str) -> None:
    log.warning("request.client_stalled", request_id=request_id)
    task.cancel()
