"""The SDK: text, messages or token ids in; a stream of text and token ids out, over the gRPC door.

    from moonpool.client import Client

    with Client("127.0.0.1:8001") as client:
        for chunk in client.generate("Why is the sky blue?", max_tokens=64):
            print(chunk.text, end="", flush=True)

        result = client.complete(messages=[{"role": "user", "content": "And at dusk?"}])
        print(result.text, result.usage.num_cached_tokens, result.timing.ttft_ms)

`AsyncClient` is the same with `async for` and `await`. A generation that is not read to its end is
cancelled on the server: leave its `with` block, call `close()`, or drop it. Failures are MoonpoolErrors
with stable codes; errors.py also has them under the names of the `openai` package.
"""

import moonpool.rpc  # noqa: F401 - first: it quiets grpc before grpc is imported
from moonpool.client.async_client import AsyncClient, AsyncGeneration
from moonpool.client.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    CancelledByClientError,
    ConflictError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InternalServerError,
    InvalidRequestError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QueueDeadlineError,
    RateLimitError,
    TenantLimitError,
    UnauthenticatedError,
    UnavailableError,
    WorkerLostError,
)
from moonpool.client.request import GenerateOptions, Message
from moonpool.client.result import GenerationResult, Model
from moonpool.client.retry import RetryPolicy
from moonpool.client.sync_client import Client, Generation
from moonpool.inference.generation import (
    ChatMessage,
    GenerationChunk,
    PlacementSummary,
    Timing,
    Usage,
)
from moonpool.inference.output import FinishReason

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncGeneration",
    "AuthenticationError",
    "BadRequestError",
    "CancelledByClientError",
    "ChatMessage",
    "Client",
    "ConflictError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationChunk",
    "GenerationResult",
    "InternalError",
    "InternalServerError",
    "InvalidRequestError",
    "Message",
    "Model",
    "MoonpoolError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "PlacementSummary",
    "QueueDeadlineError",
    "RateLimitError",
    "RetryPolicy",
    "TenantLimitError",
    "Timing",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "WorkerLostError",
]
