"""RouterOutbox: what a worker has to tell one router and has not sent yet. It is not a queue.

A frame leaves per engine step, or later if the router reads slowly. Meanwhile tokens of one choice
merge into one run, so that the outbox never holds more than its requests' unsent tokens. Within a
frame tokens come before the end of their attempt, whatever the order of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.protocol import HandedBack, Refused, TokensReady
from moonpool.handoff.messages import WorkerMessage
from moonpool.ids import AttemptId
from moonpool.wire.spans import Span


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
        #: By attempt, choice and side: one run of tokens that have not left.
        self._tokens: dict[tuple[AttemptId, int, bool], Report] = {}
        self._ends: list[Report] = []
        self._spans: list[Span] = []

    def __bool__(self) -> bool:
        return bool(self._tokens or self._ends or self._spans)

    def add(
        self, message: WorkerMessage, *, is_prefill_side: bool, spans: tuple[Span, ...] = ()
    ) -> None:
        """Take a report, and spans that leave with it."""
        self._spans += spans
        if not isinstance(message, TokensReady):
            assert isinstance(message, Refused | HandedBack), message
            self._ends.append(Report(message=message, is_prefill_side=is_prefill_side))
            return
        key = (message.attempt_id, message.run.choice, is_prefill_side)
        report = self._tokens.get(key)
        if report is not None:
            earlier = report.message
            assert isinstance(earlier, TokensReady), earlier
            message = earlier.joined(message)
        self._tokens[key] = Report(message=message, is_prefill_side=is_prefill_side)

    def take(self) -> OutboxContent:
        """Everything, which is then gone from here."""
        content = OutboxContent(
            reports=(*self._tokens.values(), *self._ends), spans=tuple(self._spans)
        )
        self._tokens.clear()
        self._ends.clear()
        self._spans.clear()
        return content
