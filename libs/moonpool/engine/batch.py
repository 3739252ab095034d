"""StepBatch: a StepPlan as flat arrays, built once per step with numpy.

Tokens are laid out with the rows of one token first (decodes), then the rows of several (prefill
chunks), so that attention works on slices:

    tokens   [ d0 d1 d2 | p0 p0 p0 p0 | p1 p1 p1 ... )
    rows       decodes    chunk         chunk            qo_indptr = [0 1 2 3 7 ...]

Page tables are int32 in FlashInfer's CSR form: the blocks of row r are
`kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`, and the last of them holds `kv_last_page_len[r]` tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.core.step import Int32Array, SampleSpec, StepPlan, StepRow

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTables:
    """Which keys each row of queries sees: all tokens of its blocks up to its own position."""

    #: Rows of exactly one token; they come first.
    num_decode_rows: int
    #: int32[rows + 1]: row r's queries are tokens [qo_indptr[r], qo_indptr[r + 1]).
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.kv_last_page_len)

    @property
    def kv_lens(self) -> Int64Array:
        """int64[rows]: tokens that the row's last query sees, itself included."""
        num_blocks = np.diff(self.kv_indptr).astype(np.int64)
        return (num_blocks - 1) * self.block_size + self.kv_last_page_len


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """Everything that a forward pass needs, in the order above."""

    pages: PageTables
    #: int64[tokens]
    token_ids: Int64Array
    positions: Int64Array
    #: int64[tokens]: where each token's KV goes.
    block_ids: Int64Array
    block_offsets: Int64Array
    #: int64[samples]: the tokens whose logits are wanted, in the plan's row order.
    sample_tokens: Int64Array
    sample_slots: Int64Array
    samples: tuple[SampleSpec, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(plan: StepPlan, last_tokens: Int64Array, block_size: int) -> StepBatch:
    """`last_tokens[slot]` is the last token drawn into a slot: the input of a row without ids."""
    if all(row.num_tokens == 1 and row.sample is not None for row in plan.rows):
        return _decode_batch(plan.rows, last_tokens, block_size)
    decodes = [row for row in plan.rows if row.num_tokens == 1]
    rows = decodes + [row for row in plan.rows if row.num_tokens > 1]
    lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    tables = [row.block_tables[0] for row in rows]
    ends = starts + lengths

    qo_indptr = _indptr(lengths)
    kv_indptr = _indptr(np.array([len(table) for table in tables], dtype=np.int64))
    kv_indices = np.concatenate(tables)
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(qo_indptr[-1]) + (starts - qo_indptr[:-1])[row_of_token]
    blocks = kv_indices[kv_indptr[row_of_token] + positions // block_size]
    token_ids = np.concatenate(
        [row.token_ids if len(row.token_ids) else last_tokens[row.slot, None] for row in rows]
    )
    assert len(token_ids) == len(positions), (len(token_ids), len(positions))
    assert ((ends + block_size - 1) // block_size == np.diff(kv_indptr)).all(), plan.step
    last_by_row = {id(row): int(end) - 1 for row, end in zip(rows, qo_indptr[1:], strict=True)}
    sampling = [row for row in plan.rows if row.sample is not None]
    return StepBatch(
        pages=PageTables(
            num_decode_rows=len(decodes),
            qo_indptr=qo_indptr.astype(np.int32),
            kv_indptr=kv_indptr.astype(np.int32),
            kv_indices=kv_indices.astype(np.int32, copy=False),
            kv_last_page_len=((ends - 1) % block_size + 1).astype(np.int32),
            block_size=block_size,
        ),
        token_ids=token_ids.astype(np.int64, copy=False),
        positions=positions,
        block_ids=blocks.astype(np.int64),
        block_offsets=positions % block_size,
        sample_tokens=_int64([last_by_row[id(row)] for row in sampling]),
        sample_slots=_int64([row.slot for row in sampling]),
        samples=tuple(row.sample for row in sampling if row.sample is not None),
    )


def _decode_batch(rows: Sequence[StepRow], last_tokens: Int64Array, block_size: int) -> StepBatch:
    """The same for rows of one token that all draw: nothing to sort, and few operations for each row."""
    num_rows = len(rows)
    starts = [row.start for row in rows]
    tables = [row.block_tables[0] for row in rows]
    nums_blocks = [len(table) for table in tables]
    assert nums_blocks == [start // block_size + 1 for start in starts], rows
    ends = list(itertools.accumulate(nums_blocks))
    kv_indices = np.concatenate(tables)
    slots = _int64([row.slot for row in rows])
    token_ids = last_tokens[slots]
    for index, row in enumerate(rows):
        if len(row.token_ids):
            token_ids[index] = row.token_ids[0]
    offsets = [start % block_size for start in starts]
    tokens = np.arange(num_rows + 1)
    return StepBatch(
        pages=PageTables(
            num_decode_rows=num_rows,
            qo_indptr=_int32(range(num_rows + 1)),
            kv_indptr=_int32([0, *ends]),
            kv_indices=kv_indices,
            kv_last_page_len=_int32([offset + 1 for offset in offsets]),
            block_size=block_size,
        ),
        token_ids=token_ids,
        positions=_int64(starts),
        block_ids=_int64([table[-1] for table in tables]),
        block_offsets=_int64(offsets),
        sample_tokens=tokens[:num_rows],
        sample_slots=slots,
        samples=tuple([row.sample for row in rows if row.sample is not None]),
    )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def _int64(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def _indptr(lengths: Int64Array) -> Int64Array:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return indptr
