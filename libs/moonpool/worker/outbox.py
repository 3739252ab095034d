"""RouterOutbox: what a worker has to tell one router and has not sent yet. It is not a queue.

A frame leaves per engine step, or later if the router reads slowly. Meanwhile tokens of one choice
merge into one run, so that the outbox never holds more than its requests' unsent tokens. Within a
frame tokens come before the end of their attempt, whatever the order of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from moonpool.core.protocol import HandedBack, Refused, TokensReady
from moonpool.handoff.messages import WorkerMessage
from moonpool.ids import AttemptId
from moonpool.wire.spans import Span


class _RunKey(NamedTuple):
    attempt_id: AttemptId
    choice: int
    is_prefill_side: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report and the role that made it."""

    message: WorkerMessage
    is_prefill_side: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxContent:
    """What leaves in one frame: token reports first, then the ends of attempts."""

    reports: tuple[Report, ...]
    spans: tuple[Span, ...]


class RouterOutbox:
    """One router's. Owned by the loop; the session sends what `take` gives."""

    def __init__(self) -> None:
        self._tokens: dict[_RunKey, TokensReady] = {}
        self._ends: list[Report] = []
        self._spans: list[Span] = []

    def __bool__(self) -> bool:
        return bool(self._tokens or self._ends or self._spans)

    def add(self, message: WorkerMessage, *, is_prefill_side: bool) -> None:
        if not isinstance(message, TokensReady):
            assert isinstance(message, Refused | HandedBack), message
            self._ends.append(Report(message=message, is_prefill_side=is_prefill_side))
            return
        key = _RunKey(message.attempt_id, message.run.choice, is_prefill_side)
        earlier = self._tokens.get(key)
        self._tokens[key] = message if earlier is None else _joined(earlier, message)

    def add_spans(self, spans: tuple[Span, ...]) -> None:
        self._spans += spans

    def take(self) -> OutboxContent:
        """Everything, which is then gone from here."""
        reports = [
            Report(message=tokens, is_prefill_side=key.is_prefill_side)
            for key, tokens in self._tokens.items()
        ]
        content = OutboxContent(reports=(*reports, *self._ends), spans=tuple(self._spans))
        self._tokens.clear()
        self._ends.clear()
        self._spans.clear()
        return content


def _joined(earlier: TokensReady, later: TokensReady) -> TokensReady:
    first, second = earlier.run, later.run
    assert first.end_position == second.first_position, (earlier, later)
    run = replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
    )
    return replace(earlier, run=run)
