"""Errors keep class, code, param and retry time over gRPC, and have OpenAI's shape over HTTP."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, status_pb2

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
from moonpool.wire.status import from_rpc_status, hidden, to_http, to_rpc_status

_TABLE: list[tuple[type[MoonpoolError], int, int, str]] = [
    (InvalidRequestError, code_pb2.INVALID_ARGUMENT, 400, "invalid_request_error"),
    (InvalidMessageError, code_pb2.INVALID_ARGUMENT, 400, "invalid_request_error"),
    (UnauthenticatedError, code_pb2.UNAUTHENTICATED, 401, "invalid_request_error"),
    (PermissionDeniedError, code_pb2.PERMISSION_DENIED, 403, "permission_error"),
    (NotFoundError, code_pb2.NOT_FOUND, 404, "invalid_request_error"),
    (QueueDeadlineError, code_pb2.DEADLINE_EXCEEDED, 408, "timeout_error"),
    (DeadlineExceededError, code_pb2.DEADLINE_EXCEEDED, 504, "timeout_error"),
    (FailedPreconditionError, code_pb2.FAILED_PRECONDITION, 409, "invalid_request_error"),
    (CancelledByClientError, code_pb2.CANCELLED, 499, "invalid_request_error"),
    (OverloadedError, code_pb2.RESOURCE_EXHAUSTED, 503, "service_unavailable_error"),
    (TenantLimitError, code_pb2.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    (UnavailableError, code_pb2.UNAVAILABLE, 503, "service_unavailable_error"),
    (WorkerLostError, code_pb2.UNAVAILABLE, 503, "server_error"),
    (TransferError, code_pb2.DATA_LOSS, 500, "server_error"),
    (ModelError, code_pb2.FAILED_PRECONDITION, 500, "server_error"),
    (ConfigError, code_pb2.FAILED_PRECONDITION, 500, "server_error"),
    (InternalError, code_pb2.INTERNAL, 500, "server_error"),
]


@pytest.mark.parametrize(("error_type", "grpc_code", "http_status", "openai_type"), _TABLE)
def test_each_error_has_its_statuses(
    error_type: type[MoonpoolError], grpc_code: int, http_status: int, openai_type: str
) -> None:
    error = error_type("what and how to fix it", param="messages[0].role")
    assert to_rpc_status(error).code == grpc_code
    answer = to_http(error)
    assert answer.status == http_status
    assert answer.body == {
        "error": {
            "message": "what and how to fix it",
            "type": openai_type,
            "param": "messages[0].role",
            "code": error.code,
        }
    }


@pytest.mark.parametrize("error_type", [row[0] for row in _TABLE])
@pytest.mark.parametrize(("param", "retry_after_s"), [(None, None), ("model", 2.5)])
def test_an_error_survives_grpc(
    error_type: type[MoonpoolError], param: str | None, retry_after_s: float | None
) -> None:
    error = error_type("text", code="some_code", param=param, retry_after_s=retry_after_s)
    wire = status_pb2.Status.FromString(to_rpc_status(error).SerializeToString())
    back = from_rpc_status(wire)
    assert type(back) is error_type
    assert (back.message, back.code, back.param, back.retry_after_s) == (
        "text", "some_code", param, retry_after_s,
    )  # fmt: skip


def test_every_error_class_has_a_row() -> None:
    def below(error_type: type[MoonpoolError]) -> set[type[MoonpoolError]]:
        return {error_type}.union(*(below(child) for child in error_type.__subclasses__()))

    own = {
        error_type
        for error_type in below(MoonpoolError)
        if error_type.__module__ == "moonpool.errors" and error_type is not MoonpoolError
    }
    assert own <= {row[0] for row in _TABLE}


def test_a_bare_status_of_the_transport_is_understood() -> None:
    back = from_rpc_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone"))
    assert type(back) is UnavailableError
    assert back.is_retryable
    assert type(from_rpc_status(status_pb2.Status(code=99))) is InternalError


def test_a_message_that_is_too_large_is_not_sent_again() -> None:
    for status, error_type, code in (
        ("w: Received message larger than max (4196 vs. 1024)", InvalidRequestError, "request_too_large"),
        ("w: CLIENT: Sent message larger than max (9 vs. 8)", InvalidRequestError, "request_too_large"),
        ("w: Concurrent RPC limit exceeded!", OverloadedError, "resource_exhausted"),
    ):  # fmt: skip
        back = from_rpc_status(status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=status))
        assert (type(back), back.code) == (error_type, code)


def test_retries_are_announced_only_where_they_help() -> None:
    busy = to_http(OverloadedError("full", retry_after_s=0.2))
    assert busy.headers == {"retry-after": "1", "retry-after-ms": "200"}
    # A kind that stands, for once with a time to come back.
    late = QueueDeadlineError("no room in time", retry_after_s=2.0)
    assert to_http(late).headers == {"retry-after": "2", "retry-after-ms": "2000"}
    assert from_rpc_status(to_rpc_status(late)).is_retryable
    assert to_http(QueueDeadlineError("late")).headers == {"x-should-retry": "false"}
    assert to_http(ModelError("damaged")).headers == {"x-should-retry": "false"}
    assert to_http(InvalidRequestError("no")).headers == {}
    assert to_http(UnauthenticatedError("no")).headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("request_too_large", 413),
        ("unsupported_media_type", 415),
        ("method_not_supported", 405),
        ("context_length_exceeded", 400),
    ],
)
def test_the_doors_own_refusals_have_their_status(code: str, status: int) -> None:
    assert to_http(InvalidRequestError("no", code=code)).status == status


def test_what_is_hidden_names_only_the_request() -> None:
    assert hidden("r-1").message.endswith("(request r-1)")
