"""GgufMetadata: typed reads of a GGUF's key-value part. A file is others' input: every value is checked."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from moonpool.errors import ModelError


class GgufMetadata:
    """What a file says of itself; a key that is missing or holds something else is a ModelError that names it."""

    def __init__(self, fields: Any, file_name: str) -> None:  # Any: gguf has no types
        self._fields = fields
        self._file_name = file_name

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        return value if isinstance(value, str) else self._refuse(key, value, "a text")

    def optional_text(self, key: str) -> str | None:
        return None if self._get(key) is None else self.text(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._refuse(key, value, "true or false")

    def count(self, key: str, default: int | None = None) -> int:
        """At least 1."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Finite."""
        value = self._get(key, default)
        if not _is_number(value):
            self._refuse(key, value, "a number")
        return float(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """The id of one of `num_tokens` tokens, if the file names it."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            self._refuse(key, value, f"the id of one of {num_tokens} tokens")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Empty if the key is missing."""
        values = self._list(key)
        if not all(isinstance(value, str) for value in values):
            self._refuse(key, values, "a list of texts")
        return tuple(values)

    def integers(self, key: str) -> tuple[int, ...]:
        """Empty if the key is missing."""
        values = self._list(key)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            self._refuse(key, values, "a list of integers")
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Empty if the key is missing."""
        values = self._list(key)
        if not all(map(_is_number, values)):
            self._refuse(key, values, "a list of numbers")
        return tuple(map(float, values))

    def _list(self, key: str) -> list[Any]:  # Any: the caller checks what is in it
        value = self._get(key, [])
        return value if isinstance(value, list) else self._refuse(key, value, "a list")

    def _get(self, key: str, default: Any = None) -> Any:  # Any: the file decides the type
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._file_name}: {key} is not UTF-8: {error}") from error

    def _refuse(
        self, key: str, value: Any, expected: str
    ) -> NoReturn:  # Any: it is not what it should be
        if value is None:
            raise ModelError(f"{self._file_name} lacks the key {key}")
        raise ModelError(f"{self._file_name}: {key} = {str(value)[:80]} must be {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
