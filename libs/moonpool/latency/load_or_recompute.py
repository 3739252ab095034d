"""Load or recompute: what reading a prefix from a peer takes, and what computing it would.

What is weighed is only what differs: reading the tokens between those that lie here and those that the
peer holds, against computing them. The rest of the prompt is computed either way, behind both.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.latency.costs import PrefillCost, TransferCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrRecompute:
    """Both sides of the choice."""

    load_s: float
    #: What computing them would take, the rest of the prompt being computed either way.
    recompute_s: float


def load_or_recompute(
    prefill: PrefillCost,
    transfer: TransferCost,
    *,
    num_tokens: int,
    num_cached_tokens: int,
    num_peer_tokens: int,
    bytes_per_token: int,
) -> LoadOrRecompute:
    """Weigh it for a prompt of `num_tokens`, of whose leading tokens some lie here, more at a peer.

    Args:
        num_cached_tokens: Leading tokens that lie here.
        num_peer_tokens: Leading tokens that the peer is believed to hold, below `num_tokens`.
    """
    num_read_tokens = max(min(num_peer_tokens, num_tokens - 1) - num_cached_tokens, 0)
    num_after_load = num_tokens - num_cached_tokens - num_read_tokens
    recompute_s = prefill.predict(num_tokens - num_cached_tokens, num_cached_tokens)
    recompute_s -= prefill.predict(num_after_load, num_tokens - num_after_load)
    load_s = transfer.predict(num_read_tokens * bytes_per_token)
    return LoadOrRecompute(load_s=load_s, recompute_s=recompute_s)
