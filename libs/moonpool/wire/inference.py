"""The public gRPC door's messages <-> domain values. Checks shape here, ranges in the domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.errors import InvalidRequestError
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    MAX_CLIENT_REQUEST_ID_LENGTH,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    ChatPrompt,
    GenerationChunk,
    GenerationDone,
    GenerationEvent,
    GenerationRequest,
    PlacementSummary,
    Prompt,
    SamplingOptions,
    TextPrompt,
    Timing,
    TokenPrompt,
    Usage,
    chat_role,
    check_prompt_length,
)
from moonpool.inference.output import FinishReason
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.wire.fields import MAX_TOKENS

T = TypeVar("T")


def generation_request_from_pb(
    message: pb.GenerateRequest,
    *,
    deadline_s: float | None,
    traceparent: str = "",
    request_label: str = "",
    tenant: str = DEFAULT_TENANT,
    max_model_len: int = MAX_TOKENS,
) -> GenerationRequest:
    """Read a client's request.

    Args:
        deadline_s: The call's remaining time, if the client set one.
        request_label: The call's, for a message that has none of its own.
        tenant: Whose it is, as the door says.
        max_model_len: A prompt that is as long is refused before it is walked through.

    Raises:
        InvalidRequestError: No prompt is set, a list is too long, or a message's role is not one of CHAT_ROLES.
    """
    options = message.sampling
    label = message.client_request_id or request_label
    return GenerationRequest(
        prompt=_prompt_from_pb(message, max_model_len),
        model=message.model,
        options=SamplingOptions(
            temperature=options.temperature if options.HasField("temperature") else None,
            top_p=options.top_p if options.HasField("top_p") else None,
            top_k=options.top_k if options.HasField("top_k") else None,
            seed=options.seed if options.HasField("seed") else None,
            max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
            stop=_bounded(options.stop, "stop", MAX_STOP_STRINGS),
            stop_token_ids=_bounded(options.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS),
            ignore_eos=options.ignore_eos,
        ),
        tenant=tenant,
        cache_salt=message.cache_salt,
        client_request_id=label[:MAX_CLIENT_REQUEST_ID_LENGTH],
        deadline_s=deadline_s,
        traceparent=traceparent,
    )


def generation_request_to_pb(request: GenerationRequest) -> pb.GenerateRequest:
    """Write a request; what was not said stays absent. The deadline travels as the call's own."""
    options = request.options
    message = pb.GenerateRequest(
        model=request.model,
        sampling=pb.SamplingOptions(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            max_tokens=options.max_tokens,
            stop=options.stop,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos or None,
        ),
        cache_salt=request.cache_salt,
        client_request_id=request.client_request_id,
    )
    match request.prompt:
        case TextPrompt(text=text):
            message.text = text
        case ChatPrompt(messages=messages):
            message.chat.SetInParent()
            for part in messages:
                message.chat.messages.add(role=part.role, content=part.content)
        case TokenPrompt(token_ids=token_ids):
            message.tokens.SetInParent()
            message.tokens.token_ids.extend(token_ids)
    return message


def generation_event_to_pb(event: GenerationEvent) -> pb.GenerateReply:
    match event:
        case GenerationChunk():
            return pb.GenerateReply(
                chunk=pb.GenerateChunk(
                    request_id=event.request_id,
                    text=event.text,
                    token_ids=event.token_ids,
                    first_position=event.first_position,
                )
            )
        case GenerationDone():
            return pb.GenerateReply(
                done=pb.GenerateDone(
                    request_id=event.request_id,
                    finish_reason=event.finish_reason.value,
                    usage=pb.Usage(
                        prompt_tokens=event.usage.num_prompt_tokens,
                        completion_tokens=event.usage.num_completion_tokens,
                        cached_tokens=event.usage.num_cached_tokens,
                        cached_tokens_by_source=event.usage.num_cached_tokens_by_source,
                    ),
                    timing=pb.Timing(
                        ttft_ms=event.timing.ttft_ms, ttft_parts_ms=event.timing.ttft_parts_ms
                    ),
                    placement=pb.Placement(
                        prefill_worker=event.placement.prefill_worker,
                        decode_worker=event.placement.decode_worker,
                        attempts=event.placement.num_attempts,
                        reason=event.placement.reason,
                    ),
                    model=event.model,
                )
            )


def generation_event_from_pb(message: pb.GenerateReply) -> GenerationEvent:
    """Read one message of an answer.

    Raises:
        ValueError: The message has no kind or an unknown finish reason: another protocol version.
    """
    kind = message.WhichOneof("kind")
    if kind == "chunk":
        chunk = message.chunk
        return GenerationChunk(
            request_id=RequestId(chunk.request_id),
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            first_position=chunk.first_position,
        )
    if kind == "done":
        done = message.done
        return GenerationDone(
            request_id=RequestId(done.request_id),
            model=done.model,
            finish_reason=FinishReason(done.finish_reason),
            usage=_usage_from_pb(done.usage),
            timing=Timing(
                ttft_ms=done.timing.ttft_ms, ttft_parts_ms=dict(done.timing.ttft_parts_ms)
            ),
            placement=PlacementSummary(
                prefill_worker=done.placement.prefill_worker,
                decode_worker=done.placement.decode_worker,
                num_attempts=done.placement.attempts,
                reason=done.placement.reason,
            ),
        )
    raise ValueError("a GenerateReply without a kind")


def _usage_from_pb(message: pb.Usage) -> Usage:
    num_cached_tokens, by_source = message.cached_tokens, message.cached_tokens_by_source
    num_peer_tokens = min(by_source.get("peer", 0), num_cached_tokens)
    return Usage(
        num_prompt_tokens=message.prompt_tokens,
        num_completion_tokens=message.completion_tokens,
        num_cached_tokens=num_cached_tokens,
        num_peer_tokens=num_peer_tokens,
        num_store_tokens=min(by_source.get("store", 0), num_cached_tokens - num_peer_tokens),
    )


def _prompt_from_pb(message: pb.GenerateRequest, max_model_len: int) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(text=message.text)
    if kind == "chat":
        messages = _bounded(message.chat.messages, "messages", MAX_MESSAGES)
        return ChatPrompt(
            messages=tuple(
                ChatMessage(
                    role=chat_role(part.role, param=f"messages[{index}].role"), content=part.content
                )
                for index, part in enumerate(messages)
            )
        )
    if kind == "tokens":
        token_ids = message.tokens.token_ids
        check_prompt_length(len(token_ids), max_model_len=max_model_len)
        return TokenPrompt(token_ids=tuple(token_ids))
    raise InvalidRequestError(
        "Set one of text, chat or tokens.", code="missing_required_parameter", param="prompt"
    )


def _bounded(values: Sequence[T], field: str, max_length: int) -> tuple[T, ...]:
    """A list, whose length is checked before anybody walks through it."""
    if len(values) > max_length:
        raise InvalidRequestError(
            f"{field} takes at most {max_length} values, got {len(values)}.", param=field
        )
    return tuple(values)
