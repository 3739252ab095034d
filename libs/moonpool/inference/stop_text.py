"""Stop strings in an answer that arrives in pieces.

What it is: a matcher between the detokenizer and the client. It finds the first stop string that
completes, wherever pieces (tokens) are cut, and never lets out text that may yet become part of one.

Rules
- The answer ends at the stop string that *completes first*; among those that complete at the same
  character the longest wins. So the result depends on the text only, never on how it was cut.
- The stop string and all after it are not part of the answer.
- What may be the beginning of a stop string is held back; it is let out as soon as it can no longer
  become one, or at the end of the answer.

Life: push() for each piece, until it says stopped; or finish() once, when the answer ends otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopScan:
    """What one piece of text brought."""

    #: Text that now belongs to the answer for good.
    text: str
    #: A stop string is complete: nothing more may be pushed.
    is_stopped: bool


class StopMatcher:
    """Holds back at most one character less than the longest stop string.

    Args:
        stop: Non-empty strings; none at all lets every piece through at once.
    """

    __slots__ = ("_held", "_is_done", "_stop")

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = stop
        self._held = ""
        self._is_done = False

    @property
    def held(self) -> str:
        """Text pushed but not let out: a proper prefix of a stop string."""
        return self._held

    def push(self, piece: str) -> StopScan:
        """Add the next piece of the answer."""
        assert not self._is_done, "pushed after the end"
        text = self._held + piece
        cut = self._find(text)
        if cut is not None:
            self._held = ""
            self._is_done = True
            return StopScan(text=text[:cut], is_stopped=True)
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return StopScan(text=text[: len(text) - num_held], is_stopped=False)

    def finish(self) -> str:
        """The answer ended without a stop string: what was held back belongs to it."""
        held, self._held = self._held, ""
        self._is_done = True
        return held

    def validate(self) -> None:
        """What is held back is a proper prefix of a stop string."""
        assert not self._held or any(
            len(self._held) < len(s) and s.startswith(self._held) for s in self._stop
        ), self._held

    def _find(self, text: str) -> int | None:
        """Where the answer ends: the start of the stop string that completes first."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
