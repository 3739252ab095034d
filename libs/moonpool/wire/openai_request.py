"""OpenAI's chat and text completion requests -> GenerationRequest. Shape here, ranges in the domain.

A wrong type is `invalid_type` where the prompt has the wrong shape, `invalid_value` for a parameter,
as OpenAI and vLLM have it; `param` is the path in the client's own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from moonpool.errors import InvalidRequestError, MoonpoolError
from moonpool.inference.generation import (
    MAX_CACHE_SALT_LENGTH,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
    chat_role,
    check_prompt_length,
)
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.wire.fields import MAX_NAME_LENGTH, MAX_TOKENS
from moonpool.wire.openai_fields import (
    Json,
    check_fields,
    note_unknown,
    shown_name,
    unsupported,
)

#: What a text completion without `max_tokens` gets, as OpenAI documents it.
DEFAULT_COMPLETION_TOKENS = 16

#: Of a message that an earlier answer had; clients send them back, mostly as null.
_MESSAGE_FIELDS = frozenset({"role", "content", "refusal", "annotations"})
_UNSUPPORTED_MESSAGE_FIELDS = frozenset(
    {"audio", "function_call", "name", "tool_calls", "tool_call_id"}
)

_Short = Annotated[str, Meta(max_length=512)]
_Salt = Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_LENGTH)]
#: Lengths are checked before the elements.
_Stops = Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)]
_StopTokens = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class MoonpoolOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Our own extension: `"moonpool": {"details": true}` asks where and how fast it ran."""

    details: bool = False


class CommonFields(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | _Stops | None = None
    stop_token_ids: _StopTokens | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: _Salt | None = None
    user: _Short | None = None
    metadata: _Metadata | None = None
    moonpool: MoonpoolOptions | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


_Parts = Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)]


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | _Parts | None = None


class ChatFields(CommonFields, kw_only=True):
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None


class CompletionFields(CommonFields, kw_only=True):
    #: A text, token ids, or a list that holds one of them: checked by hand.
    prompt: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpContext:
    """What an HTTP request says beside its body."""

    traceparent: str = ""
    request_label: str = ""
    deadline_s: float | None = None
    #: As the door says.
    tenant: str = DEFAULT_TENANT
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiRequest:
    """One request of either endpoint."""

    generation: GenerationRequest
    is_stream: bool = False
    includes_usage: bool = False
    #: Tell in the answer where and how fast it ran.
    wants_details: bool = False
    #: Fields that nobody knows.
    unknown: tuple[str, ...] = ()
    #: The client's words for what the domain calls `prompt` and `max_tokens`.
    names: Mapping[str, str] = field(default_factory=dict)

    def in_clients_words(self, error: MoonpoolError) -> MoonpoolError:
        """The error with its field named as the client named it."""
        if error.param is not None:
            error.param = self.names.get(error.param, error.param)
        return error


def chat_request(body: Mapping[str, Json], context: HttpContext) -> OpenAiRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        InvalidRequestError: With the field's path and what is allowed.
    """
    unknown = list(
        check_fields(body, implemented=_names_of(ChatFields), is_strict=context.is_strict)
    )
    fields = _converted(body, ChatFields)
    if not fields.messages:
        raise InvalidRequestError(
            "messages must hold at least one message.", code="empty_array", param="messages"
        )
    messages = []
    for index, message in enumerate(fields.messages):
        _check_message_fields(body["messages"][index], f"messages[{index}]", context, unknown)
        messages.append(_chat_message(message, f"messages[{index}]"))
    max_tokens, max_tokens_name = _max_tokens(fields)
    return _request(
        fields,
        ChatPrompt(messages=tuple(messages)),
        max_tokens,
        context,
        unknown=tuple(unknown),
        names={"prompt": "messages", "max_tokens": max_tokens_name},
    )


def completion_request(body: Mapping[str, Json], context: HttpContext) -> OpenAiRequest:
    """Read the body of `/v1/completions`: one prompt, as text or token ids.

    Raises:
        InvalidRequestError: With the field's path and what is allowed.
    """
    unknown = check_fields(
        body, implemented=_names_of(CompletionFields), is_strict=context.is_strict
    )
    fields = _converted(body, CompletionFields)
    max_tokens = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    return _request(fields, _prompt(fields.prompt), max_tokens, context, unknown=unknown, names={})


def _request(
    fields: CommonFields,
    prompt: Prompt,
    max_tokens: int | None,
    context: HttpContext,
    *,
    unknown: tuple[str, ...],
    names: Mapping[str, str],
) -> OpenAiRequest:
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    is_stream = bool(fields.stream)
    return OpenAiRequest(
        generation=GenerationRequest(
            prompt=prompt,
            model=fields.model or "",
            options=SamplingOptions(
                temperature=fields.temperature,
                top_p=fields.top_p,
                top_k=fields.top_k,
                seed=fields.seed,
                max_tokens=max_tokens,
                stop=stop,
                stop_token_ids=tuple(fields.stop_token_ids or ()),
                ignore_eos=bool(fields.ignore_eos),
            ),
            tenant=context.tenant,
            cache_salt=fields.cache_salt or "",
            client_request_id=context.request_label,
            deadline_s=context.deadline_s,
            traceparent=context.traceparent,
        ),
        is_stream=is_stream,
        includes_usage=_includes_usage(fields.stream_options, is_stream),
        wants_details=fields.moonpool is not None and fields.moonpool.details,
        unknown=unknown,
        names=names,
    )


def _includes_usage(options: StreamOptions | None, is_stream: bool) -> bool:
    if options is None:
        return False
    if not is_stream:
        raise InvalidRequestError(
            "stream_options can only be defined when stream is true.", param="stream_options"
        )
    if options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats")
    return bool(options.include_usage)


def _max_tokens(fields: ChatFields) -> tuple[int | None, str]:
    """The limit, and which of its two names the client used."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_tokens = {old} and max_completion_tokens = {new} contradict each other: "
            "set only one.",
            code="conflicting_parameters",
            param="max_tokens",
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


# -- prompts --


def _chat_message(message: Message, path: str) -> ChatMessage:
    role = chat_role(message.role, param=f"{path}.role")
    if message.content is None:
        raise InvalidRequestError(
            f"{path}.content must be a text or a list of text parts.",
            code="invalid_type",
            param=f"{path}.content",
        )
    if isinstance(message.content, str):
        return ChatMessage(role=role, content=message.content)
    texts = []
    for index, part in enumerate(message.content):
        where = f"{path}.content[{index}]"
        if part.type not in ("text", "input_text"):
            raise InvalidRequestError(
                f"{where}.type is {part.type[:64]!r}: this model takes only text.",
                code="unsupported_content",
                param=where,
            )
        if part.text is None:
            raise InvalidRequestError(
                f"{where}.text is missing.",
                code="missing_required_parameter",
                param=f"{where}.text",
            )
        texts.append(part.text)
    # As vLLM joins them for templates that take one string.
    return ChatMessage(role=role, content="\n".join(texts))


def _check_message_fields(
    message: Mapping[str, Json], path: str, context: HttpContext, unknown: list[str]
) -> None:
    """Refuse what is not implemented; adds what nobody knows to `unknown`."""
    for name, value in message.items():
        if name in _MESSAGE_FIELDS or value is None or value == []:
            continue
        where = f"{path}.{shown_name(name)}"
        if name in _UNSUPPORTED_MESSAGE_FIELDS:
            raise unsupported(where)
        if context.is_strict:
            raise InvalidRequestError(
                f"{where} is not a field of a message.", code="unknown_parameter", param=where
            )
        note_unknown(unknown, where)


def _prompt(value: Json) -> Prompt:
    """One text, the tokens of one prompt, or a list that holds one of these."""
    if isinstance(value, str):
        return TextPrompt(text=value)
    if not isinstance(value, list):
        raise _wrong_prompt()
    if not value:
        raise InvalidRequestError("prompt is empty.", code="empty_prompt", param="prompt")
    check_prompt_length(len(value), max_model_len=MAX_TOKENS)
    kinds = {_kind(item) for item in value}
    if kinds == {"number"}:
        return TokenPrompt(token_ids=_token_ids(value))
    if len(kinds) > 1 or not kinds <= {"text", "list"}:
        raise _wrong_prompt()
    if len(value) > 1:
        raise InvalidRequestError(
            f"prompt holds {len(value)} prompts: send one request for each.",
            code="too_many_prompts",
            param="prompt",
        )
    return _prompt(value[0]) if isinstance(value[0], str) else _tokens_only(value[0])


def _tokens_only(value: list[Json]) -> TokenPrompt:
    if not value:
        raise InvalidRequestError("prompt is empty.", code="empty_prompt", param="prompt")
    check_prompt_length(len(value), max_model_len=MAX_TOKENS)
    if {_kind(item) for item in value} != {"number"}:
        raise _wrong_prompt()
    return TokenPrompt(token_ids=_token_ids(value))


def _kind(item: Json) -> str:
    if isinstance(item, str):
        return "text"
    return "list" if isinstance(item, list) else "number"


def _token_ids(values: list[Json]) -> tuple[int, ...]:
    for index, value in enumerate(values):
        # bool is an int in Python, not in JSON.
        if type(value) is not int:
            raise InvalidRequestError(
                f"prompt[{index}] is not a token id.",
                code="invalid_token_id",
                param=f"prompt[{index}]",
            )
    return tuple(values)


def _wrong_prompt() -> InvalidRequestError:
    return InvalidRequestError(
        "prompt must be a text or a list of token ids.", code="invalid_type", param="prompt"
    )


# -- msgspec's errors in OpenAI's words --

FieldsT = TypeVar("FieldsT", bound=CommonFields)

_ERROR = re.compile(
    r"(?P<problem>.*?)(?: - at (?:`(?:key|value)` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL
)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")


def _converted(body: Mapping[str, Json], fields_type: type[FieldsT]) -> FieldsT:
    try:
        return msgspec.convert(body, fields_type)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None


def _explained(message: str) -> InvalidRequestError:
    match = _ERROR.fullmatch(message)
    assert match is not None, message
    problem, path = match["problem"], (match["path"] or "").replace("[...]", "")
    if missing := _MISSING.match(problem):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(
            f"{param} is missing.", code="missing_required_parameter", param=param
        )
    if unknown := _UNKNOWN.match(problem):
        param = f"{path}.{shown_name(unknown['name'])}"
        return InvalidRequestError(
            f"{param} is not a parameter.", code="unknown_parameter", param=param
        )
    is_prompt = path.startswith(("messages", "prompt"))
    code = "invalid_type" if is_prompt else "invalid_value"
    if "`str` of length <=" in problem:
        code = "string_too_long"
    words = problem[:1].lower() + problem[1:].replace("`", "")
    return InvalidRequestError(f"{path}: {words}.", code=code, param=path or None)


def _names_of(fields_type: type[CommonFields]) -> frozenset[str]:
    return frozenset(fields_type.__struct_fields__)
