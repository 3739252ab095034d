"""Answers in OpenAI's format: whole, as stream chunks, and the list of models. Bytes out.

format = chat_format(request_id=..., model=..., created=...)
format.whole(text, done, ...)                         one JSON document
format.chunk(text, ...) ... format.last(done, ...)    server-sent events, ending with [DONE]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from moonpool.errors import MoonpoolError
from moonpool.inference.generation import GenerationDone, Usage
from moonpool.wire.status import openai_error_body

#: Ends every stream, a failed one included.
STREAM_END = b"data: [DONE]\n\n"
#: A comment that keeps proxies and clients from giving up; clients skip it.
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class UsageExtension(msgspec.Struct, kw_only=True):
    """What OpenAI's usage has no word for."""

    #: Sums to prompt_tokens_details.cached_tokens: "device", the pool of the worker that prefilled;
    #: "peer", read from another worker.
    cached_tokens_by_source: Mapping[str, int]


class UsageFields(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    moonpool: UsageExtension


class TimingFields(msgspec.Struct, kw_only=True):
    ttft_ms: float
    #: They sum to ttft_ms.
    ttft_parts_ms: Mapping[str, float]


class PlacementFields(msgspec.Struct, kw_only=True):
    prefill_worker: str
    decode_worker: str
    attempts: int
    reason: str


class DetailFields(msgspec.Struct, kw_only=True):
    """Where and how fast it ran, for who asked with `"moonpool": {"details": true}`."""

    request_id: str
    timing: TimingFields
    placement: PlacementFields


class ChatMessageFields(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageFields
    logprobs: None = None
    finish_reason: str | None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None


class TextChoice(msgspec.Struct, kw_only=True):
    """Of a text completion, whole or in chunks."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None


Choice = ChatChoice | ChatChunkChoice | TextChoice


class Envelope(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageFields | UnsetType | None = UNSET
    moonpool: DetailFields | UnsetType = UNSET


class ModelFields(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "moonpool"
    #: vLLM's extension: the longest prompt + answer.
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelFields]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The words of one endpoint for one answer. Made by `chat_format` or `completion_format`."""

    id: str
    request_id: str
    model: str
    #: Unix time in whole seconds.
    created: int
    whole_object: str
    chunk_object: str
    #: (text, finish reason) -> the choice of a whole answer.
    whole_choice: Callable[[str, str], Choice]
    #: (text, is first, finish reason or None) -> the choice of a chunk.
    chunk_choice: Callable[[str, bool, str | None], Choice]

    def whole(self, text: str, done: GenerationDone, *, has_details: bool) -> bytes:
        """The complete answer as one JSON document."""
        return _encode(
            Envelope(
                id=self.id,
                object=self.whole_object,
                created=self.created,
                model=self.model,
                choices=[self.whole_choice(text, done.finish_reason.value)],
                usage=usage_fields(done.usage),
                moonpool=self._details(done) if has_details else UNSET,
            )
        )

    def chunk(self, text: str, *, is_first: bool, includes_usage: bool) -> bytes:
        """One server-sent event with more of the text."""
        return self._event(self.chunk_choice(text, is_first, None), includes_usage)

    def last(
        self, done: GenerationDone, *, is_first: bool, includes_usage: bool, has_details: bool
    ) -> bytes:
        """The finish reason, the usage if it was asked for, and the end of the stream."""
        events = self._event(
            self.chunk_choice("", is_first, done.finish_reason.value),
            includes_usage,
            details=self._details(done) if has_details else UNSET,
        )
        if includes_usage:
            events += _event(
                Envelope(
                    id=self.id,
                    object=self.chunk_object,
                    created=self.created,
                    model=self.model,
                    choices=[],
                    usage=usage_fields(done.usage),
                )
            )
        return events + STREAM_END

    def _event(
        self, choice: Choice, includes_usage: bool, *, details: DetailFields | UnsetType = UNSET
    ) -> bytes:
        return _event(
            Envelope(
                id=self.id,
                object=self.chunk_object,
                created=self.created,
                model=self.model,
                choices=[choice],
                usage=None if includes_usage else UNSET,
                moonpool=details,
            )
        )

    def _details(self, done: GenerationDone) -> DetailFields:
        return DetailFields(
            request_id=self.request_id,
            timing=TimingFields(
                ttft_ms=done.timing.ttft_ms, ttft_parts_ms=done.timing.ttft_parts_ms
            ),
            placement=PlacementFields(
                prefill_worker=done.placement.prefill_worker,
                decode_worker=done.placement.decode_worker,
                attempts=done.placement.num_attempts,
                reason=done.placement.reason,
            ),
        )


def chat_format(*, request_id: str, model: str, created: int) -> AnswerFormat:
    """`/v1/chat/completions`."""
    return AnswerFormat(
        id=f"chatcmpl-{request_id}",
        request_id=request_id,
        model=model,
        created=created,
        whole_object="chat.completion",
        chunk_object="chat.completion.chunk",
        whole_choice=lambda text, finish_reason: ChatChoice(
            index=0,
            message=ChatMessageFields(role="assistant", content=text),
            finish_reason=finish_reason,
        ),
        chunk_choice=_chat_chunk_choice,
    )


def completion_format(*, request_id: str, model: str, created: int) -> AnswerFormat:
    """`/v1/completions`."""
    return AnswerFormat(
        id=f"cmpl-{request_id}",
        request_id=request_id,
        model=model,
        created=created,
        whole_object="text_completion",
        chunk_object="text_completion",
        whole_choice=lambda text, finish_reason: TextChoice(
            index=0, text=text, finish_reason=finish_reason
        ),
        chunk_choice=lambda text, _is_first, finish_reason: TextChoice(
            index=0, text=text, finish_reason=finish_reason
        ),
    )


def error_events(error: MoonpoolError) -> bytes:
    """How a stream that has begun says that it failed: the error, then the end."""
    return _event(openai_error_body(error)) + STREAM_END


def error_body(error: MoonpoolError) -> bytes:
    return _encode(openai_error_body(error))


def model_fields(name: str, *, created: int, max_model_len: int) -> ModelFields:
    return ModelFields(id=name, created=created, max_model_len=max_model_len)


def usage_fields(usage: Usage) -> UsageFields:
    return UsageFields(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.num_cached_tokens),
        moonpool=UsageExtension(cached_tokens_by_source=usage.num_cached_tokens_by_source),
    )


def encode(value: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """JSON of anything this module makes."""
    return _encode(value)


def _chat_chunk_choice(text: str, is_first: bool, finish_reason: str | None) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=0,
        delta=ChatDelta(
            role="assistant" if is_first else UNSET,
            content=text if text or is_first else UNSET,
        ),
        finish_reason=finish_reason,
    )


def _event(value: msgspec.Struct | Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
