"""StepLog: the last steps of the engine, each with its times by the engine's own clock readings.

The frame that plans a step says when it began; the next one says when its tokens were drawn and where
the time went. Keeping both costs an engine nothing and a service an append per step.
"""

from __future__ import annotations

import itertools
from collections import deque

from moonpool.wire.engine_messages import TimedFrame
from moonpool.wire.steps import StepRecord

#: About two minutes of steps of 10 ms.
_MAX_STEPS = 16_384


class StepLog:
    """Owned by the loop. The oldest step goes first.

    A step whose frames were merged, because the service slept, is left out: the numbers of the steps
    around it tell.
    """

    def __init__(self, *, max_steps: int = _MAX_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)
        self._planned_step = 0
        self._planned_unix_ns = 0
        #: When the step before the planned one drew its tokens; 0: the engine was idle.
        self._before_unix_ns = 0

    def frame_received(self, timed: TimedFrame) -> float | None:
        """Note what a frame of the core says of the step before it, and of the one that it plans.

        Returns:
            Of that step before: seconds from the tokens of the step before it to its own, less
            forward, logits and sampler. None if it followed no other step at once.
        """
        frame = timed.frame
        overhead_s: float | None = None
        step = frame.step - 1 if frame.step else self._planned_step
        if timed.computed_unix_ns and step and step == self._planned_step:
            self._records.append(
                StepRecord(
                    step=step,
                    planned_unix_ns=self._planned_unix_ns,
                    computed_unix_ns=timed.computed_unix_ns,
                    num_tokens=frame.num_step_tokens,
                    forward_s=frame.forward_s,
                    logits_s=frame.logits_s,
                    sample_s=frame.sample_s,
                )
            )
            if self._before_unix_ns:
                period_s = (timed.computed_unix_ns - self._before_unix_ns) * 1e-9
                model_s = frame.forward_s + frame.logits_s + frame.sample_s
                # The wall clock may have been set meanwhile.
                overhead_s = max(0.0, period_s - model_s)
        self._planned_step = frame.step
        self._planned_unix_ns = timed.planned_unix_ns
        self._before_unix_ns = timed.computed_unix_ns
        return overhead_s

    def after(self, step: int, *, max_steps: int) -> tuple[StepRecord, ...]:
        """Of the steps after number `step`, the first `max_steps`."""
        later = (record for record in self._records if record.step > step)
        return tuple(itertools.islice(later, max_steps))
