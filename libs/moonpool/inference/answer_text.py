"""AnswerText: the runs of tokens of one answer become text, up to a stop string.

Rules
- Positions are consecutive; the request machine promises it, and it is asserted here.
- A token that ended the answer by being a stop token (FinishReason.STOP) is counted and shown as an
  id, but has no text.
- A stop string ends the answer at the token that completes it: that token counts, later ones do not.
- Text may lag behind ids (half a character, a possible stop string) until the answer ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.stop_text import StopMatcher


class TokenDecoder(Protocol):
    """Token ids to text, one after the other."""

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; may be empty."""
        ...

    def finish(self) -> str:
        """What an incomplete character leaves behind at the end; called once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """What one run brought."""

    text: str
    token_ids: tuple[int, ...]
    first_position: int
    #: Set in the last piece. STOP for a stop string as for a stop token.
    finish_reason: FinishReason | None


class AnswerText:
    """One choice of one request. After a piece with a finish reason nothing more may be pushed."""

    __slots__ = ("_decoder", "_is_done", "_matcher", "_num_tokens", "_stopped_by_text")

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop)
        self._num_tokens = 0
        self._is_done = False
        self._stopped_by_text = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, the one that ended it included."""
        return self._num_tokens

    @property
    def is_stopped_by_text(self) -> bool:
        """A stop string ended the answer: the workers do not know and must be told."""
        return self._stopped_by_text

    def push(self, run: TokenRun) -> AnswerPiece:
        """Add the next run."""
        assert not self._is_done, "pushed after the end"
        assert run.first_position == self._num_tokens, (run.first_position, self._num_tokens)
        num_spoken = len(run.token_ids)
        if run.finish_reason is FinishReason.STOP and num_spoken:
            num_spoken -= 1
        text: list[str] = []
        for index in range(num_spoken):
            scan = self._matcher.push(self._decoder.push(run.token_ids[index]))
            text.append(scan.text)
            if scan.is_stopped:
                self._stopped_by_text = True
                return self._piece(run, "".join(text), index + 1, FinishReason.STOP)
        if run.finish_reason is not None:
            scan = self._matcher.push(self._decoder.finish())
            text.append(scan.text)
            if scan.is_stopped:
                self._stopped_by_text = True
                return self._piece(run, "".join(text), len(run.token_ids), FinishReason.STOP)
            text.append(self._matcher.finish())
        return self._piece(run, "".join(text), len(run.token_ids), run.finish_reason)

    def _piece(
        self, run: TokenRun, text: str, num_tokens: int, finish_reason: FinishReason | None
    ) -> AnswerPiece:
        self._num_tokens += num_tokens
        self._is_done = finish_reason is not None
        return AnswerPiece(
            text=text,
            token_ids=run.token_ids[:num_tokens],
            first_position=run.first_position,
            finish_reason=finish_reason,
        )
