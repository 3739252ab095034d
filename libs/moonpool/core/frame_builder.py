"""FrameBuilder: what the next CoreFrame takes along."""

from __future__ import annotations

from moonpool.core.protocol import BlockLedger, CoreFrame, Reply
from moonpool.core.step import StepTiming
from moonpool.kv.events import CacheEvent


class FrameBuilder:
    """Gathers replies and counts from one frame to the next."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._planned_step = 0
        self._num_preemptions = 0
        self._timing = StepTiming()
        self._num_step_tokens = 0

    @property
    def replies(self) -> tuple[Reply, ...]:
        """What is to be told, in order."""
        return tuple(self._replies)

    def tell(self, reply: Reply) -> None:
        self._replies.append(reply)

    def on_planned(self, step: int) -> None:
        """The plan of this number runs after the next frame."""
        self._planned_step = step

    def on_preempted(self, num_preemptions: int) -> None:
        self._num_preemptions += num_preemptions

    def on_result(self, timing: StepTiming, num_step_tokens: int) -> None:
        """A step's result has come."""
        self._timing = timing
        self._num_step_tokens = num_step_tokens

    def take(
        self,
        ledger: BlockLedger,
        num_queued_tokens: int,
        cache_events: tuple[CacheEvent, ...] = (),
    ) -> CoreFrame:
        """The frame; the builder is as new after it."""
        timing = self._timing
        frame = CoreFrame(
            step=self._planned_step,
            replies=tuple(self._replies),
            ledger=ledger,
            num_queued_tokens=num_queued_tokens,
            num_preemptions=self._num_preemptions,
            cache_events=cache_events,
            forward_s=timing.forward_s,
            logits_s=timing.logits_s,
            sample_s=timing.sample_s,
            other_s=timing.other_s,
            num_step_tokens=self._num_step_tokens,
        )
        self._replies.clear()
        self._planned_step = 0
        self._num_preemptions = 0
        self._timing = StepTiming()
        self._num_step_tokens = 0
        return frame

    def fork(self) -> FrameBuilder:
        """An independent copy."""
        other = FrameBuilder()
        other._replies = list(self._replies)
        other._planned_step = self._planned_step
        other._num_preemptions = self._num_preemptions
        other._timing = self._timing
        other._num_step_tokens = self._num_step_tokens
        return other
