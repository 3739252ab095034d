"""The error tree: what Moonpool raises at its boundaries, each kind with a stable code.

A bug in our own code raises an ordinary Python exception (AssertionError, RuntimeError). What a
client, a peer, a file or the cluster did wrong is a MoonpoolError: it has a `code` that clients may
rely on, a message that names the field and the fix, and whether the same request may succeed later.
The mapping to HTTP and gRPC status stands in wire/status.py, once.
"""

from __future__ import annotations

from typing import ClassVar


class MoonpoolError(Exception):
    """Base of all expected failures.

    Args:
        message: One sentence for the client: names the field and the fix, never a stack or a path
            of the server.
        code: Stable, lower_snake_case; defaults to the class's.
        param: The request field concerned, in JSON path form (`messages[0].role`), or None.
        retry_after_s: For errors that pass: when the client may come back, if known.
    """

    default_code: ClassVar[str] = "internal_error"
    #: Errors of this kind pass by themselves.
    may_pass: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def is_retryable(self) -> bool:
        """True if the same request may succeed later without being changed.

        So it is where the kind of error passes, and where whoever raised it says when to come back.
        """
        return self.may_pass or self.retry_after_s is not None


class InvalidRequestError(MoonpoolError):
    """The request can never succeed as it is (HTTP 400, gRPC INVALID_ARGUMENT)."""

    default_code = "invalid_value"


class NotFoundError(MoonpoolError):
    """No such model, route or request (404, NOT_FOUND)."""

    default_code = "not_found"


class UnavailableError(MoonpoolError):
    """Nobody can serve it now (503, UNAVAILABLE)."""

    default_code = "service_unavailable"
    may_pass = True


class OverloadedError(MoonpoolError):
    """The queue is full (503, RESOURCE_EXHAUSTED)."""

    default_code = "server_overloaded"
    may_pass = True


class TenantLimitError(OverloadedError):
    """Its tenant has as many requests here as one may (429, RESOURCE_EXHAUSTED)."""

    default_code = "rate_limit_exceeded"


class DeadlineExceededError(MoonpoolError):
    """The request's deadline passed while it ran (504, DEADLINE_EXCEEDED)."""

    default_code = "deadline_exceeded"


class QueueDeadlineError(DeadlineExceededError):
    """The deadline passed while the request waited: nothing was computed (408)."""


class UnauthenticatedError(MoonpoolError):
    """No key, or not this cluster's (401, UNAUTHENTICATED)."""

    default_code = "invalid_api_key"


class PermissionDeniedError(MoonpoolError):
    """The key is good, and does not open this (403, PERMISSION_DENIED)."""

    default_code = "permission_denied"


class CancelledByClientError(MoonpoolError):
    """The client went away (499, CANCELLED)."""

    default_code = "cancelled"


class FailedPreconditionError(MoonpoolError):
    """Two parts of the cluster do not fit together: namespace, layout, secret, protocol version.

    (409 where a client can see it; gRPC FAILED_PRECONDITION.)
    """

    default_code = "incompatible"


class WorkerLostError(MoonpoolError):
    """Every allowed attempt at a request failed (503, UNAVAILABLE)."""

    default_code = "worker_lost"
    may_pass = True


class InternalError(MoonpoolError):
    """Our fault: a model that gives NaN, a broken invariant behind a boundary (500, INTERNAL)."""


class ConfigError(MoonpoolError):
    """A configuration value is wrong; stops the start. Message has key, value and what is allowed."""

    default_code = "invalid_config"


class ModelError(MoonpoolError):
    """A model's files are missing, damaged or of an architecture the engine does not know."""

    default_code = "invalid_model"


class TransferError(MoonpoolError):
    """A KV read did not complete: peer gone, bounds, or digest. Costs a recompute, never a request."""

    default_code = "kv_transfer_failed"
