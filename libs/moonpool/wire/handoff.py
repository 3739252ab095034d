"""The handoff stream between a decode and a prefill worker <-> protobuf.

The stream is one attempt's, so only the first message names it; what comes back is given its attempt
by the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.core.protocol import HandBackReason
from moonpool.handoff.messages import (
    Commit,
    CommitFailed,
    LayersReady,
    Open,
    Opened,
    Reset,
    ResetReason,
    SourceMessage,
    Waiting,
)
from moonpool.ids import AttemptId, BlockId
from moonpool.inference.output import FinishReason
from moonpool.wire.fields import MAX_TOKENS, between, invalid, known, name
from moonpool.wire.request import (
    attempt_id_from_pb,
    attempt_id_to_pb,
    finish_reason_from_pb,
    finish_reason_to_pb,
    worker_key_from_pb,
    worker_key_to_pb,
)

#: Bytes of one leaf digest.
LEAF_BYTES = 8

_MAX_LAYERS = 4_096
_MAX_BLOCK_ID = 2**31 - 1
_RESET_REASONS = {reason.value: reason for reason in ResetReason}
_FAIL_REASONS: dict[str, HandBackReason | FinishReason] = {
    reason.value: reason for reason in (*HandBackReason, *FinishReason)
}


def open_to_pb(message: Open, *, traceparent: str = "") -> pb.FromDecode:
    return pb.FromDecode(
        open=pb.HandoffOpen(
            attempt_id=attempt_id_to_pb(message.attempt_id),
            decode_worker=worker_key_to_pb(message.reader),
            prefill_worker=worker_key_to_pb(message.source),
            namespace_fingerprint=message.namespace,
            traceparent=traceparent,
        )
    )


def open_from_pb(message: pb.FromDecode) -> Open:
    """Raises InvalidMessageError."""
    if message.WhichOneof("kind") != "open":
        raise invalid("kind", "must be open: a handoff stream begins with it")
    opened = message.open
    return Open(
        attempt_id=attempt_id_from_pb(opened.attempt_id, "open.attempt_id"),
        reader=worker_key_from_pb(opened.decode_worker, "open.decode_worker"),
        source=worker_key_from_pb(opened.prefill_worker, "open.prefill_worker"),
        namespace=name(opened.namespace_fingerprint, "open.namespace_fingerprint"),
    )


def source_message_to_pb(
    message: SourceMessage, *, last_layer_unix_ns: int = 0, first_token_unix_ns: int = 0
) -> pb.FromPrefill:
    """One message of the prefill side.

    Args:
        last_layer_unix_ns, first_token_unix_ns: With a Commit: when the last layer's KV was written,
            and when the token was drawn, by the source's wall clock; 0 if unknown.
    """
    match message:
        case Waiting():
            return pb.FromPrefill(waiting=pb.HandoffWaiting())
        case Opened():
            return pb.FromPrefill(
                opened=pb.HandoffOpened(
                    num_cached_tokens=message.num_cached_tokens,
                    block_ids=message.block_ids,
                    leaves=message.digests,
                    num_peer_tokens=message.num_peer_tokens,
                    num_peer_held_tokens=message.num_peer_held_tokens,
                )
            )
        case LayersReady():
            return pb.FromPrefill(
                layers=pb.HandoffLayersReady(
                    start=message.start,
                    end=message.end,
                    first_layer=message.first_layer,
                    end_layer=message.end_layer,
                    block_ids=message.block_ids,
                    leaves=message.digests,
                )
            )
        case Commit():
            return pb.FromPrefill(
                commit=pb.HandoffCommit(
                    first_position=message.position,
                    first_token=message.first_token,
                    finish_reason=finish_reason_to_pb(message.finish_reason),
                    num_cached_tokens=message.num_cached_tokens,
                    last_layer_unix_ns=last_layer_unix_ns,
                    first_token_unix_ns=first_token_unix_ns,
                    num_peer_tokens=message.num_peer_tokens,
                )
            )
        case CommitFailed():
            return pb.FromPrefill(failed=pb.HandoffFailed(reason=message.reason.value))
        case Reset():
            return pb.FromPrefill(reset=pb.HandoffReset(reason=message.reason.value))


def source_message_from_pb(message: pb.FromPrefill, attempt_id: AttemptId) -> SourceMessage:
    """Raises InvalidMessageError: also for leaves that do not fit the blocks and layers."""
    match message.WhichOneof("kind"):
        case "waiting":
            return Waiting(attempt_id=attempt_id)
        case "opened":
            opened = message.opened
            block_ids = block_ids_from_pb(opened.block_ids, "opened.block_ids")
            check_leaves(opened.leaves, len(block_ids), None, "opened.leaves")
            return Opened(
                attempt_id=attempt_id,
                num_cached_tokens=_num_tokens(opened.num_cached_tokens, "opened.num_cached_tokens"),
                block_ids=block_ids,
                num_peer_tokens=between(
                    opened.num_peer_tokens,
                    "opened.num_peer_tokens",
                    low=0,
                    high=opened.num_cached_tokens,
                ),
                num_peer_held_tokens=_num_tokens(
                    opened.num_peer_held_tokens, "opened.num_peer_held_tokens"
                )
                if opened.HasField("num_peer_held_tokens")
                else None,
                digests=opened.leaves,
            )
        case "layers":
            return _layers_from_pb(message.layers, attempt_id)
        case "commit":
            commit = message.commit
            return Commit(
                attempt_id=attempt_id,
                first_token=between(
                    commit.first_token, "commit.first_token", low=0, high=0x7FFF_FFFF
                ),
                position=_num_tokens(commit.first_position, "commit.first_position"),
                finish_reason=finish_reason_from_pb(commit.finish_reason, "commit.finish_reason"),
                num_cached_tokens=_num_tokens(commit.num_cached_tokens, "commit.num_cached_tokens"),
                num_peer_tokens=between(
                    commit.num_peer_tokens,
                    "commit.num_peer_tokens",
                    low=0,
                    high=commit.num_cached_tokens,
                ),
            )
        case "failed":
            return CommitFailed(
                attempt_id=attempt_id,
                reason=known(_FAIL_REASONS, message.failed.reason, "failed.reason"),
            )
        case "reset":
            return Reset(
                attempt_id=attempt_id,
                reason=known(_RESET_REASONS, message.reset.reason, "reset.reason"),
            )
        case _:
            raise invalid("kind", "is not set, or is one that this version does not know")


def _layers_from_pb(layers: pb.HandoffLayersReady, attempt_id: AttemptId) -> LayersReady:
    block_ids = block_ids_from_pb(layers.block_ids, "layers.block_ids")
    if not block_ids:
        raise invalid("layers.block_ids", "is empty")
    end = _num_tokens(layers.end, "layers.end")
    end_layer = between(layers.end_layer, "layers.end_layer", low=1, high=_MAX_LAYERS)
    first_layer = between(layers.first_layer, "layers.first_layer", low=0, high=end_layer - 1)
    start = between(layers.start, "layers.start", low=0, high=max(end - 1, 0))
    if end <= start:
        raise invalid("layers.end", f"is {end}; allowed is above start = {start}")
    check_leaves(layers.leaves, len(block_ids), end_layer - first_layer, "layers.leaves")
    return LayersReady(
        attempt_id=attempt_id,
        start=start,
        end=end,
        first_layer=first_layer,
        end_layer=end_layer,
        block_ids=block_ids,
        digests=layers.leaves,
    )


def block_ids_from_pb(values: Sequence[int], path: str) -> tuple[BlockId, ...]:
    """Blocks of a pool, each named once. Raises InvalidMessageError."""
    if len(values) > MAX_TOKENS:
        raise invalid(path, f"has {len(values)} blocks; at most {MAX_TOKENS} are allowed")
    result = tuple(map(BlockId, values))
    if result and max(result) > _MAX_BLOCK_ID:
        raise invalid(path, f"has block {max(result)}; at most {_MAX_BLOCK_ID} is allowed")
    if len(set(result)) != len(result):
        raise invalid(path, "names a block twice")
    return result


def _num_tokens(value: int, path: str) -> int:
    return between(value, path, low=0, high=2 * MAX_TOKENS)


def check_leaves(leaves: bytes, num_blocks: int, num_layers: int | None, path: str) -> None:
    """Whole leaves, as many for each block; of `num_layers` layers if that is known.

    Raises InvalidMessageError. Shards of KV heads multiply the number, so it may be a multiple.
    """
    if num_blocks == 0:
        if leaves:
            raise invalid(path, "has digests of no block")
        return
    unit = num_blocks * LEAF_BYTES * (num_layers or 1)
    if not leaves or len(leaves) % unit:
        raise invalid(path, f"has {len(leaves)} bytes; allowed is a multiple of {unit}")
