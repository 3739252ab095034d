"""A whole answer, and the assembly of one from its stream. Pure: both clients stand on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.errors import CancelledByClientError, FailedPreconditionError, InternalError
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    PlacementSummary,
    Timing,
    Usage,
)
from moonpool.inference.output import FinishReason
from moonpool.wire.inference import generation_event_from_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that the server offers."""

    id: str
    #: Longest prompt and answer together, in tokens.
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A complete answer."""

    request_id: RequestId
    model: str
    text: str
    #: The one that ended the answer included, even where the text does not show it.
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    #: Time to the first token in the server, in parts that sum to it.
    timing: Timing
    #: Where it ran, and why there.
    placement: PlacementSummary


class AnswerAssembly:
    """What has arrived of one answer. Feed it every message of the stream, in order."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._request_id: RequestId | None = None
        self._result: GenerationResult | None = None

    @property
    def request_id(self) -> RequestId | None:
        """The router's name for the request; None before the first chunk."""
        return self._request_id

    @property
    def has_begun(self) -> bool:
        """Something has arrived: asking again would answer twice."""
        return self._request_id is not None

    @property
    def result(self) -> GenerationResult | None:
        """The answer, once it is complete."""
        return self._result

    def add(self, message: pb.GenerateReply) -> GenerationChunk | None:
        """The next piece; None if this message completes the answer.

        Raises:
            FailedPreconditionError: The server speaks another version of the protocol.
            InternalError: Tokens are missing or came twice.
        """
        try:
            event = generation_event_from_pb(message)
        except ValueError as error:
            raise FailedPreconditionError(
                f"The server's answer is of another protocol version: {error}."
            ) from error
        self._request_id = event.request_id
        if isinstance(event, GenerationDone):
            self._result = self._complete(event)
            return None
        if event.token_ids and event.first_position != len(self._token_ids):
            raise InternalError(
                f"The answer is out of order: position {event.first_position} came after "
                f"{len(self._token_ids)} tokens.",
                code="answer_out_of_order",
            )
        self._texts.append(event.text)
        self._token_ids += event.token_ids
        return event

    def cut_off(self) -> InternalError:
        """The error for a stream that ended well but too early."""
        return InternalError("The answer ended without its end.", code="answer_cut_off")

    def _complete(self, done: GenerationDone) -> GenerationResult:
        return GenerationResult(
            request_id=done.request_id,
            model=done.model,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=done.finish_reason,
            usage=done.usage,
            timing=replace(
                done.timing, ttft_parts_ms=MappingProxyType(dict(done.timing.ttft_parts_ms))
            ),
            placement=done.placement,
        )


def models_from_message(message: pb.ListModelsReply) -> tuple[Model, ...]:
    return tuple(Model(id=model.id, max_model_len=model.max_model_len) for model in message.models)


def closed_early() -> CancelledByClientError:
    """The error for reading on after a close."""
    return CancelledByClientError("The generation was closed before its end.")
