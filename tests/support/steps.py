"""Rows of steps, as a core plans them: a test says only what matters to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.core.step import SampleSpec, StepRow
from moonpool.inference.sampling import SamplingParams

GREEDY = SampleSpec(sampling=SamplingParams(temperature=0.0), position=0)


def make_row(
    token_ids: Sequence[int],
    blocks: Sequence[int],
    *,
    slot: int = 0,
    start: int = 0,
    sample: SampleSpec | None = GREEDY,
) -> StepRow:
    """Without token ids the row goes on from its slot's last token."""
    return StepRow(
        slot=slot,
        start=start,
        num_tokens=len(token_ids) or 1,
        token_ids=np.array(token_ids, np.int32),
        block_tables=(np.array(blocks, np.int32),),
        sample=sample,
    )
