"""Shares: which part of the arena each tenant uses, may count on, and may not exceed.

A tenant with a quota has a share of its own; all others have one together, share 0, with neither floor nor
limit. A block belongs to the share that brought it, from allocation until it is free.

    for whom a block is needed      from whose blocks it may be taken
    share s                         any of s; of others, what they hold above their floor
    nobody (high-water mark)        what anyone holds above its floor

So no flood pushes a tenant below its floor, and what nobody has reserved belongs to whoever uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import xxhash

from moonpool.tiering.config import TenantQuota
from moonpool.tiering.protocol import TenantUse

#: Index of a share.
Share = NewType("Share", int)

#: Of tenants without a quota, and of blocks of which nobody knows whose they are.
COMMON = Share(0)


def tenant_tag(tenant: str) -> int:
    """64 bits that stand for a tenant on disk; 0 for none, and for all those without a quota."""
    return xxhash.xxh3_64_intdigest(tenant.encode()) if tenant else 0


class Shares:
    """The books of all shares; HostTier writes them."""

    def __init__(self, quotas: Sequence[TenantQuota]) -> None:
        self._quotas = (TenantQuota(tenant=""), *quotas)
        self._by_tenant = {
            quota.tenant: Share(index) for index, quota in enumerate(self._quotas) if index
        }
        assert len(self._by_tenant) == len(quotas), f"a tenant has two quotas: {quotas}"
        self._by_tag = {tenant_tag(tenant): share for tenant, share in self._by_tenant.items()}
        #: Blocks that are not free, by share.
        self.num_used = [0] * len(self._quotas)
        #: Of these, how many may be evicted.
        self.num_evictable = [0] * len(self._quotas)

    def __len__(self) -> int:
        return len(self._quotas)

    def of(self, tenant: str) -> Share:
        return self._by_tenant.get(tenant, COMMON)

    def of_tag(self, tag: int) -> Share:
        """Of a tenant by its `tenant_tag`."""
        return self._by_tag.get(tag, COMMON)

    def tenant(self, share: Share) -> str:
        """Whose it is; empty: of all those without a quota."""
        return self._quotas[share].tenant

    def may_lose(self, share: int, asker: Share | None, num_lost: int) -> bool:
        """Whether one more block of `share` may go for `asker`, after `num_lost`."""
        return share == asker or self.num_used[share] - num_lost > self._quotas[share].floor_blocks

    def num_available(self, asker: Share | None, num_free: int) -> int:
        """How many blocks `asker` can be given, by the floors of others; its own limit is another matter."""
        num_available = num_free
        for share, quota in enumerate(self._quotas):
            num_evictable = self.num_evictable[share]
            if share != asker:
                num_above_floor = max(self.num_used[share] - quota.floor_blocks, 0)
                num_evictable = min(num_evictable, num_above_floor)
            num_available += num_evictable
        return num_available

    def num_allowed(self, asker: Share) -> int | None:
        """How many more blocks the asker's limit allows if it gives up its evictable ones; None: any."""
        max_blocks = self._quotas[asker].max_blocks
        if max_blocks is None:
            return None
        return max(max_blocks - self.num_used[asker] + self.num_evictable[asker], 0)

    def num_over(self, asker: Share, num_blocks: int) -> int:
        """How many of its own blocks the asker has to give up to have so many more."""
        max_blocks = self._quotas[asker].max_blocks
        return 0 if max_blocks is None else max(self.num_used[asker] + num_blocks - max_blocks, 0)

    def uses(self) -> tuple[TenantUse, ...]:
        """What each share holds, share 0 first."""
        return tuple(
            TenantUse(
                tenant=quota.tenant,
                num_blocks=num_used,
                floor_blocks=quota.floor_blocks,
                max_blocks=quota.max_blocks,
            )
            for quota, num_used in zip(self._quotas, self.num_used, strict=True)
        )
