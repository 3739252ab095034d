"""Any server with OpenAI's streaming HTTP interface: Moonpool, vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import msgspec

from moonpool.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from moonpool.inference.generation import TokenPrompt, Usage
from moonpool_loadtest.bench.driver import (
    AnswerEnded,
    DriverEvent,
    RequestOptions,
    TokensArrived,
)
from moonpool_loadtest.bench.records import ServerTold
from moonpool_loadtest.bench.sse import HttpUrl, SseParser, send
from moonpool_loadtest.bench.workload import BenchRequest

_DONE = b"[DONE]"
_LIST_TIMEOUT_S = 10.0
_ERROR_BY_STATUS: dict[int, type[MoonpoolError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: DeadlineExceededError,
    429: OverloadedError,
    503: OverloadedError,
    504: DeadlineExceededError,
}


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        return bool(self.delta.content or self.delta.reasoning or self.delta.reasoning_content)


class _Error(msgspec.Struct):
    message: str = ""
    #: A number at some servers.
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAIDriver:
    """Implements Driver.

    Args:
        base_url: With the version, as the `openai` package takes it: `http://host:port/v1`.
    """

    def __init__(self, base_url: str, options: RequestOptions, *, api_key: str | None) -> None:
        self._url = HttpUrl.parse(base_url)
        self._options = options
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._encoder = msgspec.json.Encoder()
        self._model = options.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is kept between requests."""

    async def list_models(self) -> tuple[str, ...]:
        """Also settles which model is asked if none was named: the first."""
        try:
            async with (
                asyncio.timeout(_LIST_TIMEOUT_S),
                send(self._url, "GET", "/models", headers=self._headers) as answer,
            ):
                content = await answer.read()
        except TimeoutError:
            raise UnavailableError(
                f"{self._url.host}:{self._url.port}: no answer within {_LIST_TIMEOUT_S:g} s"
            ) from None
        if answer.status != 200:
            raise self._error(answer.status, content)
        try:
            models = tuple(model.id for model in msgspec.json.decode(content, type=_Models).data)
        except msgspec.MsgspecError as error:
            raise InternalError(f"The list of models cannot be read: {error}") from error
        if not self._model and models:
            self._model = models[0]
        return models

    async def stream(self, request: BenchRequest) -> AsyncGenerator[DriverEvent, None]:
        is_chat = self._options.is_chat and not isinstance(request.prompt, TokenPrompt)
        path = "/chat/completions" if is_chat else "/completions"
        body = self._encoder.encode(self._body(request, is_chat=is_chat))
        usage: Usage | None = None
        finish_reason = request_id = ""
        is_done = False
        parser = SseParser()
        async with send(self._url, "POST", path, headers=self._headers, body=body) as answer:
            if answer.status != 200:
                raise self._error(answer.status, await answer.read())
            async for piece in answer.body:
                for data in parser.feed(piece):
                    if data == _DONE:
                        is_done = True
                        break
                    chunk = self._decode(data)
                    request_id = request_id or chunk.id
                    if chunk.usage is not None:
                        usage = _usage(chunk.usage)
                    for choice in chunk.choices:
                        # A first delta with a role and no content is no token.
                        if choice.has_text:
                            yield TokensArrived(num_tokens=1)
                        finish_reason = choice.finish_reason or finish_reason
                if is_done:
                    break
        if not (is_done or finish_reason):
            raise InternalError("The stream ended without its end.", code="answer_cut_off")
        yield AnswerEnded(
            told=ServerTold(usage=usage, finish_reason=finish_reason, request_id=request_id)
        )

    def _body(self, request: BenchRequest, *, is_chat: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Not in OpenAI's interface: said only when it is asked for.
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(request.prompt, TokenPrompt):
            body["prompt"] = request.prompt.token_ids
        elif is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt.text}]
        else:
            body["prompt"] = request.prompt.text
        return body

    def _decode(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise InternalError(f"A message of the stream cannot be read: {error}") from error
        if chunk.error is not None:
            raise InternalError(chunk.error.message, code=str(chunk.error.code or "stream_error"))
        return chunk

    def _error(self, status: int, content: bytes) -> MoonpoolError:
        try:
            told = self._decoder.decode(content).error or _Error()
        except msgspec.MsgspecError:
            told = _Error(message=content[:200].decode(errors="replace"))
        kind = _ERROR_BY_STATUS.get(status, InvalidRequestError if status < 500 else InternalError)
        return kind(
            told.message or f"HTTP status {status}", code=str(told.code or f"http_{status}")
        )


def _usage(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens or 0,
        num_cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
    )
