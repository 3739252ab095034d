"""RoomCheck: refuse a Decode for which the core cannot have room, without waiting for its step to end.

What the service knows is the last frame's ledger and the published set. What it may say by itself is only
what the core would say in that state. Left to the core are: a request that might have younger
reservations revoked, so that the oldest always advances; one that never fits; and one without a source,
which is queued, and may be promised blocks that somebody else is about to make.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.protocol import BlockLedger
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import NamespaceSeed, hash_blocks
from moonpool.kv.block_key import KeyArray, block_keys


class RoomCheck:
    """Pure but for what `num_held` looks up.

    Args:
        namespace_seed: The start of a request's hash chain, as the core has it.
        num_held: How many leading blocks of a chain the worker's cache holds.
        max_model_len: Longest prompt + answer.
    """

    def __init__(
        self,
        *,
        namespace_seed: Callable[[InferenceRequest], NamespaceSeed],
        num_held: Callable[[KeyArray], int],
        block_size: int,
        max_model_len: int,
    ) -> None:
        self._namespace_seed = namespace_seed
        self._num_held = num_held
        self._block_size = block_size
        self._max_model_len = max_model_len

    def is_hopeless(self, request: InferenceRequest, ledger: BlockLedger) -> bool:
        """Whether a Decode with a source lacks more blocks for prompt + emitted than could be had."""
        num_available = ledger.num_free + ledger.num_cached
        num_needed = -(-request.num_tokens // self._block_size)
        if num_needed <= num_available or self._never_fits(request, ledger):
            return False
        if ledger.num_reserved or ledger.num_quarantined:
            return False
        hashes = hash_blocks(self._namespace_seed(request), request.token_ids, self._block_size)
        return num_needed - self._num_held(block_keys(hashes)) > num_available

    def _never_fits(self, request: InferenceRequest, ledger: BlockLedger) -> bool:
        max_num_tokens = min(
            len(request.prompt_token_ids) + request.sampling.max_tokens, self._max_model_len
        )
        is_too_long = request.num_tokens >= max_num_tokens
        return is_too_long or max_num_tokens - 1 > ledger.num_total * self._block_size
