"""HeldBlocks against a model that knows what each block really holds: a step never misses KV."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.device.held import HeldBlocks

BLOCKS, LAYERS = 4, 3

blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True).map(np.array)
#: Contents are small numbers, so that the same content comes again.
contents = st.integers(1, 3)
spans = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).map(
    lambda span: (span[0], min(span[0] + span[1], LAYERS))
)
moves = st.one_of(
    st.tuples(st.just("from_device"), blocks, contents, spans, st.booleans()),
    st.tuples(st.just("from_host"), blocks, contents, spans),
    st.tuples(st.just("compute"), blocks),
    st.tuples(st.just("arrive"), blocks),
)


@given(st.lists(moves, max_size=20))
def test_what_arrived_is_on_the_device_after_what_is_lacking_was_copied(moved: list) -> None:
    leaves = np.zeros((BLOCKS, LAYERS), np.uint64)
    held = HeldBlocks(leaves)
    device = np.zeros((BLOCKS, LAYERS), np.uint64)
    host = np.zeros((BLOCKS, LAYERS), np.uint64)
    number = 100
    for what, ids, *rest in moved:
        if what == "from_device":
            content, (first, end), is_good = rest
            number += 1
            shape = (len(ids), end - first)
            digests = np.full(shape, content, np.uint64)
            held.note(ids, first, digests, np.zeros(shape, np.bool_))
            # A copy that went wrong holds anything.
            device[ids, first:end] = host[ids, first:end] = content if is_good else number
            held.note(ids, first, digests, np.full(shape, is_good, np.bool_))
            if is_good:
                leaves[ids, first:end] = content
        elif what == "from_host":
            content, (first, end) = rest
            host[ids, first:end] = leaves[ids, first:end] = content
        elif what == "compute":
            held.forget(ids)
            number += 1
            device[ids] = number
        else:
            # Only what is verified in all layers is ever named: the host holds what its digests say.
            is_verified = (host[ids] == leaves[ids]) & (leaves[ids] > 0)
            ids = ids[is_verified.all(axis=1)].astype(np.int32)
            lacking = held.lacking(ids)
            held.forget(lacking)
            device[lacking] = host[lacking]
            assert np.array_equal(device[ids], host[ids])


def test_a_block_that_came_whole_is_not_lacking() -> None:
    leaves = np.arange(12, dtype=np.uint64).reshape(BLOCKS, LAYERS) + 1
    held = HeldBlocks(leaves)
    ids = np.array([2, 0])
    for layer in range(LAYERS):
        digests = leaves[ids, layer : layer + 1]
        held.note(ids, layer, digests, np.array([[True], [layer != 1]]))
    everything = np.arange(BLOCKS, dtype=np.int32)
    assert held.lacking(everything).tolist() == [0, 1, 3]
    held.forget(np.array([2]))
    assert held.lacking(everything).tolist() == [0, 1, 2, 3]
