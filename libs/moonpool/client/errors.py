"""What the SDK raises: the project's own errors, and the same classes under the `openai` package's names.

Every one is a MoonpoolError with `message`, `code`, `param` and `retry_after_s`.
"""

from moonpool.errors import (
    CancelledByClientError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QueueDeadlineError,
    TenantLimitError,
    UnauthenticatedError,
    UnavailableError,
    WorkerLostError,
)

APIError = MoonpoolError
BadRequestError = InvalidRequestError
AuthenticationError = UnauthenticatedError
ConflictError = FailedPreconditionError
RateLimitError = OverloadedError
#: Nobody answers, or nobody can serve it now.
APIConnectionError = UnavailableError
APITimeoutError = DeadlineExceededError
InternalServerError = InternalError

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "CancelledByClientError",
    "ConflictError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InternalServerError",
    "InvalidRequestError",
    "MoonpoolError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "QueueDeadlineError",
    "RateLimitError",
    "TenantLimitError",
    "UnauthenticatedError",
    "UnavailableError",
    "WorkerLostError",
]
