"""The gRPC door, through the SDK: every token with its id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from moonpool.client import AsyncClient, AsyncGeneration, GenerateOptions, RetryPolicy
from moonpool.inference.generation import TokenPrompt
from moonpool_loadtest.bench.driver import (
    AnswerEnded,
    DriverEvent,
    RequestOptions,
    TokensArrived,
)
from moonpool_loadtest.bench.records import ServerTold
from moonpool_loadtest.bench.workload import BenchRequest


class GrpcDriver:
    """Implements Driver. Nothing is retried: a refusal is a result."""

    def __init__(self, address: str, options: RequestOptions, *, api_key: str | None) -> None:
        self._options = options
        self._client = AsyncClient(
            address,
            api_key=api_key,
            timeout_s=options.timeout_s,
            retry=RetryPolicy(max_retries=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def list_models(self) -> tuple[str, ...]:
        return tuple(model.id for model in await self._client.list_models(timeout_s=10.0))

    async def stream(self, request: BenchRequest) -> AsyncGenerator[DriverEvent, None]:
        async with self._generate(request) as generation:
            async for chunk in generation:
                if chunk.token_ids:
                    yield TokensArrived(num_tokens=len(chunk.token_ids), token_ids=chunk.token_ids)
            result = await generation.result()
        yield AnswerEnded(
            told=ServerTold(
                usage=result.usage,
                finish_reason=result.finish_reason.value,
                request_id=result.request_id,
                ttft_ms=result.timing.ttft_ms,
                ttft_parts_ms=result.timing.ttft_parts_ms,
                prefill_worker=result.placement.prefill_worker,
                decode_worker=result.placement.decode_worker,
                num_attempts=result.placement.num_attempts,
            )
        )

    def _generate(self, request: BenchRequest) -> AsyncGeneration:
        options: GenerateOptions = {
            "model": self._options.model,
            "temperature": self._options.temperature,
            "max_tokens": request.max_tokens,
            "ignore_eos": self._options.ignore_eos,
        }
        if isinstance(request.prompt, TokenPrompt):
            options["token_ids"] = request.prompt.token_ids
            return self._client.generate(**options)
        if self._options.is_chat:
            options["messages"] = [{"role": "user", "content": request.prompt.text}]
            return self._client.generate(**options)
        return self._client.generate(request.prompt.text, **options)
