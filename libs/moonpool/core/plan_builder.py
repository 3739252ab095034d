"""build_plan: from what the scheduler decided to the value that a runner needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.core.step import Int32Array, SampleSpec, StepPlan, StepRow
from moonpool.ids import BlockId
from moonpool.sched.output import ScheduledRow
from moonpool.sched.request import Role

_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)
_NO_BLOCKS: Int32Array = np.empty(0, dtype=np.int32)
_NO_TAILS: Int32Array = np.empty((0, 2), dtype=np.int32)


def build_plan(
    step: int, rows: list[ScheduledRow], arrived_block_ids: Sequence[BlockId] = ()
) -> StepPlan:
    """The plan of these rows, whose requests have their slots, after these blocks have arrived.

    Arrays are views of the requests' buffers, at places that are never written again.

    A block gets its leaves in the step that writes its last token. A prefill's last, partly filled
    block gets them too: a decode worker reads it.

    Whatever a block held before, it may be another tenant's: the step that writes the first token into
    it zeroes the slots that it does not fill. What arrived in it for a request that ended since is not
    taken in: it would come over the zeros.
    """
    leaf_block_ids: list[int] = []
    zero_tails: list[tuple[int, int]] = []
    for row in rows:
        state = row.state
        size = state.block_size
        first, last = row.start // size, row.end // size
        if last > first:
            leaf_block_ids += state.block_ids[first:last]
        if row.end % size:
            if row.start <= last * size:
                zero_tails.append((state.block_ids[last], row.end % size))
            if state.role is Role.PREFILL and row.is_sampling:
                leaf_block_ids.append(state.block_ids[last])
    begun = {block_id for block_id, _ in zero_tails}
    if begun:
        arrived_block_ids = [block for block in arrived_block_ids if block not in begun]
    return StepPlan(
        step=step,
        rows=tuple(_step_row(row) for row in rows),
        leaf_block_ids=np.array(leaf_block_ids, dtype=np.int32) if leaf_block_ids else _NO_BLOCKS,
        zero_tails=np.array(zero_tails, dtype=np.int32) if zero_tails else _NO_TAILS,
        arrived_block_ids=np.array(arrived_block_ids, dtype=np.int32),
    )


def _step_row(row: ScheduledRow) -> StepRow:
    state = row.state
    is_token_in_slot = state.is_token_in_slot and row.num_scheduled_tokens == 1
    return StepRow(
        slot=state.slot,
        start=row.start,
        num_tokens=row.num_scheduled_tokens,
        token_ids=_NO_TOKENS if is_token_in_slot else state.token_ids[row.start : row.end],
        block_tables=(state.block_table[: -(-row.end // state.block_size)],),
        sample=(
            SampleSpec(sampling=state.request.sampling, position=row.end - state.num_prompt_tokens)
            if row.is_sampling
            else None
        ),
    )
