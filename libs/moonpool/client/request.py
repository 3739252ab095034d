"""From keyword arguments to a request: checks what a keyword can get wrong, leaves values to the router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from moonpool.api.v1 import inference_pb2 as pb
from moonpool.errors import InvalidRequestError
from moonpool.inference.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
)
from moonpool.wire.inference import generation_request_to_pb

#: `{"role": "user", "content": "..."}`, or the same as a value.
Message = Mapping[str, str] | ChatMessage


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`. What is not said, the model's defaults say."""

    #: One of these two, or the prompt's text as the first argument.
    messages: Sequence[Message]
    token_ids: Sequence[int]
    #: May be left out if one model is served.
    model: str
    #: 0 is greedy.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    #: Equal seeds draw equal tokens.
    seed: int | None
    #: Default: the rest of the context.
    max_tokens: int | None
    #: Up to four texts that end the answer; they are not part of it.
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    #: Requests share cached prefixes only with those of the same salt.
    cache_salt: str
    #: A label for the server's logs.
    client_request_id: str
    #: W3C trace context to join.
    traceparent: str


def make_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Message] | None = None,
    token_ids: Sequence[int] | None = None,
    model: str = "",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    cache_salt: str = "",
    client_request_id: str = "",
    traceparent: str = "",
) -> GenerationRequest:
    """A request of what was said (see GenerateOptions); its deadline is the call's.

    Raises:
        InvalidRequestError: Not exactly one prompt, or a message without role and content.
    """
    return GenerationRequest(
        prompt=_make_prompt(prompt, messages, token_ids),
        model=model,
        options=SamplingOptions(
            temperature=temperature,
            top_p=top_p,
            # vLLM's "off" has no place in an unsigned field; 0 means the same.
            top_k=0 if top_k == -1 else top_k,
            seed=seed,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        ),
        cache_salt=cache_salt,
        client_request_id=client_request_id,
        traceparent=traceparent,
    )


def request_to_message(request: GenerationRequest) -> pb.GenerateRequest:
    """The message to send.

    Raises:
        InvalidRequestError: A value is of the wrong type, or does not fit its field.
    """
    try:
        return generation_request_to_pb(request)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"The request cannot be sent: {error}.") from error


def _make_prompt(
    text: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None
) -> Prompt:
    given = [value for value in (text, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"Give exactly one of prompt, messages and token_ids, not {len(given)}.",
            code="missing_required_parameter" if not given else None,
            param="prompt",
        )
    if text is not None:
        return TextPrompt(text=text)
    if token_ids is not None:
        return TokenPrompt(token_ids=tuple(token_ids))
    assert messages is not None
    return ChatPrompt(
        messages=tuple(_make_message(message, index) for index, message in enumerate(messages))
    )


def _make_message(message: Message, index: int) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise InvalidRequestError(
                f"messages[{index}].{key} must be a string.", param=f"messages[{index}].{key}"
            )
    if extra := sorted(message.keys() - {"role", "content"}):
        raise InvalidRequestError(
            f"messages[{index}] may hold role and content, not {', '.join(extra)}.",
            param=f"messages[{index}].{extra[0]}",
        )
    return ChatMessage(role=message["role"], content=message["content"])
