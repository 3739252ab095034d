"""TransferFit: what reading KV from one peer takes, quick to distrust it and slow to trust it again.

Rules
- Until something is known, the prior holds: rather optimistic, so that a first read is tried. A reader
  waits for it no longer than it would compute (that deadline is the reader's).
- A read that took longer than the fit says counts at once and alone: until a better one, every
  prediction is longer by the same factor. One slow read thus makes the next requests recompute.
- A peer that is not read from is not measured, so it is probed: `is_probe_due` tells when a read may be
  tried against the prediction; the time between probes doubles while they come too late.
- A read that was given up counts as one that would have taken twice as long.
"""

from __future__ import annotations

from moonpool.latency.costs import TransferCost
from moonpool.latency.sample_window import SampleWindow

#: What is believed of a peer that was never read from.
PRIOR = TransferCost(latency_s=0.002, bytes_per_s=1e9)

#: Of its excess, how much a better read leaves.
_RELIEF = 0.125
_MIN_PROBE_S = 10.0
_MAX_PROBE_S = 320.0
_MAX_BYTES_PER_S = 1e13


class TransferFit:
    """See the file's head. Owned by the reader; one per peer and incarnation."""

    def __init__(self, prior: TransferCost = PRIOR) -> None:
        self._window = SampleWindow((1e-4, 1e-4))
        self._typical = prior
        self._slowdown = 1.0
        #: A read has told something.
        self.is_measured = False
        self._probe_s = _MIN_PROBE_S
        self._probe_at = float("-inf")

    @property
    def cost(self) -> TransferCost:
        """What the next read is believed to take."""
        return TransferCost(
            latency_s=self._typical.latency_s * self._slowdown,
            bytes_per_s=self._typical.bytes_per_s / self._slowdown,
        )

    def is_probe_due(self, now: float) -> bool:
        """Whether a read may be tried although it is predicted to be too slow."""
        return now >= self._probe_at

    def observe(
        self,
        *,
        num_bytes: int,
        elapsed_s: float,
        is_late: bool,
        now: float,
        is_complete: bool = True,
    ) -> None:
        """A read of `num_bytes` took `elapsed_s`, from asking until the last byte was here.

        Args:
            num_bytes: What was asked for.
            is_late: Computing it would have been faster.
            is_complete: False: it was given up then.
        """
        if num_bytes <= 0:
            return
        elapsed_s = max(elapsed_s, 1e-6)
        self.is_measured = True
        if is_complete:
            self._window.add((num_bytes,), (1.0, num_bytes), elapsed_s)
            latency_s, per_byte_s = self._window.fit()
            self._typical = TransferCost(
                latency_s=latency_s, bytes_per_s=1.0 / max(per_byte_s, 1.0 / _MAX_BYTES_PER_S)
            )
        else:
            elapsed_s *= 2.0
        ratio = elapsed_s / max(self._typical.predict(num_bytes), 1e-6)
        if ratio >= self._slowdown:
            self._slowdown = ratio
        else:
            relieved = 1.0 + (self._slowdown - 1.0) * _RELIEF
            self._slowdown = max(ratio, relieved, 1.0)
        self._probe_s = min(self._probe_s * 2.0, _MAX_PROBE_S) if is_late else _MIN_PROBE_S
        self._probe_at = now + self._probe_s

    def validate(self) -> None:
        self._window.validate()
        assert self._slowdown >= 1.0
        assert _MIN_PROBE_S <= self._probe_s <= _MAX_PROBE_S
