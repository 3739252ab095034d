"""What a store's decisions cost: puts and gets of 400 blocks in an arena that is full.

    python tests/bench/bench_store_core.py

Each put is of a new chain, so 400 blocks are evicted for it; each get is of a chain in HOST, or of one on
DISK, for which 400 are evicted as well. Times are CPU time of the thread, the median and the worst of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.core.protocol import FetchEnded, LockPrefix, UnlockPrefix
from moonpool.ids import BlockHash
from moonpool.kv.eviction import EvictionName
from moonpool.tiering.config import TenantQuota
from moonpool.tiering.protocol import LoadBlocks, Put, StoreCommand, StoreFrame, WriteBlocks
from moonpool.tiering.store_core import StoreCore
from support.kv import make_chain
from support.store import BLOCK_SIZE, attempt, loaded, make_config, written

NUM_BLOCKS = 20_000
NUM_CHAIN_BLOCKS = 400
NUM_ROUNDS = 100


class _Timed:
    """A core whose commands are timed by what they are."""

    def __init__(self, eviction: EvictionName, num_tenants: int) -> None:
        tenants = tuple(TenantQuota(tenant=f"t{i}", floor_blocks=10) for i in range(num_tenants))
        self.core = StoreCore(
            make_config(
                NUM_BLOCKS, eviction=eviction, tenants=tenants, has_disk=True, is_checked=False
            )
        )
        self.times_ms: dict[str, list[float]] = defaultdict(list)

    def say(self, what: str, *commands: StoreCommand) -> StoreFrame:
        begun = time.thread_time()
        for command in commands:
            self.core.handle(command, 0.0)
        frame = self.core.take_frame()
        self.times_ms[what].append((time.thread_time() - begun) * 1e3)
        return frame

    def put(self, number: int, tenant: str, hashes: tuple[BlockHash, ...]) -> None:
        attempt_id = attempt(number)
        self.say("put", Put(attempt_id=attempt_id, tenant=tenant, hashes=hashes))
        num_tokens = len(hashes) * BLOCK_SIZE
        frame = self.say("put ended", FetchEnded(attempt_id=attempt_id, num_tokens=num_tokens))
        while writes := [work for work in frame.disk_work if isinstance(work, WriteBlocks)]:
            frame = self.say("written", *map(written, writes))

    def get(self, number: int, hashes: tuple[BlockHash, ...]) -> None:
        frame = self.say("get", LockPrefix(read_id=number, hashes=hashes))
        loads = [work for work in frame.disk_work if isinstance(work, LoadBlocks)]
        where = "DISK" if loads else "HOST"
        self.times_ms[f"get from {where}"].append(self.times_ms["get"].pop())
        for load in loads:
            self.say("loaded", loaded(load))
        self.say("unlock", UnlockPrefix(read_id=number))


def main() -> None:
    for eviction in EvictionName:
        for num_tenants in (0, 64):
            _run(eviction, num_tenants)


def _run(eviction: EvictionName, num_tenants: int) -> None:
    timed = _Timed(eviction, num_tenants)
    num_fill = NUM_BLOCKS // NUM_CHAIN_BLOCKS
    chains = [
        tuple(make_chain(range(i * 1_000, i * 1_000 + NUM_CHAIN_BLOCKS)))
        for i in range(num_fill + 2 * NUM_ROUNDS)
    ]
    for number, hashes in enumerate(chains):
        if number == num_fill:
            timed.times_ms.clear()
        timed.put(number, f"t{number % num_tenants}" if num_tenants else "", hashes)
        if number >= num_fill:
            timed.get(number, hashes)
    for number in range(NUM_ROUNDS):
        timed.get(1_000_000 + number, chains[number])
    print(f"{eviction.value}, {num_tenants} quotas, ms of {NUM_CHAIN_BLOCKS} blocks")
    del timed.times_ms["get"]
    for what, times_ms in timed.times_ms.items():
        print(
            f"    {what:16} median {statistics.median(times_ms):6.2f}  worst {max(times_ms):6.2f}"
        )


if __name__ == "__main__":
    main()
