"""StoreConfig: the limits that a StoreCore enforces."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from moonpool.kv.eviction import EvictionName
from moonpool.tiering.breaker import BreakerConfig
from moonpool.tiering.write_budget import BudgetLeft


class DiskAdmission(enum.StrEnum):
    """Which blocks are written to disk, as operators name it. Nothing is ever written beyond the budget."""

    #: Every block, while the budget lasts.
    ALL = "all"
    #: What has been seen twice.
    SECOND_HIT = "second_hit"
    #: Every block while at least half of what may be written at a time is left; the less is left, the more
    #: often a block must have been seen.
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """What one tenant may count on, and at most hold, of the arena. The others share the rest."""

    tenant: str
    #: Nobody else's blocks push it below this.
    floor_blocks: int = 0
    #: It holds at most this; None: whatever the others leave.
    max_blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Validated in config/; here only asserted."""

    #: Blocks of the arena.
    num_blocks: int
    #: Tokens of a block.
    block_size: int = 16
    #: What one block costs on disk, its leaves included.
    block_bytes: int
    #: There is a log under the arena; without one no disk work is asked for.
    has_disk: bool = False

    #: Which block goes first when the arena is full.
    eviction: EvictionName = EvictionName.LFU_AGED
    #: Eviction starts when more than this part of the arena is in use; 1: only when a block is needed.
    high_water: float = 0.99
    #: Then it goes on until at least this part more is free.
    evict_share: float = 0.01
    #: The sum of floors is at most `num_blocks`. At most 64: the unnamed share one quota.
    tenants: tuple[TenantQuota, ...] = ()
    #: At most this part of the arena may be pinned hard.
    max_hard_pin_share: float = 0.5

    #: Puts that are read at the same time, in all and for one tenant.
    max_puts: int = 32
    max_puts_per_tenant: int = 16
    #: Most blocks that one put brings.
    max_put_blocks: int = 4096
    #: A put that has not ended by then is revoked: whoever offered it is gone.
    put_timeout_s: float = 30.0

    #: Blocks of one LoadBlocks, and of all at the same time.
    max_load_blocks: int = 32
    max_loading_blocks: int = 512
    #: The part of the arena that is loaded into ahead of gets, at most, and not asked for since.
    ahead_share: float = 0.25
    #: A get that waits for the disk is told by then of what lies in the arena; the rest is loaded all the
    #: same. A reader waits for its lock 2 s at most (handoff/config.py).
    load_patience_s: float = 1.0

    #: Blocks of one WriteBlocks, and how many of these are out at the same time.
    max_write_blocks: int = 32
    max_writes: int = 2
    admission: DiskAdmission = DiskAdmission.BUDGET
    #: Nothing more is written in any 24 hours; None: no budget.
    write_budget_bytes_per_day: int | None = None
    #: None: this is the first life of the store, as far as anybody knows.
    write_budget_left: BudgetLeft | None = None

    #: For the disk's reads and, apart from them, its writes. Nobody is told of a disk that fails but by this:
    #: its failures come one by one, as slowly as it is.
    disk_breaker: BreakerConfig = field(default_factory=lambda: BreakerConfig(within_s=10.0))

    #: Run validate() after every command (tests, debugging).
    is_checked: bool = False

    def __post_init__(self) -> None:
        assert 0.0 < self.high_water <= 1.0, self.high_water
        assert 0.0 <= self.evict_share < 1.0, self.evict_share
        assert min(self.num_blocks, self.block_size, self.block_bytes) > 0, self
        assert 0.0 <= self.ahead_share <= 1.0, self.ahead_share
        assert min(self.max_load_blocks, self.max_write_blocks, self.max_writes) > 0, self
        floors = sum(quota.floor_blocks for quota in self.tenants)
        assert floors <= self.num_blocks, (floors, self.num_blocks)
