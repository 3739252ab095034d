"""StepPlan, StepResult, Runner, LayerMark: the seam between the core and whatever runs the model.

A StepPlan is a self-contained value: it is all that a runner needs, and what rank 0 would broadcast.
The core imports no torch; the engine implements Runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.inference.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]


def _no_blocks() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSpec:
    """Draw one token after this row's last input token."""

    sampling: SamplingParams
    #: Position of the drawn token in the answer: the counter of the random number.
    position: int
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRow:
    """One request's part of a step: input tokens [start, start + num_tokens) of its sequence."""

    #: Where the runner keeps the request's last drawn token, 0 <= slot < max_num_seqs.
    slot: int
    start: int
    num_tokens: int
    #: int32[num_tokens]; empty: one input token, the last token drawn into `slot`.
    token_ids: Int32Array
    #: Per group, int32[ceil((start + num_tokens) / block_size)]: the blocks of positions 0 .. end.
    block_tables: tuple[Int32Array, ...]
    #: None for a chunk that does not reach the end of what is known.
    sample: SampleSpec | None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one forward pass computes."""

    #: Counts from 1 within an incarnation.
    step: int
    rows: tuple[StepRow, ...]
    #: int32[n]: blocks whose values are final after this step: each layer's leaf digest is written.
    leaf_block_ids: Int32Array
    #: int32[m, 2] of (block id, first unused slot): blocks that this step begins and does not fill.
    #: Zeroed in each layer before anybody reads it: attention, and whoever writes leaves.
    zero_tails: Int32Array
    #: int32[k]: blocks whose KV somebody else has written since the plan before, whole and verified. A
    #: runner whose device has memory of its own takes them from the pool before anything reads them.
    arrived_block_ids: Int32Array = field(default_factory=_no_blocks)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Where a step's time went, in seconds. `other_s` is all that is not model or sampler."""

    forward_s: float = 0.0
    logits_s: float = 0.0
    sample_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a plan: tokens for exactly the rows that had a SampleSpec, in row order."""

    step: int
    #: 0 to k tokens per sampling row. An empty tuple: the row's logits were not finite.
    tokens: tuple[tuple[int, ...], ...]
    timing: StepTiming = StepTiming()


class LayerMark(Protocol):
    """Told by the runner when a layer's KV of the whole plan is written, in layer order."""

    def layer_done(self, layer: int) -> None:
        """Write the leaves of `leaf_block_ids` for `layer`, then publish (step, layer + 1)."""
        ...


class Runner(Protocol):
    """Runs plans on the device that holds the pool. One caller, one plan at a time."""

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        """Compute the plan; calls `mark.layer_done` once for every layer, in order."""
        ...
