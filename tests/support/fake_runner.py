"""A runner without a model: it writes numbers into a pool through block tables and reads them back.

KV of a position is a hash of all KV before it, as read through the block table, and of its token; the
drawn token is a hash of the KV read for the whole sequence. A wrong table, a block that was freed too
early, shared or mixed up gives other tokens than the same request alone (`answer_alone`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.core.step import LayerMark, StepPlan, StepResult, StepRow, StepTiming
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams

#: Few, so that hypothesis finds equal prefixes and stop tokens.
VOCAB_SIZE = 50


def kv_values(before: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """KV of `token_ids` at the positions after `before` (KV of all earlier positions)."""
    chain = hashlib.blake2b(np.array(before, dtype=np.int64).tobytes(), digest_size=8)
    values: list[int] = []
    for token_id in token_ids:
        here = chain.copy()
        here.update(int(token_id).to_bytes(8, "little"))
        value = int.from_bytes(here.digest(), "little", signed=True)
        values.append(value)
        chain.update(value.to_bytes(8, "little", signed=True))
    return values


def draw(values: Sequence[int], sampling: SamplingParams, position: int) -> int:
    """The next token after a sequence with these KV values."""
    state = np.array([*values, sampling.seed, position], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "little") % VOCAB_SIZE


def answer_alone(
    request: InferenceRequest, *, max_model_len: int, eos_token_ids: Sequence[int] = ()
) -> tuple[list[int], FinishReason]:
    """The answer's tokens of a request that has the worker for itself, emitted ones included."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    answer = list(request.emitted_token_ids)
    values = kv_values([], [*request.prompt_token_ids, *answer])
    while True:
        token_id = draw(values, sampling, len(answer))
        answer.append(token_id)
        if token_id in stops:
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens or len(values) + 1 == max_model_len:
            return answer, FinishReason.LENGTH
        values += kv_values(values, [token_id])


class NoMark:
    """Listens to no layer."""

    def layer_done(self, layer: int) -> None:
        pass


class FakeRunner:
    """Implements `core.step.Runner` over an int64 pool of one layer; checks each plan's form.

    Args:
        is_invalid: Rows whose logits are to be not finite.
        pool: int64[num_blocks, block_size] to use; by default its own.
        has_own_memory: As on a GPU: it computes in memory that only it has. Final blocks leave for the
            pool, and what arrived there comes when the plan says so.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        is_invalid: Callable[[StepRow], bool] = lambda row: False,
        has_own_memory: bool = False,
        pool: npt.NDArray[np.int64] | None = None,
    ) -> None:
        #: int64[num_blocks, block_size]
        self.pool: npt.NDArray[np.int64] = (
            np.full((num_blocks, block_size), -1, dtype=np.int64) if pool is None else pool
        )
        self._memory = self.pool.copy() if has_own_memory else self.pool
        #: Blocks with valid leaves: id -> the values that the leaf was made of.
        self.leaves: dict[int, bytes] = {}
        self.plans: list[StepPlan] = []
        self._slots: list[int | None] = [None] * max_num_seqs
        self._block_size = block_size
        self._is_invalid = is_invalid

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        self._check(plan)
        self.plans.append(plan)
        self._memory[plan.arrived_block_ids] = self.pool[plan.arrived_block_ids]
        # All rows read what stood there before the step: none may count on another's writes.
        before = self._memory.copy()
        tokens: list[tuple[int, ...]] = []
        for row in plan.rows:
            values = self._compute(row, before)
            if row.sample is not None:
                drawn = draw(values, row.sample.sampling, row.sample.position)
                tokens.append(() if self._is_invalid(row) else (drawn,))
                self._slots[row.slot] = drawn
        for block_id, first_unused in plan.zero_tails:
            self._memory[block_id, first_unused:] = 0
        self.pool[plan.leaf_block_ids] = self._memory[plan.leaf_block_ids]
        for block_id in plan.leaf_block_ids:
            self.leaves[int(block_id)] = self.pool[block_id].tobytes()
        mark.layer_done(0)
        return StepResult(step=plan.step, tokens=tuple(tokens), timing=StepTiming(forward_s=0.001))

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """KV values of the first tokens of a sequence that lies in these blocks."""
        return self.pool[list(block_ids)].reshape(-1)[:num_tokens].tolist()

    def _compute(self, row: StepRow, before: npt.NDArray[np.int64]) -> list[int]:
        token_ids = row.token_ids.tolist()
        if not token_ids:
            last = self._slots[row.slot]
            assert last is not None, f"slot {row.slot} holds no token"
            token_ids = [last]
        (table,) = row.block_tables
        values = before[table].reshape(-1)[: row.start].tolist()
        new_values = kv_values(values, token_ids)
        for position, value in zip(range(row.start, row.end), new_values, strict=True):
            block, slot = divmod(position, self._block_size)
            self._memory[table[block], slot] = value
        return values + new_values

    def _check(self, plan: StepPlan) -> None:
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"a slot occurs twice: {slots}"
        assert all(0 <= slot < len(self._slots) for slot in slots), slots
        written: list[int] = []
        for row in plan.rows:
            assert row.num_tokens >= 1
            assert len(row.token_ids) in ({0, 1} if row.num_tokens == 1 else {row.num_tokens})
            (table,) = row.block_tables
            assert table.dtype == np.int32
            assert len(table) == -(-row.end // self._block_size), "a table of a wrong length"
            assert row.sample is not None or row.end % self._block_size == 0, "chunk off the edge"
            written += table[row.start // self._block_size :].tolist()
        assert len(set(written)) == len(written), f"two rows write one block: {written}"
