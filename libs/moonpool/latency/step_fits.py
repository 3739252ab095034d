"""PrefillFit and DecodeFit: a worker's step times, learnt from the steps that it ran.

A few steps give a first cost (`cost` is None before). It is fitted anew each few steps, not each step;
how the samples are kept and fitted is in sample_window.py.
"""

from __future__ import annotations

from moonpool.latency.costs import DecodeCost, PrefillCost
from moonpool.latency.sample_window import SampleWindow

#: A fit takes up to a millisecond: one step in so many has one, more often while there are few samples.
_REFIT_STEPS = 32
_MIN_SAMPLES = 3


class _Pace:
    """When to fit anew: after 3, 4, 6, 9 ... samples, then after each 32."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._next = _MIN_SAMPLES

    def is_due(self) -> bool:
        """Count one sample."""
        self._num_samples += 1
        if self._num_samples < self._next:
            return False
        self._next = self._num_samples + min(max(self._num_samples // 3, 1), _REFIT_STEPS)
        return True


class PrefillFit:
    """Learns a PrefillCost.

    Args:
        max_step_tokens: The worker's token budget of a step.
    """

    def __init__(self, *, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._window = SampleWindow((1e-4, 1e-6, 1e-4))
        self._pace = _Pace()
        self._cost: PrefillCost | None = None

    @property
    def cost(self) -> PrefillCost | None:
        return self._cost

    def observe(self, *, num_tokens: int, work: int, elapsed_s: float) -> None:
        """A step computed chunks of `num_tokens` and `work` (see `prefill_work`) in `elapsed_s`."""
        if num_tokens <= 0 or elapsed_s <= 0.0:
            return
        num_cached_tokens = max(work // num_tokens - num_tokens, 0) // 2
        self._window.add((num_tokens, num_cached_tokens), (1.0, num_tokens, work), elapsed_s)
        if self._pace.is_due():
            base_s, per_token_s, per_work_s = self._window.fit()
            self._cost = PrefillCost(
                base_s=base_s,
                per_token_s=per_token_s,
                per_work_s=per_work_s,
                max_step_tokens=self._max_step_tokens,
            )

    def validate(self) -> None:
        self._window.validate()


class DecodeFit:
    """Learns a DecodeCost."""

    def __init__(self) -> None:
        self._window = SampleWindow((1e-6, 1e-4, 1e-4))
        self._pace = _Pace()
        self._cost: DecodeCost | None = None

    @property
    def cost(self) -> DecodeCost | None:
        return self._cost

    def observe(self, *, batch: int, num_context_tokens: int, elapsed_s: float) -> None:
        """A step of `batch` decodes and nothing else took `elapsed_s`."""
        if batch <= 0 or elapsed_s <= 0.0:
            return
        self._window.add((batch, num_context_tokens), (1.0, num_context_tokens, batch), elapsed_s)
        if self._pace.is_due():
            base_s, per_context_token_s, per_request_s = self._window.fit()
            self._cost = DecodeCost(
                base_s=base_s,
                per_context_token_s=per_context_token_s,
                per_request_s=per_request_s,
            )

    def validate(self) -> None:
        self._window.validate()
