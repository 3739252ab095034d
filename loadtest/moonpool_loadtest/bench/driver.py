"""Driver: one request to one kind of server. The runner takes the time, the same way for all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from moonpool_loadtest.bench.records import ServerTold
from moonpool_loadtest.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What all requests of a run have in common."""

    #: Empty: the one that is served.
    model: str = ""
    #: Send prompts of text as one user message instead of text to continue.
    is_chat: bool = False
    temperature: float = 0.0
    #: Answers have exactly the length that was asked for.
    ignore_eos: bool = True
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """A message with `num_tokens` tokens; 1 if the protocol does not say how many."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnded:
    """The answer is complete."""

    told: ServerTold


DriverEvent = TokensArrived | AnswerEnded


class Driver(Protocol):
    """Enter it before use, in the loop that uses it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def list_models(self) -> tuple[str, ...]:
        """What the server offers. Raises MoonpoolError if it does not answer."""
        ...

    def stream(self, request: BenchRequest) -> AsyncGenerator[DriverEvent, None]:
        """Send it now; events as they arrive, AnswerEnded last. Closing it cancels.

        Raises:
            MoonpoolError: OverloadedError or UnavailableError for a refusal, DeadlineExceededError
                for a deadline, anything else for a failure.
        """
        ...
