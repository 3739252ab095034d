"""What the client saw of one request. Times are seconds since the run's start, on one monotonic clock."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.inference.generation import Usage


class Outcome(enum.StrEnum):
    OK = "ok"
    #: The server said, before the first token, that it does not take it now.
    REFUSED = "refused"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTold:
    """What the server itself said of a request, as far as its protocol has words for it."""

    usage: Usage | None = None
    finish_reason: str = ""
    request_id: str = ""
    ttft_ms: float | None = None
    ttft_parts_ms: Mapping[str, float] = field(default_factory=dict)
    prefill_worker: str = ""
    decode_worker: str = ""
    num_attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, whatever became of it."""

    index: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    #: When each token was received; tokens of one message share a moment. A server that does not
    #: say how many tokens a message holds has one entry per message.
    token_times_s: tuple[float, ...] = ()
    #: Empty if the protocol does not carry them.
    token_ids: tuple[int, ...] = ()
    told: ServerTold = ServerTold()
    error_code: str = ""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: by the server's usage, else what was seen."""
        if self.told.usage is not None:
            return self.told.usage.num_completion_tokens
        return len(self.token_times_s)

    @property
    def has_bundled_tokens(self) -> bool:
        """Gaps are between messages, not tokens: the server sent several in one without saying so."""
        return self.outcome is Outcome.OK and len(self.token_times_s) != self.num_tokens

    @property
    def send_lag_s(self) -> float:
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From the schedule, not from the sending; None without a token."""
        return self.token_times_s[0] - self.scheduled_s if self.token_times_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times_s))

    @property
    def tpot_s(self) -> float | None:
        """(t_n - t_1) / (n - 1); None below two tokens."""
        if self.num_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """To the last token; None without one."""
        return self.token_times_s[-1] - self.scheduled_s if self.token_times_s else None
