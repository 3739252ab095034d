"""NamespaceSeeds: from a request to the start of its block hash chain, remembered."""

from __future__ import annotations

from collections import OrderedDict

from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace, Namespace, NamespaceSeed, namespace_seed

#: Tenants times salts times adapters that are live at once; each costs 200 bytes.
_MAX_SEEDS = 4_096


class NamespaceSeeds:
    """Callable: the seed of a request's tenant, salt and adapter.

    Args:
        model: The worker's own part of the namespace.
        secret: The cluster's, which keys the seeds.
    """

    def __init__(self, model: ModelNamespace, secret: bytes) -> None:
        self._model = model
        self._secret = secret
        self._seeds: OrderedDict[tuple[str, str, str], NamespaceSeed] = OrderedDict()

    def __call__(self, request: InferenceRequest) -> NamespaceSeed:
        key = (request.tenant, request.cache_salt, request.adapter)
        seed = self._seeds.get(key)
        if seed is None:
            seed = namespace_seed(
                Namespace(
                    model=self._model,
                    tenant=request.tenant,
                    cache_salt=request.cache_salt,
                    adapter=request.adapter,
                ),
                self._secret,
            )
            self._seeds[key] = seed
            if len(self._seeds) > _MAX_SEEDS:
                self._seeds.popitem(last=False)
        return seed
