"""Errors on the wire: MoonpoolError <-> google.rpc.Status, and -> HTTP status with OpenAI's body.

This is the only place that knows which error is which status. A gRPC status carries ErrorInfo (the
stable code as its reason, in upper case, and the error's kind), BadRequest when a field is to blame,
and RetryInfo when it passes; a peer's error is rebuilt from them with the same class and code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2

from moonpool.errors import (
    CancelledByClientError,
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    ModelError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QueueDeadlineError,
    TenantLimitError,
    TransferError,
    UnauthenticatedError,
    UnavailableError,
    WorkerLostError,
)
from moonpool.wire.fields import InvalidMessageError

DOMAIN = "moonpool"

#: What a client sees of a bug: constant, so that nothing of the server leaks.
INTERNAL_MESSAGE = (
    "The server failed to handle this request. The request id identifies it in the logs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    kind: str
    error: type[MoonpoolError]
    grpc_code: int
    http_status: int
    openai_type: str


def _row(
    kind: str, error: type[MoonpoolError], grpc_code: int, http_status: int, openai_type: str
) -> _Row:
    return _Row(
        kind=kind,
        error=error,
        grpc_code=grpc_code,
        http_status=http_status,
        openai_type=openai_type,
    )


#: A class is looked up along its bases, so a subclass without a row is what its parent is.
_ROWS = (
    _row("invalid_message", InvalidMessageError, code_pb2.INVALID_ARGUMENT, 400, "invalid_request_error"),
    _row("invalid_request", InvalidRequestError, code_pb2.INVALID_ARGUMENT, 400, "invalid_request_error"),
    _row("unauthenticated", UnauthenticatedError, code_pb2.UNAUTHENTICATED, 401, "invalid_request_error"),
    _row("permission_denied", PermissionDeniedError, code_pb2.PERMISSION_DENIED, 403, "permission_error"),
    _row("not_found", NotFoundError, code_pb2.NOT_FOUND, 404, "invalid_request_error"),
    _row("queue_deadline", QueueDeadlineError, code_pb2.DEADLINE_EXCEEDED, 408, "timeout_error"),
    _row("deadline", DeadlineExceededError, code_pb2.DEADLINE_EXCEEDED, 504, "timeout_error"),
    _row("precondition", FailedPreconditionError, code_pb2.FAILED_PRECONDITION, 409, "invalid_request_error"),
    _row("cancelled", CancelledByClientError, code_pb2.CANCELLED, 499, "invalid_request_error"),
    _row("overloaded", OverloadedError, code_pb2.RESOURCE_EXHAUSTED, 503, "service_unavailable_error"),
    _row("tenant_limit", TenantLimitError, code_pb2.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    _row("unavailable", UnavailableError, code_pb2.UNAVAILABLE, 503, "service_unavailable_error"),
    _row("worker_lost", WorkerLostError, code_pb2.UNAVAILABLE, 503, "server_error"),
    _row("transfer", TransferError, code_pb2.DATA_LOSS, 500, "server_error"),
    _row("model", ModelError, code_pb2.FAILED_PRECONDITION, 500, "server_error"),
    _row("config", ConfigError, code_pb2.FAILED_PRECONDITION, 500, "server_error"),
    _row("internal", InternalError, code_pb2.INTERNAL, 500, "server_error"),
)  # fmt: skip
_ROW_BY_ERROR = {row.error: row for row in _ROWS}
_ROW_BY_KIND = {row.kind: row for row in _ROWS}

#: Codes whose HTTP status differs from their class's: the door's own refusals.
_HTTP_STATUS_BY_CODE = {
    "method_not_supported": 405,
    "request_timeout": 408,
    "request_header_too_large": 431,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "unsupported_content_encoding": 415,
}

#: gRPC's own words for a message beyond a bound, whichever end noticed: RESOURCE_EXHAUSTED, but no matter of time.
_TOO_LARGE = "message larger than max"

#: When to come back after an error that passes and does not say when.
_DEFAULT_RETRY_AFTER_S = 1.0

#: What a bare gRPC code means when the peer attached no ErrorInfo (the transport made the status).
_ERROR_BY_GRPC_CODE: dict[int, tuple[type[MoonpoolError], str]] = {
    code_pb2.CANCELLED: (CancelledByClientError, "cancelled"),
    code_pb2.INVALID_ARGUMENT: (InvalidRequestError, "invalid_value"),
    code_pb2.DEADLINE_EXCEEDED: (DeadlineExceededError, "deadline_exceeded"),
    code_pb2.NOT_FOUND: (NotFoundError, "not_found"),
    code_pb2.UNAUTHENTICATED: (UnauthenticatedError, "invalid_api_key"),
    code_pb2.PERMISSION_DENIED: (PermissionDeniedError, "permission_denied"),
    code_pb2.RESOURCE_EXHAUSTED: (OverloadedError, "resource_exhausted"),
    code_pb2.FAILED_PRECONDITION: (FailedPreconditionError, "incompatible"),
    code_pb2.ABORTED: (FailedPreconditionError, "aborted"),
    code_pb2.OUT_OF_RANGE: (InvalidRequestError, "out_of_range"),
    code_pb2.UNIMPLEMENTED: (FailedPreconditionError, "unimplemented"),
    code_pb2.UNAVAILABLE: (UnavailableError, "service_unavailable"),
    code_pb2.DATA_LOSS: (TransferError, "kv_transfer_failed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An answer to an HTTP client: status, headers to add, and OpenAI's error body."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def to_rpc_status(error: MoonpoolError) -> status_pb2.Status:
    """The google.rpc.Status to attach; its `code` is the gRPC status code."""
    row = _row_of(error)
    info = error_details_pb2.ErrorInfo(
        reason=error.code.upper(), domain=DOMAIN, metadata={"kind": row.kind}
    )
    details: list[AnyMessage] = [_packed(info)]
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=error.message
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(retry))
    return status_pb2.Status(code=row.grpc_code, message=error.message, details=details)


def from_rpc_status(status: status_pb2.Status) -> MoonpoolError:
    """The peer's error with its class, code, param and retry time, as far as it said them."""
    error_type, code = _ERROR_BY_GRPC_CODE.get(status.code, (InternalError, "internal_error"))
    if status.code == code_pb2.RESOURCE_EXHAUSTED and _TOO_LARGE in status.message:
        error_type, code = InvalidRequestError, "request_too_large"
    param: str | None = None
    retry_after_s: float | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            row = _ROW_BY_KIND.get(info.metadata.get("kind", ""))
            if info.domain == DOMAIN and row is not None:
                error_type, code = row.error, info.reason.lower()
        elif detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
            if bad_request.field_violations:
                param = bad_request.field_violations[0].field
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return error_type(status.message, code=code, param=param, retry_after_s=retry_after_s)


def to_http(error: MoonpoolError) -> HttpError:
    """Status, headers and `{"error": {message, type, param, code}}` for an OpenAI client.

    The official client retries 408, 409, 429 and every 5xx by itself; `x-should-retry: false` tells
    it not to when the same request cannot succeed.
    """
    row = _row_of(error)
    status = _HTTP_STATUS_BY_CODE.get(error.code, row.http_status)
    headers: dict[str, str] = {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.is_retryable:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(retry_after_s * 1_000))
    if not error.is_retryable and (status >= 500 or status in (408, 409)):
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status=status, body=openai_error_body(error), headers=headers)


def openai_error_body(error: MoonpoolError) -> dict[str, Any]:
    """The body alone: also what a stream sends as its last `data:` when it fails midway."""
    return {
        "error": {
            "message": error.message,
            "type": _row_of(error).openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def hidden(request_id: str | None = None) -> InternalError:
    """What a client is told of an unexpected exception; the log has the rest."""
    suffix = f" (request {request_id})" if request_id else ""
    return InternalError(INTERNAL_MESSAGE + suffix)


def _row_of(error: MoonpoolError) -> _Row:
    for error_type in type(error).__mro__:
        row = _ROW_BY_ERROR.get(error_type)
        if row is not None:
            return row
    return _ROW_BY_KIND["internal"]


def _packed(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
