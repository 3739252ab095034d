"""Which fields of an OpenAI request mean what here: implemented, neutral, ignored, refused, unknown.

A field whose meaning is not implemented is refused by name unless its value is the one that changes
nothing; null always means that nothing was said. What nobody has heard of is ignored with a warning,
or refused under `--strict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.errors import InvalidRequestError

#: Parsed JSON; every access is checked.
Json = Any

#: Deeper than any request we know; also keeps our own walk from costing more than the parse.
MAX_JSON_DEPTH = 64

#: A warning names at most so many unknown fields; of more than these nobody keeps a list.
MAX_WARNED = 16
_MAX_NAME = 64

#: They would let a client reach into the cluster or its memory.
_FORBIDDEN = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "kv_transfer_params",
        "prompt_embeds",
    }
)

#: Values that leave the answer as it is. What is not here may only be null.
_NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

#: They say something about the client, its bill or its speed, nothing about the answer.
_IGNORED = frozenset(
    {
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
    }
)


def parse_object(body: bytes) -> dict[str, Json]:
    """A JSON object. Of equal keys the last one counts.

    Raises:
        InvalidRequestError: Not JSON (`invalid_json`), deeper than MAX_JSON_DEPTH, or no object.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"The body cannot be read as JSON: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_type")
    _check_depth(value)
    return value


def check_fields(
    body: Mapping[str, Json], *, implemented: frozenset[str], is_strict: bool
) -> tuple[str, ...]:
    """Refuse what is not implemented; returns the names that nobody knows, one more than are warned about at most.

    Raises:
        InvalidRequestError: `unsupported_parameter`, `forbidden_parameter` or, under `is_strict`,
            `unknown_parameter`.
    """
    unknown: list[str] = []
    for name, value in body.items():
        if name in implemented or value is None or name in _IGNORED:
            continue
        if name in _FORBIDDEN:
            raise InvalidRequestError(
                f"{name} cannot be set by a client.", code="forbidden_parameter", param=name
            )
        if name in _NEUTRAL:
            _check_neutral(name, value)
        else:
            note_unknown(unknown, name)
    if unknown and is_strict:
        raise InvalidRequestError(
            f"{shown_name(unknown[0])} is not a parameter of this endpoint.",
            code="unknown_parameter",
            param=shown_name(unknown[0]),
        )
    return tuple(unknown)


def note_unknown(unknown: list[str], name: str) -> None:
    """Add a name that nobody knows, as long as more of them make a difference to the warning."""
    if len(unknown) <= MAX_WARNED:
        unknown.append(name)


def unknown_warning(names: tuple[str, ...]) -> str:
    """The value of the `x-warning` header: printable ASCII."""
    shown = ", ".join(shown_name(name) for name in names[:MAX_WARNED])
    more = " and more" if len(names) > MAX_WARNED else ""
    return f"ignored unknown parameters: {shown}{more}"


def shown_name(name: str) -> str:
    """A name that the client made up, fit for a header or a log line."""
    return name[:_MAX_NAME].encode("unicode_escape").decode("ascii")


def unsupported(param: str, because: str = "is not supported") -> InvalidRequestError:
    return InvalidRequestError(f"{param} {because}.", code="unsupported_parameter", param=param)


def _check_neutral(name: str, value: Json) -> None:
    if name in ("tools", "functions") and value == []:
        raise InvalidRequestError(
            f"{name} must not be empty: leave it out.", code="empty_array", param=name
        )
    allowed = _NEUTRAL[name]
    if any(_equals(value, neutral) for neutral in allowed):
        return
    if not allowed:
        raise unsupported(name)
    shown = " or ".join(msgspec.json.encode(neutral).decode() for neutral in allowed)
    raise unsupported(name, f"is not supported; only {shown} is accepted")


def _equals(value: Json, neutral: Json) -> bool:
    """JSON's equality: 1 is 1.0, but true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _check_depth(value: Json) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is nested more than {MAX_JSON_DEPTH} levels deep.", code="json_too_deep"
    )
