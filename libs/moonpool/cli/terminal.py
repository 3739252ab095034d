"""The console, and how numbers are written. Colours only on a terminal and without NO_COLOR."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

#: Eighths of a cell, empty to full.
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def make_console(*, is_error: bool = False) -> Console:
    """stdout's console, or stderr's. Nothing is highlighted that we did not mark up."""
    stream = sys.stderr if is_error else sys.stdout
    return Console(file=stream, highlight=False, emoji=False)


def is_live(console: Console) -> bool:
    """True if the screen can be redrawn: a terminal that is not dumb."""
    return console.is_terminal and not console.is_dumb_terminal


def print_json(value: Mapping[str, Any]) -> None:  # Any: JSON
    """One object on one line, at once: the reader may be waiting for it."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What bars and marks are made of."""

    is_unicode: bool

    @classmethod
    def of(cls, console: Console) -> Glyphs:
        return cls(is_unicode=console.encoding.lower().replace("-", "").startswith("utf"))

    @property
    def ok(self) -> str:
        return "✔" if self.is_unicode else "+"

    @property
    def bad(self) -> str:
        return "✘" if self.is_unicode else "x"

    @property
    def mark(self) -> str:
        """A moment on a time axis."""
        return "│" if self.is_unicode else "|"

    @property
    def dot(self) -> str:
        return "·" if self.is_unicode else "."

    def bar(self, share: float, width: int) -> str:
        """A bar from the left, `share` of `width` cells long, padded to `width`."""
        cells = min(max(share, 0.0), 1.0) * width
        if not self.is_unicode:
            return ("#" * round(cells)).ljust(width)
        whole = int(cells)
        part = _EIGHTHS[int((cells - whole) * 8)] if whole < width else ""
        return ("█" * whole + part.strip()).ljust(width)

    def interval(self, start: float, end: float, width: int, *, mark: float | None = None) -> str:
        """A bar over [start, end) of [0, 1), at least one cell; `mark` is a moment in between."""
        first = min(max(int(start * width), 0), width - 1)
        last = min(max(round(end * width), first + 1), width)
        cells = [" "] * width
        cells[first:last] = ("█" if self.is_unicode else "#") * (last - first)
        if mark is not None:
            at = min(max(int(mark * width), 0), width - 1)
            cells[at] = self.mark if cells[at] == " " else cells[at]
        return "".join(cells)


def format_ms(ms: float) -> str:
    """`0.42 ms`, `12.3 ms`, `1,234 ms`: three digits that matter."""
    size = abs(ms)
    return f"{ms:,.2f} ms" if size < 10 else f"{ms:,.1f} ms" if size < 1_000 else f"{ms:,.0f} ms"


def format_bytes(num_bytes: float) -> str:
    """`512 B`, `23.1 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1_024 or unit == "GiB":
            break
        num_bytes /= 1_024
    return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def rounded_parts(parts: Mapping[str, float], *, digits: int = 1) -> dict[str, float]:
    """Round each part so that the rounded ones sum to the rounded sum (largest remainders)."""
    scale = 10**digits
    scaled = {name: value * scale for name, value in parts.items()}
    floors = {name: int(value // 1) for name, value in scaled.items()}
    missing = round(sum(scaled.values())) - sum(floors.values())
    by_remainder = sorted(scaled, key=lambda name: floors[name] - scaled[name])
    for name in by_remainder[:missing]:
        floors[name] += 1
    return {name: value / scale for name, value in floors.items()}
