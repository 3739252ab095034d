"""StepFits: what this worker learns of its own step times, step by step, for routers and for itself.

The engine's loop sums up what each step computed (`shape_of`); the next frame brings that here, with the
time that the step took. Steps of decodes alone teach the decode fit; of steps with chunks, what decodes
are believed to add is taken off, and the rest teaches the prefill fit.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.step import StepPlan
from moonpool.ids import WorkerKey
from moonpool.latency.costs import PrefillCost, TransferCost, prefill_work
from moonpool.latency.step_fits import DecodeFit, PrefillFit
from moonpool.latency.step_shape import StepShape
from moonpool.routing.worker_view import WorkerFits
from moonpool.wire.engine_messages import TimedFrame


def shape_of(plan: StepPlan) -> StepShape:
    """The sums of a plan. A row of one token behind others counts as a decode: it costs like one."""
    num_prefill_tokens = work = num_decodes = num_context_tokens = 0
    for row in plan.rows:
        if row.num_tokens == 1 and row.start:
            num_decodes += 1
            num_context_tokens += row.start + 1
        else:
            num_prefill_tokens += row.num_tokens
            work += prefill_work(row.num_tokens, row.start)
    return StepShape(
        num_prefill_tokens=num_prefill_tokens,
        prefill_work=work,
        num_decodes=num_decodes,
        num_context_tokens=num_context_tokens,
    )


class StepFits:
    """See the file's head. On the service's loop; constant time per step, a small fit in one of 32.

    Args:
        max_step_tokens: The token budget of a step.
        transfers: What is known of reading from peers, in order of their keys; the same object as
            long as nothing has changed.
    """

    def __init__(
        self,
        *,
        max_step_tokens: int,
        transfers: Callable[[], tuple[tuple[WorkerKey, TransferCost], ...]] = tuple,
    ) -> None:
        self._prefill = PrefillFit(max_step_tokens=max_step_tokens)
        self._decode = DecodeFit()
        self._transfers = transfers
        self._value = WorkerFits()

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """None until enough prefills have run here."""
        return self._prefill.cost

    def frame_received(self, timed: TimedFrame) -> None:
        """Learn from the step that this frame tells of, if it tells of one."""
        frame, shape = timed.frame, timed.shape
        elapsed_s = frame.forward_s + frame.logits_s + frame.sample_s + frame.other_s
        if not shape.num_prefill_tokens:
            self._decode.observe(
                batch=shape.num_decodes,
                num_context_tokens=shape.num_context_tokens,
                elapsed_s=elapsed_s,
            )
            return
        if shape.num_decodes:
            cost = self._decode.cost
            if cost is None:
                return
            elapsed_s -= cost.predict_added(shape.num_decodes, shape.num_context_tokens)
        self._prefill.observe(
            num_tokens=shape.num_prefill_tokens, work=shape.prefill_work, elapsed_s=elapsed_s
        )

    def value(self) -> WorkerFits:
        """All of it. The same object as long as nothing was fitted anew."""
        prefill, decode, transfers = self._prefill.cost, self._decode.cost, self._transfers()
        last = self._value
        if not (prefill is last.prefill and decode is last.decode and transfers is last.transfers):
            self._value = WorkerFits(prefill=prefill, decode=decode, transfers=transfers)
        return self._value
