"""What a worker has learnt of times <-> protobuf."""

from __future__ import annotations

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.latency.costs import DecodeCost, PrefillCost, TransferCost
from moonpool.routing.worker_view import WorkerFits
from moonpool.wire.fields import between, finite, invalid
from moonpool.wire.request import worker_key_from_pb, worker_key_to_pb

_MAX_TRANSFERS = 4_096
_MAX_STEP_TOKENS = 1 << 31
_MAX_S = 1e9


def fits_to_pb(fits: WorkerFits) -> pb.Fits:
    prefill, decode = fits.prefill, fits.decode
    return pb.Fits(
        prefill=pb.PrefillCost(
            base_s=prefill.base_s,
            per_token_s=prefill.per_token_s,
            per_work_s=prefill.per_work_s,
            max_step_tokens=prefill.max_step_tokens,
        )
        if prefill is not None
        else None,
        decode=pb.DecodeCost(
            base_s=decode.base_s,
            per_context_token_s=decode.per_context_token_s,
            per_request_s=decode.per_request_s,
        )
        if decode is not None
        else None,
        transfers=[
            pb.TransferCost(
                peer=worker_key_to_pb(peer), latency_s=cost.latency_s, bytes_per_s=cost.bytes_per_s
            )
            for peer, cost in fits.transfers
        ],
    )


def fits_from_pb(message: pb.Fits, path: str = "fits") -> WorkerFits:
    """Raises InvalidMessageError: also for a cost that is negative or not finite."""
    if len(message.transfers) > _MAX_TRANSFERS:
        raise invalid(
            f"{path}.transfers", f"are {len(message.transfers)}; at most {_MAX_TRANSFERS}"
        )
    prefill: PrefillCost | None = None
    if message.HasField("prefill"):
        item, at = message.prefill, f"{path}.prefill"
        prefill = PrefillCost(
            base_s=_seconds(item.base_s, f"{at}.base_s"),
            per_token_s=_seconds(item.per_token_s, f"{at}.per_token_s"),
            per_work_s=_seconds(item.per_work_s, f"{at}.per_work_s"),
            max_step_tokens=between(
                item.max_step_tokens, f"{at}.max_step_tokens", low=1, high=_MAX_STEP_TOKENS
            ),
        )
    decode: DecodeCost | None = None
    if message.HasField("decode"):
        step, at = message.decode, f"{path}.decode"
        decode = DecodeCost(
            base_s=_seconds(step.base_s, f"{at}.base_s"),
            per_context_token_s=_seconds(step.per_context_token_s, f"{at}.per_context_token_s"),
            per_request_s=_seconds(step.per_request_s, f"{at}.per_request_s"),
        )
    return WorkerFits(
        prefill=prefill,
        decode=decode,
        transfers=tuple(
            (
                worker_key_from_pb(transfer.peer, f"{path}.transfers[{index}].peer"),
                TransferCost(
                    latency_s=_seconds(transfer.latency_s, f"{path}.transfers[{index}].latency_s"),
                    bytes_per_s=finite(
                        transfer.bytes_per_s,
                        f"{path}.transfers[{index}].bytes_per_s",
                        low=1e-9,
                        high=1e18,
                    ),
                ),
            )
            for index, transfer in enumerate(message.transfers)
        ),
    )


def _seconds(value: float, path: str) -> float:
    return finite(value, path, low=0.0, high=_MAX_S)
