"""ChatTemplate: messages to one text, by the model's own Jinja template.

minijinja runs it: no access to Python objects, and fuel bounds its work. Differences from the Jinja2
environment that Hugging Face templates are written for are made up here: blocks are trimmed, `tojson`
escapes no HTML, `raise_exception` and `strftime_now` exist.

What a user wrote is guarded on its way in (tokenizer.py says against what): in each string of
messages and tools, special tokens are broken by a guard character. So is a string that ends like the
beginning of one, or begins like the end of one, since template or neighbour could complete it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from minijinja import Environment, TemplateError

from moonpool.errors import InvalidRequestError, ModelError
from moonpool.hub.model_config import read_json
from moonpool.hub.tokenizer import RenderedChat

#: Steps of the template machine: thousands of messages, but no loop bomb.
_FUEL = 5_000_000
#: Noncharacters: valid in text, never assigned, so a guard can nearly always be found.
_GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

Json = Any  # what JSON can hold: a message is whatever the client sent, the template decides


class TemplateRefusedError(InvalidRequestError):
    """The model's template does not accept these messages (for example, their order of roles)."""

    default_code = "invalid_messages"


class ChatTemplate:
    """One model's template. Not thread-safe: one per thread that renders."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`variables` are the names that the template may use, such as bos_token.

        Raises:
            ModelError: the template is not valid.
        """
        if any(len(special) < 2 for special in special_tokens):
            raise ModelError("a special token of one character cannot be kept out of user text")
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        #: Proper prefixes and suffixes of all special tokens.
        self._beginnings = tuple({s[:n] for s in special_tokens for n in range(1, len(s))})
        self._endings = tuple({s[n:] for s in special_tokens for n in range(1, len(s))})
        self._variables = dict(variables or {})
        environment = Environment(trim_blocks=True, lstrip_blocks=True, fuel=_FUEL, debug=False)
        environment.add_filter("tojson", _tojson)
        environment.add_global("raise_exception", _raise_exception)
        environment.add_global("strftime_now", lambda form: now().strftime(form))
        try:
            environment.add_template("chat", source)
        except TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error.detail or error}") from error
        self._environment = environment

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        special_tokens: Sequence[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json; None if the model has none."""
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        source = _read_source(directory, config)
        if source is None:
            return None
        return cls(source, special_tokens=special_tokens, variables=_token_names(config), now=now)

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Json] | None = None,
        extra: Mapping[str, Json] | None = None,
    ) -> RenderedChat:
        """The chat as text, with user text guarded.

        Raises:
            TemplateRefusedError: the template raised, or ran out of fuel.
        """
        user_values: dict[str, Json] = {
            **(extra or {}),
            "messages": list(messages),
            "tools": tools,
        }
        guard = ""
        if self._is_guard_needed(user_values):
            guard = _free_guard(user_values)
            user_values = _map_text(user_values, lambda text: self._guarded(text, guard))
        try:
            text = self._environment.render_template(
                "chat",
                **{
                    **self._variables,
                    **user_values,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except TemplateError as error:
            raise TemplateRefusedError(
                f"the model's chat template refused the messages: {error.detail or error.message}",
                param="messages",
            ) from error
        return RenderedChat(text=text, guard=guard)

    def _is_guard_needed(self, value: Json) -> bool:
        return any(
            self._pattern.search(text)
            or text.endswith(self._beginnings)
            or text.startswith(self._endings)
            for text in _texts(value)
        )

    def _guarded(self, text: str, guard: str) -> str:
        # Again until none is whole: breaking one may leave another that overlapped it.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)
        if text.endswith(self._beginnings):
            text = text + guard
        if text.startswith(self._endings):
            text = guard + text
        return text


def _read_source(directory: Path, config: Mapping[str, Json]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several templates by name: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError("tokenizer_config.json: chat_template must be a string or named strings")
    return source


def _token_names(config: Mapping[str, Json]) -> dict[str, str]:
    """bos_token and the like, which are strings or objects with a `content`."""
    names = {}
    for key, value in config.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                names[key] = content
    return names


def _texts(value: Json) -> Iterator[str]:
    """All strings inside, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _map_text(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(key, change): _map_text(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(inner, change) for inner in value]
    return value


def _free_guard(value: Json) -> str:
    used = set().union(*map(set, _texts(value)))
    for guard in _GUARDS:
        if guard not in used:
            return guard
    raise TemplateRefusedError("messages hold all Unicode noncharacters", param="messages")


def _tojson(value: Json, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
