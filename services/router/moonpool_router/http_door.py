"""HttpDoor: the OpenAI-compatible HTTP door: routes, keys, request ids, errors in OpenAI's shape.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
    GET /livez      the event loop runs (open to everyone)
    GET /readyz     requests can be served; if not, why     GET /health    the same, as vLLM has it
    GET /metrics    Prometheus                              GET /version

Where there are API keys everything but /livez needs one, and its tenant is the request's. Whatever an
endpoint raises becomes a response here, once; nothing of the server leaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from moonpool import __version__
from moonpool.config.api_keys import ApiKeys
from moonpool.errors import (
    InvalidRequestError,
    MoonpoolError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.service import http_protocol
from moonpool.service.http_protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    STALL_S,
    AsgiApp,
    Message,
    Receive,
    Scope,
    Send,
)
from moonpool.telemetry.metrics import CONTENT_TYPE
from moonpool.wire.openai_request import chat_request, completion_request
from moonpool.wire.openai_response import (
    ModelFields,
    ModelList,
    chat_format,
    completion_format,
    encode,
    model_fields,
)
from moonpool.wire.status import hidden
from moonpool_router import http_exchange
from moonpool_router.http_exchange import ClientGoneError, HttpExchange
from moonpool_router.http_generate import KEEP_ALIVE_S, GenerateEndpoint
from moonpool_router.http_response import send_error
from moonpool_router.pipeline import Frontdoor

LIVE_PATH = "/livez"
METRICS_PATH = "/metrics"
#: Of what asks for tokens: as in the books.
CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

log = structlog.get_logger("moonpool.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What an operator decides, and how long this door waits."""

    #: None: everyone may come in, as the default tenant.
    keys: ApiKeys | None = None
    is_strict: bool = False
    max_body_bytes: int = 8 * 2**20
    keep_alive_s: float = KEEP_ALIVE_S
    stall_s: float = STALL_S


class HttpDoor:
    """An ASGI application; see the file's head.

    Args:
        not_ready_because: Empty if requests can be served.
        render_metrics: The text that Prometheus scrapes.
        on_refused: Told of a generation that failed before the pipeline had it, with its endpoint.
    """

    def __init__(
        self,
        front: Frontdoor,
        *,
        settings: HttpSettings,
        not_ready_because: Callable[[], str],
        render_metrics: Callable[[], bytes],
        on_refused: Callable[[MoonpoolError, str], None],
    ) -> None:
        self._front = front
        self._settings = settings
        self._not_ready_because = not_ready_because
        self._render_metrics = render_metrics
        self._on_refused = on_refused
        self._started_unix_s = int(time.time())
        self._routes: AsgiApp = Router(
            redirect_slashes=False,
            routes=[
                Route(CHAT_PATH, self._chat(), methods=["POST"]),
                Route(COMPLETION_PATH, self._completion(), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route(LIVE_PATH, self._live, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/health", self._ready, methods=["GET"]),
                Route(METRICS_PATH, self._metrics, methods=["GET"]),
                Route("/version", self._version, methods=["GET"]),
            ],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            connection=scope["extensions"][http_protocol.EXTENSION],
            stall_s=self._settings.stall_s,
        )
        scope["extensions"][http_exchange.EXTENSION] = exchange
        # So that routes raise what they refuse.
        scope["app"] = self
        started_s = time.monotonic()

        async def send_told(message: Message) -> None:
            await exchange.send(send, _told(exchange, message))

        try:
            _check_size(scope)
            exchange.tenant = self._tenant(scope)
            await self._routes(scope, receive, send_told)
        except ClientGoneError as error:
            self._note_failure(exchange, scope, error)
        except MoonpoolError as error:
            self._note_failure(exchange, scope, error)
            await send_error(send_told, error)
        except HTTPException as refused:
            refusal = _refusal(scope, refused)
            exchange.error_code = refusal.code
            await send_error(send_told, refusal, headers=refused.headers)
        except Exception:
            log.exception("http.failed", request_id=exchange.request_id, path=scope["path"])
            ours = hidden(exchange.request_id)
            self._note_failure(exchange, scope, ours)
            if not exchange.status:
                await send_error(send_told, ours)
            else:
                exchange.connection.abort()
        finally:
            if scope["path"] in (CHAT_PATH, COMPLETION_PATH):
                log.info(
                    "http.request",
                    request_id=exchange.request_id,
                    label=exchange.label or None,
                    endpoint=scope["path"],
                    status=exchange.status or None,
                    error=exchange.error_code or None,
                    duration_ms=round((time.monotonic() - started_s) * 1_000, 1),
                )

    # -- endpoints --

    def _chat(self) -> GenerateEndpoint:
        return GenerateEndpoint(
            self._front,
            read=chat_request,
            make_format=chat_format,
            endpoint=CHAT_PATH,
            max_body_bytes=self._settings.max_body_bytes,
            is_strict=self._settings.is_strict,
            keep_alive_s=self._settings.keep_alive_s,
        )

    def _completion(self) -> GenerateEndpoint:
        return GenerateEndpoint(
            self._front,
            read=completion_request,
            make_format=completion_format,
            endpoint=COMPLETION_PATH,
            max_body_bytes=self._settings.max_body_bytes,
            is_strict=self._settings.is_strict,
            keep_alive_s=self._settings.keep_alive_s,
        )

    async def _models(self, request: Request) -> Response:
        return _json(encode(ModelList(data=[self._model_fields()])))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._front.model_name:
            raise NotFoundError(
                f"The model {name[:64]!r} does not exist here; "
                f"available: {self._front.model_name!r}.",
                code="model_not_found",
                param="model",
            )
        return _json(encode(self._model_fields()))

    async def _live(self, request: Request) -> Response:
        return _json(encode({"status": "alive"}))

    async def _ready(self, request: Request) -> Response:
        because = self._not_ready_because()
        status = {
            "status": "not_ready" if because else "ready",
            "reasons": [because] if because else [],
        }
        return _json(encode(status), status=503 if because else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._render_metrics(), media_type=CONTENT_TYPE)

    async def _version(self, request: Request) -> Response:
        return _json(encode({"version": __version__}))

    # -- parts --

    def _tenant(self, scope: Scope) -> str:
        """Whose the request is, by its key."""
        keys = self._settings.keys
        if keys is None or scope["path"] == LIVE_PATH:
            return DEFAULT_TENANT
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if not scheme:
            raise UnauthenticatedError(
                "An API key is needed: send it as `Authorization: Bearer KEY`.",
                code="missing_api_key",
            )
        given = key.strip().encode("latin-1") if scheme.lower() == "bearer" else None
        tenant = keys.tenant_of(given)
        if tenant is None:
            raise UnauthenticatedError("The API key is not valid here.")
        if scope["path"] == METRICS_PATH and not keys.is_operator(given):
            raise PermissionDeniedError(
                "Metrics are for whoever runs the cluster; a tenant's key does not open them.",
            )
        return tenant

    def _note_failure(self, exchange: HttpExchange, scope: Scope, error: MoonpoolError) -> None:
        exchange.error_code = error.code
        if not exchange.is_submitted and scope["path"] in (CHAT_PATH, COMPLETION_PATH):
            self._on_refused(error, scope["path"])

    def _model_fields(self) -> ModelFields:
        return model_fields(
            self._front.model_name,
            created=self._started_unix_s,
            max_model_len=self._front.max_model_len,
        )


def _check_size(scope: Scope) -> None:
    """Bounds that the connection cannot check."""
    raw = scope["headers"]
    num_bytes = sum(len(name) + len(value) + 4 for name, value in raw)
    if len(raw) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        raise InvalidRequestError(
            f"At most {MAX_HEADERS} headers with {MAX_HEAD_BYTES} bytes are accepted.",
            code="request_header_too_large",
        )


def _told(exchange: HttpExchange, message: Message) -> Message:
    """The message with what every response has; the exchange learns how far it is."""
    if message["type"] == "http.response.start":
        exchange.status = message["status"]
        own = [
            (b"x-request-id", exchange.request_id.encode()),
            (b"date", formatdate(usegmt=True).encode()),
        ]
        return {**message, "headers": [*message["headers"], *own]}
    exchange.is_complete = not message.get("more_body", False)
    return message


def _refusal(scope: Scope, refused: HTTPException) -> MoonpoolError:
    """What the routes refuse: an unknown path, or a method that it does not have."""
    what = f"{scope['method']} {scope['path']}"[:128]
    if refused.status_code == 405:
        return InvalidRequestError(f"{what} is not allowed.", code="method_not_supported")
    return NotFoundError(f"There is nothing at {what}.", code="unknown_url")


def _json(body: bytes, *, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
