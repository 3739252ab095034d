"""Changes and snapshots of a published set come back as they were; what a bad peer sends is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.api.v1 import control_pb2, worker_pb2
from moonpool.errors import FailedPreconditionError, MoonpoolError
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from moonpool.kv.published_set import PublishedSet
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.kv_events import (
    MAX_BATCH_BLOCKS,
    MAX_KV_EVENTS_BYTES,
    KvEvents,
    decode_kv_events,
    encode_kv_events,
    snapshot_from_pb,
    snapshot_to_pb,
)
from support.kv import make_chain

KEY = WorkerKey(WorkerId("d0"), Incarnation("0123456789abcdef"))

_letters = st.text("abcd", min_size=1, max_size=6)


def stored(chain: str, num_known: int = 0) -> BlockStored:
    hashes = make_chain(chain)
    parent = hashes[num_known - 1] if num_known else None
    return BlockStored(hashes=tuple(hashes[num_known:]), parent_hash=parent)


@st.composite
def events(draw: st.DrawFn) -> tuple[CacheEvent, ...]:
    chain = draw(_letters)
    kind = draw(st.sampled_from(["store", "remove", "clear"]))
    if kind == "clear":
        return (AllBlocksCleared(),)
    if kind == "store":
        return (stored(chain),)
    return (BlockRemoved(hashes=tuple(make_chain(chain)[-1:])),)


@given(st.lists(events(), max_size=12))
@settings(max_examples=60)
def test_changes_and_snapshots_survive_the_wire(changes: list[tuple[CacheEvent, ...]]) -> None:
    published = PublishedSet()
    for change in changes:
        batch = published.apply(change)
        if batch is not None:
            assert decode_kv_events(encode_kv_events(KEY, batch)) == KvEvents(
                worker=KEY, batch=batch
            )
    snapshot = published.snapshot()
    assert snapshot_from_pb(snapshot_to_pb(snapshot)) == snapshot


def many_hashes(num_blocks: int) -> tuple[BlockHash, ...]:
    rng = np.random.default_rng(1)
    return tuple(BlockHash(row.tobytes()) for row in rng.integers(0, 256, (num_blocks, 32), "u1"))


def test_a_snapshot_goes_in_parts() -> None:
    published = PublishedSet()
    hashes = many_hashes(150)
    published.apply((BlockStored(hashes=hashes[:100], parent_hash=None),))
    published.apply((BlockStored(hashes=hashes[100:], parent_hash=hashes[50]),))
    snapshot = published.snapshot()
    parts = list(snapshot_to_pb(snapshot, part_blocks=64))
    assert [len(part.keys) // 8 for part in parts] == [64, 64, 22]
    assert snapshot_from_pb(parts) == snapshot
    with pytest.raises(InvalidMessageError, match="the head says 150"):
        snapshot_from_pb(parts[:-1])
    with pytest.raises(InvalidMessageError, match="head"):
        snapshot_from_pb(parts[1:])
    with pytest.raises(InvalidMessageError, match="head"):
        snapshot_from_pb([parts[0], parts[0]])
    with pytest.raises(InvalidMessageError, match="no part"):
        snapshot_from_pb([])


def test_the_largest_change_fits_into_a_message() -> None:
    published = PublishedSet()
    hashes = many_hashes(MAX_BATCH_BLOCKS)
    batch = published.apply((BlockStored(hashes=hashes, parent_hash=None),))
    assert batch is not None
    data = encode_kv_events(KEY, batch)
    assert len(data) < MAX_KV_EVENTS_BYTES
    assert decode_kv_events(data).batch == batch


def test_a_change_costs_little_more_than_its_keys() -> None:
    batch = PublishedSet().apply((BlockStored(hashes=many_hashes(1_000), parent_hash=None),))
    assert batch is not None
    assert len(encode_kv_events(KEY, batch)) < 8_000 + 128


def _set_major(message: control_pb2.KvEvents) -> None:
    message.protocol_major = 99


def _cut_key(message: control_pb2.KvEvents) -> None:
    message.stored_keys = message.stored_keys[:-1]


def _zero_key(message: control_pb2.KvEvents) -> None:
    message.stored_keys = bytes(8) + message.stored_keys[8:]


def _same_key(message: control_pb2.KvEvents) -> None:
    message.stored_keys = message.stored_keys[:8] * 2


def _zero_key_removed(message: control_pb2.KvEvents) -> None:
    message.removed_keys = bytes(8)


def _removed_and_cleared(message: control_pb2.KvEvents) -> None:
    message.is_cleared = True
    message.removed_keys = b"\1" * 8


def _sequence_zero(message: control_pb2.KvEvents) -> None:
    message.head.sequence = 0


def _huge_count(message: control_pb2.KvEvents) -> None:
    message.head.count = 1 << 40


def _no_worker(message: control_pb2.KvEvents) -> None:
    message.ClearField("worker")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_set_major, FailedPreconditionError),
        (_cut_key, InvalidMessageError),
        (_zero_key, InvalidMessageError),
        (_same_key, InvalidMessageError),
        (_zero_key_removed, InvalidMessageError),
        (_removed_and_cleared, InvalidMessageError),
        (_sequence_zero, InvalidMessageError),
        (_huge_count, InvalidMessageError),
        (_no_worker, InvalidMessageError),
    ],
)
def test_what_cannot_be_a_change_is_refused(
    damage: Callable[[control_pb2.KvEvents], None], error: type[MoonpoolError]
) -> None:
    batch = PublishedSet().apply((stored("ab"),))
    assert batch is not None
    message = control_pb2.KvEvents.FromString(encode_kv_events(KEY, batch))
    damage(message)
    with pytest.raises(error):
        decode_kv_events(message.SerializeToString())


def test_noise_is_refused() -> None:
    with pytest.raises(InvalidMessageError):
        decode_kv_events(b"\xff" * 10)
    with pytest.raises(InvalidMessageError):
        decode_kv_events(bytes(MAX_KV_EVENTS_BYTES + 1))
    with pytest.raises(InvalidMessageError):
        snapshot_from_pb([worker_pb2.SnapshotPart()])
