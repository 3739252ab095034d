"""A step's tables on the device against those that the CPU engine writes and reads by."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.step import SampleSpec, StepPlan, StepRow
from moonpool.engine.batch import StepBatch, build_batch
from moonpool.engine.device.graphs import graph_sizes, pad_decodes
from moonpool.engine.device.tables import DeviceBatch, StepUpload
from moonpool.inference.sampling import SamplingParams

SIZE = 8
GREEDY = SampleSpec(sampling=SamplingParams(temperature=0.0), position=0)


@st.composite
def batches(draw: st.DrawFn, *, only_decodes: bool = False) -> StepBatch:
    lengths = st.just(1) if only_decodes else st.integers(1, 20)
    rows = []
    for slot in range(draw(st.integers(1, 6))):
        start, length = draw(st.integers(0, 40)), draw(lengths)
        num_blocks = -(-(start + length) // SIZE)
        is_sampling = only_decodes or draw(st.booleans())
        rows.append(
            StepRow(
                slot=slot,
                start=start,
                num_tokens=length,
                token_ids=np.array(
                    draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), np.int32
                ),
                block_tables=(
                    np.array(
                        draw(
                            st.lists(st.integers(0, 30), min_size=num_blocks, max_size=num_blocks)
                        ),
                        np.int32,
                    ),
                ),
                sample=GREEDY if is_sampling else None,
            )
        )
    plan = StepPlan(
        step=1,
        rows=tuple(rows),
        leaf_block_ids=np.empty(0, np.int32),
        zero_tails=np.empty((0, 2), np.int32),
    )
    return build_batch(plan, np.zeros(8, np.int64), SIZE)


def check(sent: DeviceBatch, batch: StepBatch) -> None:
    """Each token's KV goes where the CPU engine writes it, and its row reads what it reads there."""
    for tensor in (
        sent.token_ids,
        sent.positions,
        sent.row_of_token,
        sent.kv_indptr,
        sent.kv_indices,
        sent.kv_last_page_len,
    ):
        assert tensor.dtype is torch.int32
        assert tensor.data_ptr() % 16 == 0
    assert sent.token_ids.tolist() == batch.token_ids.tolist()
    assert sent.positions.tolist() == batch.positions.tolist()
    pages = sent.kv_indptr[sent.row_of_token] + sent.positions // SIZE
    assert sent.kv_indices[pages].tolist() == batch.block_ids.tolist()
    assert (sent.positions % SIZE).tolist() == batch.block_offsets.tolist()
    assert sent.kv_last_page_len.tolist() == batch.pages.kv_last_page_len.tolist()
    samples = [] if sent.sample_tokens is None else sent.sample_tokens.tolist()
    assert samples == batch.sample_tokens.tolist()


@given(steps=st.lists(batches(), min_size=1, max_size=3))
@settings(max_examples=20)
def test_one_upload_holds_a_step_after_another(steps: list[StepBatch]) -> None:
    upload = StepUpload(torch.device("cpu"))
    for batch in steps:
        sent = upload.send(batch)
        assert upload.current(batch.pages) is sent
        check(sent, batch)


def test_buffers_grow_with_a_long_table() -> None:
    length = 6_000
    row = StepRow(
        slot=0,
        start=0,
        num_tokens=length,
        token_ids=np.arange(length, dtype=np.int32),
        block_tables=(np.arange(length // SIZE, dtype=np.int32),),
        sample=GREEDY,
    )
    plan = StepPlan(
        step=1,
        rows=(row,),
        leaf_block_ids=np.empty(0, np.int32),
        zero_tails=np.empty((0, 2), np.int32),
    )
    batch = build_batch(plan, np.zeros(8, np.int64), SIZE)
    check(StepUpload(torch.device("cpu")).send(batch), batch)


@given(batch=batches(only_decodes=True), num_more=st.integers(0, 5))
@settings(max_examples=20)
def test_rows_that_fill_up_a_batch_stay_in_the_scratch_block(
    batch: StepBatch, num_more: int
) -> None:
    num_rows = batch.pages.num_rows
    padded = pad_decodes(batch, num_rows + num_more, 31)
    check(StepUpload(torch.device("cpu")).send(padded), padded)
    assert padded.pages.num_rows == padded.pages.num_decode_rows == num_rows + num_more
    assert (padded.pages.kv_lens[num_rows:] == 1).all()
    assert (padded.block_ids[num_rows:] == 31).all()
    for name in ("token_ids", "positions", "block_ids", "block_offsets"):
        assert (getattr(padded, name)[:num_rows] == getattr(batch, name)).all()
    assert (padded.pages.kv_lens[:num_rows] == batch.pages.kv_lens).all()


def test_the_largest_graph_holds_a_full_batch() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(64)[-1] == 64
    assert graph_sizes(4_096)[-1] == 256
