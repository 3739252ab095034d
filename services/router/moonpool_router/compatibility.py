"""Whether a worker fits this router: the same cluster secret, the same model, KV with the same values.

A router knows its model's fingerprint; what else is in a namespace (block size, dtypes) it learns from
the first worker that joins, and holds the others to it for as long as one of them lives.
"""

from __future__ import annotations

from moonpool.kv.block_hash import ModelNamespace, differences
from moonpool.wire.worker import WorkerHello


class Compatibility:
    """Compares hellos; remembers the namespace that the cluster has."""

    def __init__(self, *, model_fingerprint: str, secret_fingerprint: str) -> None:
        self._model_fingerprint = model_fingerprint
        self._secret_fingerprint = secret_fingerprint
        self._namespace: ModelNamespace | None = None

    @property
    def namespace(self) -> ModelNamespace | None:
        """What joined workers have in common; None while there is none."""
        return self._namespace

    def adopt(self, namespace: ModelNamespace) -> None:
        """A worker with this namespace has joined."""
        self._namespace = namespace

    def release(self) -> None:
        """No worker is joined any more: the next may bring another namespace."""
        self._namespace = None

    def incompatibility(self, hello: WorkerHello) -> str:
        """Why this worker may not join, in words; empty if it may."""
        found = []
        if hello.secret_fingerprint != self._secret_fingerprint:
            found.append(
                f"cluster secret: {hello.secret_fingerprint or 'none'} there, "
                f"{self._secret_fingerprint} here (give both the same data directory, or copy "
                "cluster.secret)"
            )
        if hello.namespace.model_fingerprint != self._model_fingerprint:
            found.append(
                f"model: {hello.model} {hello.namespace.model_fingerprint[:16]} there, "
                f"{self._model_fingerprint[:16]} here"
            )
        elif self._namespace is not None:
            found += differences(hello.namespace, self._namespace)
        return "; ".join(found)
