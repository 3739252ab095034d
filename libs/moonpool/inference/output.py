"""What a worker gives back: runs of tokens with their positions, and why an answer ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class FinishReason(enum.StrEnum):
    """Why an answer ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    #: The model gave NaN or infinity for this row: the request fails, nothing of its chain is cached.
    INVALID_OUTPUT = "invalid_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Tokens of one choice at consecutive positions of its answer.

    `token_ids` may be empty when only the finish reason is news. A stop token is the last of
    `token_ids` when it ended the answer: the reader decides whether it is shown.
    """

    first_position: int
    token_ids: tuple[int, ...]
    choice: int = 0
    finish_reason: FinishReason | None = None

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.token_ids)

    def joined(self, later: TokenRun) -> TokenRun:
        """This run and `later`, which goes on where it ends, as one run of the same choice."""
        assert (self.end_position, self.choice) == (later.first_position, later.choice), (
            self,
            later,
        )
        assert self.finish_reason is None, (self, later)
        return replace(
            self, token_ids=self.token_ids + later.token_ids, finish_reason=later.finish_reason
        )
