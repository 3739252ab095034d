"""Error texts of the configuration: the key, the value, where it came from, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from moonpool.config.values import without_credentials

#: Keys whose values are never shown, nor what lies below them, but for the names of tenants.
_SECRET_KEYS = frozenset({"api_key", "api_keys"})

OriginOf = Callable[[str], str]


def describe_errors(
    error: ValidationError,
    model: type[BaseModel],
    *,
    where: str | OriginOf,
) -> str:
    """One line per mistake. `where` names the source, or tells it for a dotted key."""
    lines: list[str] = []
    items = error.errors(include_url=False, include_context=False)
    said = {(item["loc"], item["msg"]) for item in items}
    for item in items:
        # A mistake in [worker] or [store] is one in each group as well: say it once.
        groups, *_ = item["loc"] or ("",)
        table = {"workers": "worker", "stores": "store"}.get(str(groups))
        if table is not None and ((table, *item["loc"][3:]), item["msg"]) in said:
            continue
        location = tuple(part for part in item["loc"] if part != "settings")
        key = dotted(location)
        # What is missing came from nowhere: say where its table is.
        asked = dotted(location[:-1]) if item["type"] == "missing" else key
        origin = where if isinstance(where, str) else where(asked)
        lines.append(
            _describe(item["type"], item["msg"], item["input"], key, origin, location, model)
        )
    return "\n".join(lines)


def dotted(location: tuple[int | str, ...]) -> str:
    """`("workers", 0, "count")` -> `workers[0].count`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def unknown_key(key: str, allowed: list[str], origin: str) -> str:
    """The text for a key that does not exist."""
    last = key.rpartition(".")[2]
    close = difflib.get_close_matches(last, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{key} ({origin}): unknown key; {hint}allowed here: {', '.join(sorted(allowed))}"


def keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed in the table at `location`; empty if there is no table."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None or isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = _model_in(field.annotation) if field is not None else None
    if current is None:
        return []
    keys = [key for key in current.model_fields if key != "settings"]
    if "settings" in current.model_fields:
        inner = _model_in(current.model_fields["settings"].annotation)
        keys.extend(inner.model_fields if inner is not None else ())
    return keys


def _describe(
    kind: str,
    message: str,
    value: Any,  # Any: what the operator wrote
    key: str,
    origin: str,
    location: tuple[int | str, ...],
    model: type[BaseModel],
) -> str:
    if kind == "extra_forbidden":
        return unknown_key(key, keys_at(model, location[:-1]), origin)
    if kind == "missing":
        return f"{key} ({origin}): is missing"
    problem = message.removeprefix("Value error, ")
    if kind == "value_error" and isinstance(value, dict):
        # A rule between keys: its text names them.
        return f"{key + ': ' if key else ''}{problem} ({origin})"
    is_secret = not _SECRET_KEYS.isdisjoint(location) and location[-1] != "tenant"
    shown = "..." if is_secret else without_credentials(repr(value))[:80]
    return f"{key} = {shown} ({origin}): {problem[:1].lower()}{problem[1:]}"


def _model_in(annotation: Any) -> type[BaseModel] | None:  # Any: a type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        for argument in get_args(annotation):
            if (found := _model_in(argument)) is not None:
                return found
    return None
