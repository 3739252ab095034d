"""The stream between a reader and a holder of prefixes <-> protobuf.

Each message is of one lease, as the reader numbers them. A lease is one attempt's, so only its first message
names that; what comes back is given its attempt by the reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.handoff.messages import (
    HolderMessage,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    PrefixStaging,
)
from moonpool.ids import AttemptId, BlockHash
from moonpool.wire.fields import MAX_TOKENS, between, invalid, known, name, text
from moonpool.wire.handoff import block_ids_from_pb, check_leaves
from moonpool.wire.request import (
    attempt_id_from_pb,
    attempt_id_to_pb,
    worker_key_from_pb,
    worker_key_to_pb,
)

#: Bytes of one block hash.
HASH_BYTES = 32

_REASONS = {reason.value: reason for reason in PrefixRefusal}


#: A lease among those of one stream, as the reader numbers them.
LeaseNumber = NewType("LeaseNumber", int)


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """The reader needs the lease no more."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The holder has ended the lease."""


def reader_message_to_pb(
    lease: LeaseNumber, message: PrefixOpen | LeaseClosed, *, traceparent: str = ""
) -> pb.FromReader:
    if isinstance(message, LeaseClosed):
        return pb.FromReader(lease=lease, close=pb.PrefixClose())
    return pb.FromReader(
        lease=lease,
        open=pb.PrefixOpen(
            attempt_id=attempt_id_to_pb(message.attempt_id),
            reader=worker_key_to_pb(message.reader),
            holder=worker_key_to_pb(message.holder),
            namespace_fingerprint=message.namespace,
            secret_fingerprint=message.secret_fingerprint,
            traceparent=traceparent,
            hashes=message.hashes,
            first=message.first,
        ),
    )


def reader_message_from_pb(message: pb.FromReader) -> tuple[LeaseNumber, PrefixOpen | LeaseClosed]:
    """Raises InvalidMessageError."""
    lease = LeaseNumber(message.lease)
    match message.WhichOneof("kind"):
        case "open":
            return lease, _prefix_open(message.open)
        case "close":
            return lease, LeaseClosed()
        case _:
            raise invalid("kind", "is not set, or is one that this version does not know")


def _prefix_open(opened: pb.PrefixOpen) -> PrefixOpen:
    if not 1 <= len(opened.hashes) <= MAX_TOKENS:
        raise invalid("open.hashes", f"are {len(opened.hashes)}; allowed is 1 to {MAX_TOKENS}")
    if any(len(value) != HASH_BYTES for value in opened.hashes):
        raise invalid("open.hashes", f"has one that is not {HASH_BYTES} bytes long")
    return PrefixOpen(
        attempt_id=attempt_id_from_pb(opened.attempt_id, "open.attempt_id"),
        reader=worker_key_from_pb(opened.reader, "open.reader"),
        holder=worker_key_from_pb(opened.holder, "open.holder"),
        namespace=name(opened.namespace_fingerprint, "open.namespace_fingerprint"),
        secret_fingerprint=text(
            opened.secret_fingerprint, "open.secret_fingerprint", max_length=64
        ),
        hashes=tuple(map(BlockHash, opened.hashes)),
        first=between(opened.first, "open.first", low=0, high=len(opened.hashes)),
    )


def holder_message_to_pb(lease: LeaseNumber, message: HolderMessage | LeaseEnded) -> pb.FromHolder:
    match message:
        case PrefixStaging():
            staging = pb.PrefixStaging(
                num_ready_blocks=message.num_ready_blocks, num_blocks=message.num_blocks
            )
            return pb.FromHolder(lease=lease, staging=staging)
        case PrefixOpened():
            opened = pb.PrefixOpened(block_ids=message.block_ids, leaves=message.digests)
            return pb.FromHolder(lease=lease, opened=opened)
        case PrefixFailed():
            failed = pb.PrefixFailed(reason=message.reason.value, message=message.message)
            return pb.FromHolder(lease=lease, failed=failed)
        case LeaseEnded():
            return pb.FromHolder(lease=lease, ended=pb.PrefixEnded())


def holder_message_from_pb(
    message: pb.FromHolder, attempt_id: AttemptId
) -> HolderMessage | LeaseEnded:
    """Raises InvalidMessageError: also for leaves that do not fit the blocks."""
    match message.WhichOneof("kind"):
        case "staging":
            staging = message.staging
            num_blocks = between(staging.num_blocks, "staging.num_blocks", low=1, high=MAX_TOKENS)
            return PrefixStaging(
                attempt_id=attempt_id,
                num_ready_blocks=between(
                    staging.num_ready_blocks, "staging.num_ready_blocks", low=0, high=num_blocks - 1
                ),
                num_blocks=num_blocks,
            )
        case "opened":
            opened = message.opened
            block_ids = block_ids_from_pb(opened.block_ids, "opened.block_ids")
            check_leaves(opened.leaves, len(block_ids), None, "opened.leaves")
            return PrefixOpened(attempt_id=attempt_id, block_ids=block_ids, digests=opened.leaves)
        case "failed":
            return PrefixFailed(
                attempt_id=attempt_id,
                reason=known(_REASONS, message.failed.reason, "failed.reason"),
                message=text(message.failed.message, "failed.message"),
            )
        case "ended":
            return LeaseEnded()
        case _:
            raise invalid("kind", "is not set, or is one that this version does not know")
