"""LogIdentity: what the blocks of a directory are. Blocks of another identity are never read.

It holds what a reader relies on and cannot see in the bytes: the model (its hashes are over the same
prompts, its values are others), the order and number of the values, what the digests are made with, and
the secret that keys the hashes (with another one nothing would ever be found).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvLayout

_SCHEME = "moonpool segment log 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """Compared as a whole, by `digest`."""

    model: ModelNamespace
    #: Of the arena, block-major: a block is one run of it. The number of blocks does not count.
    layout: KvLayout
    #: kv.digest.DigestKind.
    digest_kind: str
    #: kv.block_hash.secret_fingerprint of the cluster's secret.
    secret_fingerprint: str

    def __post_init__(self) -> None:
        (group,) = self.layout.groups
        if group.block_stride_bytes != self.layout.block_bytes:
            raise ValueError("a block is not one run of this layout")

    @property
    def block_layout(self) -> KvLayout:
        """The layout of one block on its own."""
        return dataclasses.replace(self.layout, num_blocks=1)

    def describe(self) -> str:
        """All of it as JSON, keys in order: for people, and for `digest`."""
        fields = {
            "scheme": _SCHEME,
            "model": dataclasses.asdict(self.model),
            "layout": dataclasses.asdict(self.block_layout),
            "digest_kind": self.digest_kind,
            "secret_fingerprint": self.secret_fingerprint,
        }
        return json.dumps(fields, indent=1, sort_keys=True)

    @property
    def digest(self) -> bytes:
        """16 bytes: in every record, and in hex the name of the identity's folder."""
        return hashlib.sha256(self.describe().encode()).digest()[:16]
