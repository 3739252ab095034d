"""Who may join: cluster secret and model namespace. A difference is said in words.

(The protocol's version is checked where a hello is decoded, see wire/worker.py; layouts where the copy
plan is made, see kv/layout.py.)
"""

from __future__ import annotations

import hashlib

from moonpool.errors import FailedPreconditionError
from moonpool.kv.block_hash import ModelNamespace, Namespace, differences, namespace_seed


class IncompatiblePeerError(FailedPreconditionError):
    """A router or worker whose requests or KV this worker must not take."""

    default_code = "incompatible_peer"


def check_secret(peer: str, theirs: str, ours: str) -> None:
    """Refuse another cluster's processes.

    Raises:
        IncompatiblePeerError: With both fingerprints, which give nothing away.
    """
    if theirs != ours:
        raise IncompatiblePeerError(
            f"{peer} has another cluster secret (fingerprint {theirs or 'none'} != {ours}): "
            "give both the same data directory, or copy cluster.secret.",
            code="incompatible_secret",
        )


def check_namespace(peer: str, theirs: ModelNamespace, ours: ModelNamespace) -> None:
    """Refuse a peer whose KV would have other values.

    Raises:
        IncompatiblePeerError: Names each field that differs, theirs != ours.
    """
    found = differences(theirs, ours)
    if found:
        raise IncompatiblePeerError(
            f"{peer} and this worker do not compute the same KV: {'; '.join(found)}.",
            code="incompatible_namespace",
        )


def handoff_fingerprint(model: ModelNamespace, secret: bytes) -> str:
    """What both ends of a handoff compare: hex digits of namespace and secret, of no use to others."""
    seed = namespace_seed(Namespace(model=model, tenant=""), secret)
    return hashlib.sha256(b"moonpool handoff 1" + seed).hexdigest()[:32]
