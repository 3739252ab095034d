"""Block identity: what the values of a full KV block are, never where the bytes lie.

    seed  = HMAC-SHA256(cluster secret, namespace)
    h[0]  = SHA-256(seed   || tokens of block 0)
    h[i]  = SHA-256(h[i-1] || tokens of block i)         tokens: raw little-endian uint32, full blocks only

Rules
- The namespace holds everything that changes the values. Two blocks with one hash have one content.
- A hash names its whole prefix: chains that agree at i agree at all places before i.
- Keyed by the cluster's secret, so that nobody outside can compute, or probe for, a prompt's hashes.
- The scheme is part of what is stored and sent; `_SCHEME` changes with it, and a test pins a vector.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NewType

from moonpool.ids import BlockHash

#: 32 bytes: where the hash chains of one namespace begin.
NamespaceSeed = NewType("NamespaceSeed", bytes)

_TOKEN_BYTES = 4
_SCHEME = "moonpool block hash 1"
_SECRET_FINGERPRINT_SCHEME = b"moonpool secret fingerprint 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNamespace:
    """The part of a namespace that a worker has: compared when it joins, field by field."""

    #: Hex digest over the configuration as loaded and the weight files.
    model_fingerprint: str
    #: What the model computes in; another one gives other KV values.
    compute_dtype: str
    kv_dtype: str
    #: Hex digest over the scales of a quantised KV cache; empty for none.
    kv_scales_digest: str = ""
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that changes the values of a block, besides its tokens."""

    model: ModelNamespace
    tenant: str
    #: Narrows the tenant's namespace; empty for its common one.
    cache_salt: str = ""
    #: Name and revision of a LoRA adapter; empty for none.
    adapter: str = ""


def differences(a: ModelNamespace, b: ModelNamespace) -> list[str]:
    """What keeps two workers from sharing KV, one `field: a's value != b's value` each."""
    return [
        f"{field.name}: {getattr(a, field.name)} != {getattr(b, field.name)}"
        for field in fields(ModelNamespace)
        if getattr(a, field.name) != getattr(b, field.name)
    ]


def namespace_seed(namespace: Namespace, secret: bytes) -> NamespaceSeed:
    """The start of the namespace's chains. Compute it once per namespace.

    Raises:
        ValueError: the secret is empty.
    """
    _check_secret(secret)
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    values = [_SCHEME]
    values += [str(getattr(namespace.model, field.name)) for field in fields(ModelNamespace)]
    values += [namespace.tenant, namespace.cache_salt, namespace.adapter]
    for value in values:
        encoded = value.encode()
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        mac.update(len(encoded).to_bytes(4, "little"))
        mac.update(encoded)
    return NamespaceSeed(mac.digest())


def secret_fingerprint(secret: bytes) -> str:
    """16 hex digits that tell whether two processes have one secret, without giving it away.

    Raises:
        ValueError: the secret is empty.
    """
    _check_secret(secret)
    return hmac.new(secret, _SECRET_FINGERPRINT_SCHEME, hashlib.sha256).hexdigest()[:16]


def hash_blocks(
    seed: NamespaceSeed,
    token_ids: Sequence[int],
    block_size: int,
    parent: BlockHash | None = None,
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`; tokens of a last partial block are left out.

    With `parent`, the hash of the block before `token_ids[0]`, the chain goes on from there: that is
    how it grows with an answer.

    Raises:
        ValueError: a token id does not fit 32 bits unsigned.
    """
    num_blocks = len(token_ids) // block_size
    num_tokens = num_blocks * block_size
    try:
        raw = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    except struct.error as error:
        raise ValueError(f"a token id is not a 32-bit unsigned number: {error}") from error
    num_bytes = block_size * _TOKEN_BYTES
    sha256 = hashlib.sha256
    previous: bytes = parent if parent is not None else seed
    hashes: list[BlockHash] = []
    for start in range(0, len(raw), num_bytes):
        previous = sha256(previous + raw[start : start + num_bytes]).digest()
        hashes.append(BlockHash(previous))
    return hashes


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise ValueError("the cluster secret is empty")
