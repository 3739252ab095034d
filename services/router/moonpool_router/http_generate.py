"""GenerateEndpoint: `/v1/chat/completions` or `/v1/completions`, whole or as server-sent events.

Life of a stream
  1. The request gets its place, is read, checked and submitted; whatever fails here has its own status.
  2. The response begins with the first event of the answer, or after KEEP_ALIVE_S without one.
  3. From then on an error is an event, and `[DONE]` comes after it; a comment breaks every long silence.

A client that leaves ends its request, whatever it waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog
from starlette.datastructures import Headers

from moonpool.errors import MoonpoolError
from moonpool.inference.generation import GenerationChunk, GenerationDone
from moonpool.service.http_protocol import Receive, Scope, Send
from moonpool.wire.openai_fields import Json, parse_object, unknown_warning
from moonpool.wire.openai_request import HttpContext, OpenAiRequest
from moonpool.wire.openai_response import KEEP_ALIVE, AnswerFormat, error_events
from moonpool.wire.status import hidden
from moonpool_router.http_body import call_context, read_json
from moonpool_router.http_exchange import ClientGoneError, HttpExchange, exchange_of
from moonpool_router.http_response import json_start, send_json, stream_start
from moonpool_router.pipeline import AnswerStream, Frontdoor

#: A stream is never silent for longer: proxies give up after a minute.
KEEP_ALIVE_S = 15.0
#: The same for a client that may be gone.
PROBE_S = 1.0
#: Beyond it a body is parsed in a thread: on the loop it could take longer than everybody's tokens bear.
LARGE_BODY_BYTES = 64 * 1_024

log = structlog.get_logger("moonpool.router")


class GenerateEndpoint:
    """An ASGI application behind HttpDoor.

    Args:
        read: The body and headers -> a request.
        make_format: Makes the words of one answer.
        endpoint: In the books.
    """

    def __init__(
        self,
        front: Frontdoor,
        *,
        read: Callable[[Mapping[str, Json], HttpContext], OpenAiRequest],
        make_format: Callable[..., AnswerFormat],
        endpoint: str,
        max_body_bytes: int,
        is_strict: bool,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._front = front
        self._read = read
        self._make_format = make_format
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._is_strict = is_strict
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        context = call_context(
            Headers(scope=scope), tenant=exchange.tenant, is_strict=self._is_strict
        )
        exchange.label = context.request_label
        with self._front.admitted(exchange.tenant):
            body = await read_json(scope, receive, max_bytes=self._max_body_bytes)
            if len(body) > LARGE_BODY_BYTES:
                request = await asyncio.to_thread(self._parse, body, context)
            else:
                request = self._parse(body, context)
            answered = self._answer(exchange, request, send)
            await exchange.while_connected(receive, answered)

    def _parse(self, body: bytes, context: HttpContext) -> OpenAiRequest:
        return self._read(parse_object(body), context)

    async def _answer(self, exchange: HttpExchange, request: OpenAiRequest, send: Send) -> None:
        form = self._make_format(
            request_id=exchange.request_id,
            model=self._front.model_name,
            created=int(time.time()),
        )
        stream = _EventStream(exchange, request, form, send, keep_alive_s=self._keep_alive_s)
        exchange.is_submitted = True
        try:
            async with self._front.submit(
                request.generation,
                endpoint=self._endpoint,
                request_id=exchange.request_id,
                is_admitted=True,
            ) as answer:
                if request.is_stream:
                    await stream.write(answer)
                else:
                    await _write_whole(answer, exchange, request, form, send)
        except ClientGoneError:
            raise
        except MoonpoolError as error:
            request.in_clients_words(error)
            if not stream.has_begun:
                raise
            await stream.fail(error)
        except Exception:
            if not stream.has_begun:
                raise
            log.exception("http.stream_failed", request_id=exchange.request_id)
            await stream.fail(hidden(exchange.request_id))


async def _write_whole(
    answer: AnswerStream,
    exchange: HttpExchange,
    request: OpenAiRequest,
    form: AnswerFormat,
    send: Send,
) -> None:
    texts: list[str] = []
    async for event in answer:
        match event:
            case GenerationChunk():
                texts.append(event.text)
            case GenerationDone():
                body = form.whole("".join(texts), event, has_details=request.wants_details)
                await send_json(send, json_start(200, body, headers=_headers(request)), body)


class _EventStream:
    """One answer as server-sent events."""

    def __init__(
        self,
        exchange: HttpExchange,
        request: OpenAiRequest,
        form: AnswerFormat,
        send: Send,
        *,
        keep_alive_s: float,
    ) -> None:
        self._exchange = exchange
        self._request = request
        self._form = form
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._silence: asyncio.Timeout | None = None
        self.has_begun = False

    async def write(self, answer: AnswerStream) -> None:
        """All of it. The answer's iterator must bear that a wait for the next event is given up."""
        connection = self._exchange.connection
        connection.on_half_closed = self._break_silence
        request, form = self._request, self._form
        is_first = True
        events = aiter(answer)
        while True:
            silence_s = PROBE_S if connection.is_half_closed else self._keep_alive_s
            try:
                async with asyncio.timeout(silence_s) as self._silence:
                    event = await anext(events)
            except TimeoutError:
                await self._put(KEEP_ALIVE)
                continue
            match event:
                case GenerationChunk(text=text):
                    # Text may lag behind its tokens; only the first chunk may be empty.
                    if text or is_first:
                        await self._put(
                            form.chunk(
                                text, is_first=is_first, includes_usage=request.includes_usage
                            )
                        )
                        is_first = False
                case GenerationDone():
                    last = form.last(
                        event,
                        is_first=is_first,
                        includes_usage=request.includes_usage,
                        has_details=request.wants_details,
                    )
                    await self._put(last, is_last=True)
                    return

    async def fail(self, error: MoonpoolError) -> None:
        """Tell an error in a stream that has begun, and end it."""
        self._exchange.error_code = error.code
        await self._put(error_events(error), is_last=True)

    def _break_silence(self) -> None:
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(asyncio.get_running_loop().time())

    async def _put(self, data: bytes, *, is_last: bool = False) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(stream_start(headers=_headers(self._request)))
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _headers(request: OpenAiRequest) -> dict[str, str]:
    return {"x-warning": unknown_warning(request.unknown)} if request.unknown else {}
