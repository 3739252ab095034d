"""Builders for KV blocks: namespaces, chains, requests' blocks."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_hash import ModelNamespace, Namespace, hash_blocks, namespace_seed

SECRET = b"a secret of the test cluster"


def make_model_namespace(
    *,
    model_fingerprint: str = "0123abcd",
    compute_dtype: str = "float32",
    kv_dtype: str = "float32",
    kv_scales_digest: str = "",
    block_size: int = 16,
) -> ModelNamespace:
    return ModelNamespace(
        model_fingerprint=model_fingerprint,
        compute_dtype=compute_dtype,
        kv_dtype=kv_dtype,
        kv_scales_digest=kv_scales_digest,
        block_size=block_size,
    )


def make_namespace(
    *,
    model: ModelNamespace | None = None,
    tenant: str = "default",
    cache_salt: str = "",
    adapter: str = "",
) -> Namespace:
    return Namespace(
        model=model or make_model_namespace(),
        tenant=tenant,
        cache_salt=cache_salt,
        adapter=adapter,
    )


_SEED = namespace_seed(make_namespace(), SECRET)


def make_chain(tokens: Sequence[int] | str) -> list[BlockHash]:
    """One block per token; letters stand for tokens, so that "abc" and "abd" share two blocks."""
    token_ids = [ord(token) if isinstance(token, str) else token for token in tokens]
    return hash_blocks(_SEED, token_ids, 1)


def colliding(hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """Other hashes with the same keys: what nobody can find, but chance might bring."""
    return [BlockHash(one[:8] + bytes(byte ^ 0xFF for byte in one[8:])) for one in hashes]


def hold(cache: BlockCache, tokens: str) -> tuple[BlockId, ...]:
    """What a request does with the chain of `tokens`; returns its blocks."""
    return hold_chain(cache, make_chain(tokens))


def hold_chain(cache: BlockCache, chain: Sequence[BlockHash]) -> tuple[BlockId, ...]:
    """Match, acquire, allocate the rest, insert. Returns the blocks."""
    matched = cache.match_prefix(chain).block_ids
    cache.acquire(matched)
    block_ids = matched + cache.allocate(len(chain) - len(matched))
    cache.insert(chain, block_ids)
    return block_ids
