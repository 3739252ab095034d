"""Arrival against a naive model: random announcements, reads that end in any order, bad leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.handoff.arrival import Arrival
from moonpool.ids import BlockId

BLOCK_SIZE = 4


@given(st.data())
def test_a_prefix_counts_when_every_layer_of_it_is_verified(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 4))
    num_tokens = data.draw(st.integers(1, 30))
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_held = data.draw(st.integers(0, (num_tokens - 1) // BLOCK_SIZE))
    targets = tuple(BlockId(100 + block) for block in range(num_blocks))
    arrival = Arrival(
        num_tokens=num_tokens,
        num_held_tokens=num_held * BLOCK_SIZE,
        target_block_ids=targets,
        block_size=BLOCK_SIZE,
        num_layers=num_layers,
    )
    verified: set[tuple[int, int]] = set()
    bad: set[int] = set()
    open_reads: dict[int, list[tuple[int, range]]] = {}
    asked: set[tuple[int, int]] = set()

    for _ in range(data.draw(st.integers(0, 12))):
        if open_reads and data.draw(st.booleans()):
            number = data.draw(st.sampled_from(sorted(open_reads)))
            blocks = open_reads.pop(number)
            is_ok = data.draw(st.booleans()) or data.draw(st.booleans())
            wrong = data.draw(st.sets(st.integers(0, len(blocks) - 1), max_size=1))
            arrival.end_read(number, is_ok=is_ok, bad_indices=tuple(wrong))
            for index, (block, layers) in enumerate(blocks):
                if is_ok and index not in wrong:
                    verified |= {(block, layer) for layer in layers}
                else:
                    bad.add(block)
        else:
            first = data.draw(st.integers(0, num_blocks - 1))
            end = data.draw(st.integers(first, num_blocks))
            first_layer = data.draw(st.integers(0, num_layers - 1))
            end_layer = data.draw(st.integers(first_layer + 1, num_layers))
            layers = range(first_layer, end_layer)
            wanted = arrival.announce(
                start=first * BLOCK_SIZE,
                block_ids=tuple(BlockId(block) for block in range(first, end)),
                first_layer=first_layer,
                end_layer=end_layer,
                digests=bytes(range(first, end)),
            )
            lacking = [
                block
                for block in range(max(first, num_held), end)
                if block < min(bad, default=num_blocks)
                and not any((block, layer) in asked for layer in layers)
            ]
            assert (wanted is not None) == bool(lacking)
            if wanted is not None:
                assert list(wanted.source_block_ids) == lacking
                assert list(wanted.target_block_ids) == [targets[block] for block in lacking]
                assert list(wanted.digests) == [bytes([block]) for block in lacking]
                open_reads[wanted.number] = [(block, layers) for block in lacking]
                asked |= {(block, layer) for block in lacking for layer in layers}
        arrival.validate()
        prefix = num_held
        while prefix < min(bad, default=num_blocks) and all(
            (prefix, layer) in verified for layer in range(num_layers)
        ):
            prefix += 1
        assert arrival.num_verified_tokens == min(prefix * BLOCK_SIZE, num_tokens)
        assert arrival.num_open_reads == len(open_reads)
        assert arrival.fork().key() == arrival.key()
