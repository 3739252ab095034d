"""ApiKeys: who may come in by a key, as which tenant, and who may ask about the cluster itself.

Keys are held as digests. A key that is given is compared with all of them in constant time, so the time
that it takes says nothing about how close it was. Nothing here shows a key or a digest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import Self

from moonpool.inference.request import DEFAULT_TENANT


def key_digest(key: bytes) -> bytes:
    """SHA-256: what a configuration may hold in place of the key."""
    return hashlib.sha256(key).digest()


class ApiKeys:
    """At least one key.

    Args:
        tenant_by_digest: By `key_digest`.
        operators: The digests among them of those who run the cluster.
    """

    def __init__(
        self, tenant_by_digest: Mapping[bytes, str], *, operators: Collection[bytes] = ()
    ) -> None:
        assert tenant_by_digest, "without a key nobody could come in"
        assert set(operators) <= set(tenant_by_digest), "an operator has a tenant, too"
        self._tenant_by_digest = dict(tenant_by_digest)
        self._operators = tuple(operators)

    @classmethod
    def single(cls, key: str) -> Self:
        """One key, of the default tenant and an operator."""
        digest = key_digest(key.encode())
        return cls({digest: DEFAULT_TENANT}, operators=(digest,))

    def tenant_of(self, key: bytes | None) -> str | None:
        """Whose key it is; None if there is none, or nobody has it."""
        if key is None:
            return None
        given = key_digest(key)
        found = None
        for digest, tenant in self._tenant_by_digest.items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found

    def is_operator(self, key: bytes | None) -> bool:
        """Whether it is the key of somebody who runs the cluster."""
        if key is None:
            return False
        given = key_digest(key)
        found = False
        for digest in self._operators:
            found |= hmac.compare_digest(given, digest)
        return found
