"""A worker's published set <-> protobuf: changes over the bus, snapshots over gRPC.

Keys travel as raw little-endian uint64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool.api.v1 import control_pb2, kv_pb2, worker_pb2
from moonpool.ids import WorkerKey
from moonpool.kv.block_key import KeyArray, are_distinct
from moonpool.kv.published_set import EventBatch, SetHead, SetSnapshot
from moonpool.wire.fields import between, decode, invalid
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb
from moonpool.wire.worker import PROTOCOL_MAJOR, check_protocol

#: Most blocks of one message over the bus: 8 bytes each, of the 1 MiB that NATS takes.
MAX_BATCH_BLOCKS = 1 << 15
MAX_KV_EVENTS_BYTES = 1 << 20
#: Blocks of one part of a snapshot.
PART_BLOCKS = 1 << 16
#: No worker has more blocks: a pool of 16 TiB in blocks of 1 MiB.
_MAX_BLOCKS = 1 << 24
MAX_PARTS = _MAX_BLOCKS // PART_BLOCKS

# Any: numpy's dtypes are generic in a way that names no width.
_KEY: np.dtype[Any] = np.dtype("<u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """One change of one worker's set, as it was read."""

    worker: WorkerKey
    batch: EventBatch


def encode_kv_events(worker: WorkerKey, batch: EventBatch) -> bytes:
    """At most MAX_KV_EVENTS_BYTES for a batch of at most MAX_BATCH_BLOCKS."""
    return control_pb2.KvEvents(
        protocol_major=PROTOCOL_MAJOR,
        worker=worker_key_to_pb(worker),
        head=head_to_pb(batch.head),
        is_cleared=batch.is_cleared,
        removed_keys=_bytes(batch.removed_keys),
        stored_keys=_bytes(batch.stored_keys),
    ).SerializeToString()


def decode_kv_events(data: bytes) -> KvEvents:
    """Raises InvalidMessageError, and FailedPreconditionError for another protocol."""
    message = decode(control_pb2.KvEvents, data, max_bytes=MAX_KV_EVENTS_BYTES)
    check_protocol(message.protocol_major, "The worker")
    head = head_from_pb(message.head, "head")
    if head.sequence == 0:
        raise invalid("head.sequence", "is 0, which is the empty set and no change")
    removed = _keys(message.removed_keys, "removed_keys")
    if message.is_cleared and len(removed):
        raise invalid("removed_keys", "are given although everything is cleared")
    stored = _keys(message.stored_keys, "stored_keys")
    for path, values in (("removed_keys", removed), ("stored_keys", stored)):
        if not are_distinct(values):
            raise invalid(path, "has a key twice")
    return KvEvents(
        worker=worker_key_from_pb(message.worker, "worker"),
        batch=EventBatch(
            head=head,
            is_cleared=message.is_cleared,
            removed_keys=removed,
            stored_keys=stored,
        ),
    )


def head_to_pb(head: SetHead) -> kv_pb2.KvSetHead:
    return kv_pb2.KvSetHead(sequence=head.sequence, count=head.count, digest=head.digest)


def head_from_pb(message: kv_pb2.KvSetHead, path: str) -> SetHead:
    """Raises InvalidMessageError."""
    return SetHead(
        sequence=message.sequence,
        count=between(message.count, f"{path}.count", low=0, high=_MAX_BLOCKS),
        digest=message.digest,
    )


def snapshot_to_pb(
    snapshot: SetSnapshot, *, part_blocks: int = PART_BLOCKS
) -> Iterator[worker_pb2.SnapshotPart]:
    """In parts that fit a message, the first with the head; made one by one, as they are sent."""
    for start in range(0, max(len(snapshot.keys), 1), part_blocks):
        end = start + part_blocks
        yield worker_pb2.SnapshotPart(
            head=head_to_pb(snapshot.head) if start == 0 else None,
            keys=_bytes(snapshot.keys[start:end]),
        )


def snapshot_from_pb(parts: Iterable[worker_pb2.SnapshotPart]) -> SetSnapshot:
    """Put the parts of one snapshot together.

    Raises:
        InvalidMessageError: Also if they are not as many blocks as the head says.
    """
    head: SetHead | None = None
    pieces: list[KeyArray] = []
    for part in parts:
        if part.HasField("head") == bool(pieces):
            raise invalid("head", "belongs into the first part, and only there")
        if head is None:
            head = head_from_pb(part.head, "head")
        pieces.append(_keys(part.keys, "keys"))
    if head is None:
        raise invalid("head", "is missing: there is no part")
    keys = np.concatenate(pieces)
    if len(keys) != head.count:
        raise invalid("keys", f"are {len(keys)}; the head says {head.count}")
    return SetSnapshot(head=head, keys=keys)


def _bytes(keys: KeyArray) -> bytes:
    return keys.astype(_KEY, copy=False).tobytes()


def _keys(data: bytes, path: str) -> KeyArray:
    if len(data) % _KEY.itemsize:
        raise invalid(path, f"has {len(data)} bytes, not a multiple of {_KEY.itemsize}")
    keys = np.frombuffer(data, _KEY).astype(np.uint64, copy=False)
    if not keys.all():
        raise invalid(path, "have a 0, which is no key")
    return keys
