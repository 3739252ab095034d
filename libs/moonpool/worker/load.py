"""Load: what a worker says about its load, in every frame and announcement."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.protocol import BlockLedger
from moonpool.routing.worker_view import WorkerFits


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The last frame's ledger, and how long the running step takes by now."""

    ledger: BlockLedger
    num_queued_tokens: int = 0
    #: 0 when no step runs.
    step_age_ms: int = 0
    is_draining: bool = False
    #: None: those that were told before still hold.
    fits: WorkerFits | None = None

    def differs_from(self, other: Load) -> bool:
        """True if a router would place differently; the step's age and fits wait for other news."""
        return (
            self.ledger != other.ledger
            or self.num_queued_tokens != other.num_queued_tokens
            or self.is_draining != other.is_draining
        )
