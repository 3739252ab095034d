"""StoreCore against a world that is kept naively: an arena whose contents are written down, a disk that fails.

The world does what a store's service does: it reads for puts, loads and writes, in any order and as badly as it
likes, and looks at what readers would see. It knows nothing of how the core decides; it knows what must be true:

    what is lent holds what was asked for, and goes on holding it until the reader is gone
    what is read, loaded or written belongs to whoever does that until it has ended
    what is published lies in the arena or on the disk; what is withdrawn lies in neither
    a put wants exactly the first run of what is neither published nor on its way, while the disk is well
    a get is told the whole leading run that is published, or counts as short
    nobody's flood pushes a tenant below its floor
    when all has ended, nothing is held
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.core.protocol import (
    Abort,
    BlocksFetched,
    ClearCache,
    Drain,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    PrefixLocked,
    ReadEnded,
    Revoked,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, BlockHash, BlockId
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from moonpool.kv.eviction import EvictionName
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.config import DiskAdmission, TenantQuota
from moonpool.tiering.protocol import (
    NOT_IN_ARENA,
    BlocksLoaded,
    BlocksWritten,
    ClearDisk,
    DiskDropped,
    DropBlocks,
    LoadBlocks,
    Pin,
    PinKind,
    Put,
    StoreCommand,
    Unpin,
    WriteBlocks,
)
from moonpool.tiering.store_core import StoreCore
from support.store import BLOCK_BYTES, BLOCK_SIZE, attempt, chain, found, make_config

#: Few of them, so that they come again and share beginnings.
_CHAINS = st.builds(
    lambda tokens, length: tokens[:length],
    st.sampled_from(["aaaaaaa", "aaaabbb", "aabbbbb", "bbbbbbb"]),
    st.integers(1, 7),
)
_TORN = None
_TENANTS = ("", "small", "large")


class StoreMachine(RuleBasedStateMachine):
    """See the file's head."""

    @initialize(
        num_blocks=st.sampled_from([1, 4, 7, 9, 12]),
        eviction=st.sampled_from(EvictionName),
        admission=st.sampled_from([DiskAdmission.ALL, *DiskAdmission]),
        has_disk=st.sampled_from([True, True, False]),
        high_water=st.sampled_from([1.0, 0.9, 0.5]),
        max_puts=st.sampled_from([3, 1]),
        budget=st.sampled_from([None, 12 * 5 * BLOCK_BYTES, 0]),
        scanned=_CHAINS,
    )
    def begin(
        self,
        num_blocks: int,
        eviction: EvictionName,
        admission: DiskAdmission,
        has_disk: bool,
        high_water: float,
        max_puts: int,
        budget: int | None,
        scanned: str,
    ) -> None:
        self.config = make_config(
            num_blocks,
            eviction=eviction,
            admission=admission,
            has_disk=has_disk,
            high_water=high_water,
            evict_share=0.1,
            max_puts=max_puts,
            max_load_blocks=2,
            max_write_blocks=2,
            put_timeout_s=30.0,
            write_budget_bytes_per_day=budget,
            tenants=(
                TenantQuota(tenant="small", floor_blocks=num_blocks // 3),
                TenantQuota(tenant="large", floor_blocks=1, max_blocks=max(num_blocks // 2, 1))
                if num_blocks > 1
                else TenantQuota(tenant="large"),
            ),
        )
        self.core = StoreCore(self.config)
        self.now = 0.0
        self.num_begun = 0
        self.is_draining = False
        #: By block: the hash whose values lie there; _TORN while somebody writes.
        self.arena: list[BlockHash | None] = [_TORN] * num_blocks
        self.disk: set[BlockHash] = set()
        self.published: set[BlockHash] = set()
        #: Puts that are read, and how many blocks of them are verified.
        self.reading: dict[AttemptId, FetchReserved] = {}
        self.come: dict[AttemptId, int] = {}
        #: Puts that were aborted or revoked, and whose reads may still write.
        self.ending: dict[AttemptId, FetchReserved] = {}
        self.asked: dict[int, tuple[BlockHash, ...]] = {}
        self.told: dict[int, PrefixLocked] = {}
        self.loads: list[LoadBlocks] = []
        self.writes: list[WriteBlocks] = []
        #: Of these, those that a clearing has overtaken.
        self.lost_writes: set[int] = set()
        self.pins: list[int] = []
        #: Chains that somebody may ask for.
        self.offered: list[tuple[BlockHash, ...]] = []
        #: What the scan found and the core was not told of.
        self.untold: list[BlockHash] = []
        if has_disk:
            self.offered.append(chain(scanned))
            self.disk |= set(chain(scanned))
            self.untold += chain(scanned)

    # -- talking --

    def say(self, command: StoreCommand) -> None:
        self.core.handle(command, self.now)
        self.take()

    def take(self) -> None:
        frame = self.core.take_frame()
        for event in frame.cache_events:
            match event:
                case AllBlocksCleared():
                    self.published.clear()
                case BlockRemoved(hashes=hashes):
                    assert self.published >= set(hashes)
                    self.published -= set(hashes)
                case BlockStored(hashes=hashes):
                    assert not self.published & set(hashes)
                    self.published |= set(hashes)
        for reply in frame.replies:
            match reply:
                case FetchReserved():
                    self.reading[reply.attempt_id], self.come[reply.attempt_id] = reply, 0
                    self.tear(self.targets(reply))
                case Revoked(attempt_id=attempt_id):
                    self.ending[attempt_id] = self.reading.pop(attempt_id)
                case PrefixLocked(read_id=read_id):
                    assert read_id in self.asked
                    self.told[read_id] = reply
                case _:
                    pass
        for work in frame.disk_work:
            match work:
                case LoadBlocks():
                    assert self.config.has_disk
                    self.loads.append(work)
                    self.tear([block_id for _, block_id in work.blocks])
                case WriteBlocks():
                    assert self.config.has_disk
                    self.writes.append(work)
                case DropBlocks(hashes=hashes):
                    self.disk -= set(hashes)
                case ClearDisk():
                    self.disk.clear()
                    self.lost_writes |= {write.write_id for write in self.writes}
        assert frame.ledger == self.core.ledger()

    def tear(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self.arena[block_id] = _TORN

    def targets(self, wanted: FetchReserved) -> tuple[BlockId, ...]:
        return wanted.block_ids[wanted.num_cached_tokens // BLOCK_SIZE :]

    def number(self) -> int:
        self.num_begun += 1
        return self.num_begun

    # -- puts --

    @rule(tokens=_CHAINS, tenant=st.sampled_from(_TENANTS))
    def offer(self, tokens: str, tenant: str) -> None:
        # A tenant's chains are its own, as its namespace makes them.
        hashes = chain(tenant + tokens)[len(tenant) :]
        attempt_id = attempt(self.number())
        self.offered.append(hashes)
        num_refused = self.num_refused()
        before = self.core.stats(self.now).tenants
        wanted = self.first_missing_run(hashes)
        # Else what lies on disk only is wanted too.
        is_disk_well = self.core.stats(self.now).disk_reads is BreakerState.CLOSED
        self.core.handle(Put(attempt_id=attempt_id, tenant=tenant, hashes=hashes), self.now)
        after = self.core.stats(self.now).tenants
        for old, new in zip(before, after, strict=True):
            if new.tenant != tenant and new.tenant:
                assert new.num_blocks >= min(old.num_blocks, old.floor_blocks), (old, new)
            if new.tenant == tenant and new.max_blocks is not None:
                assert new.num_blocks <= max(old.num_blocks, new.max_blocks), (old, new)
        self.core.validate()
        self.take()
        reserved = self.reading.get(attempt_id)
        if reserved is None:
            is_refused = self.num_refused() == num_refused + 1
            assert not wanted or not is_disk_well or is_refused
            return
        assert not self.is_draining
        first = reserved.num_cached_tokens // BLOCK_SIZE
        assert reserved.hashes == hashes[: reserved.num_tokens // BLOCK_SIZE]
        assert len(reserved.block_ids) == len(reserved.hashes)
        targets = self.targets(reserved)
        assert targets
        if is_disk_well:
            assert list(wanted)[: len(targets)] == list(range(first, first + len(targets)))
        assert NOT_IN_ARENA not in targets
        for block_hash, block_id in zip(hashes, reserved.block_ids[:first], strict=False):
            assert block_id == NOT_IN_ARENA or self.arena[block_id] == block_hash

    def first_missing_run(self, hashes: Sequence[BlockHash]) -> range:
        known = self.published | {h for load in self.loads for h, _ in load.blocks}
        for reserved in self.reading.values():
            known |= set(reserved.hashes[reserved.num_cached_tokens // BLOCK_SIZE :])
        positions = range(len(hashes))
        first = next((i for i in positions if hashes[i] not in known), len(hashes))
        end = next((i for i in positions[first:] if hashes[i] in known), len(hashes))
        return range(first, end)

    def num_refused(self) -> int:
        return sum(number for _, number in self.core.stats(self.now).num_refused_puts)

    @rule(tokens=_CHAINS, tenant=st.sampled_from(_TENANTS))
    def put(self, tokens: str, tenant: str) -> None:
        """Offer it and read all that is wanted."""
        self.offer(tokens, tenant)
        attempt_id = attempt(self.num_begun)
        if attempt_id in self.reading:
            self.bring(attempt_id, len(self.targets(self.reading[attempt_id])), is_end=True)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), is_end=st.booleans())
    def fetch(self, data: st.DataObject, is_end: bool) -> None:
        attempt_id = data.draw(st.sampled_from(list(self.reading)))
        num_targets = len(self.targets(self.reading[attempt_id]))
        come = data.draw(st.integers(self.come[attempt_id], num_targets))
        self.bring(attempt_id, come, is_end=is_end)

    def bring(self, attempt_id: AttemptId, come: int, *, is_end: bool) -> None:
        """So many blocks of a put are verified."""
        reserved = self.reading[attempt_id]
        targets = self.targets(reserved)
        first = len(reserved.hashes) - len(targets)
        for offset in range(self.come[attempt_id], come):
            self.arena[targets[offset]] = reserved.hashes[first + offset]
        self.come[attempt_id] = come
        num_tokens = (first + come) * BLOCK_SIZE
        if is_end:
            del self.reading[attempt_id]
            self.say(FetchEnded(attempt_id=attempt_id, num_tokens=num_tokens))
        else:
            self.say(BlocksFetched(attempt_id=attempt_id, num_tokens=num_tokens))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempt_id = data.draw(st.sampled_from(list(self.reading)))
        self.ending[attempt_id] = self.reading.pop(attempt_id)
        self.say(Abort(attempt_id=attempt_id))

    @precondition(lambda self: self.ending)
    @rule(data=st.data(), is_fetch_ended=st.booleans())
    def end_read(self, data: st.DataObject, is_fetch_ended: bool) -> None:
        attempt_id = data.draw(st.sampled_from(list(self.ending)))
        reserved = self.ending.pop(attempt_id)
        # Until now its reads may have written whatever was not verified.
        self.tear(self.targets(reserved)[self.come[attempt_id] :])
        if is_fetch_ended:
            self.say(FetchEnded(attempt_id=attempt_id, num_tokens=reserved.num_tokens))
        else:
            self.say(ReadEnded(attempt_id=attempt_id))

    # -- gets --

    @precondition(lambda self: self.offered)
    @rule(data=st.data(), length=st.sampled_from([7, 7, 4, 1]))
    def lock(self, data: st.DataObject, length: int) -> None:
        hashes = data.draw(st.sampled_from(self.offered))[:length]
        read_id = self.number()
        held = [block_hash in self.published for block_hash in hashes]
        num_held = held.index(False) if False in held else len(held)
        num_short = self.core.stats(self.now).num_short_gets
        self.asked[read_id] = hashes
        self.say(LockPrefix(read_id=read_id, hashes=hashes))
        if read_id in self.told and not self.is_draining:
            is_short = self.core.stats(self.now).num_short_gets > num_short
            num_told = len(self.told[read_id].block_ids)
            assert num_told == num_held or (is_short and num_told < num_held)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(list(self.asked)))
        del self.asked[read_id]
        self.told.pop(read_id, None)
        self.say(UnlockPrefix(read_id=read_id))

    # -- the disk --

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_whole=st.booleans(), is_bad=st.booleans())
    def load(self, data: st.DataObject, is_whole: bool, is_bad: bool) -> None:
        load = data.draw(st.sampled_from(self.loads))
        self.loads.remove(load)
        num_blocks = len(load.blocks)
        if not is_whole:
            num_blocks = data.draw(st.integers(0, num_blocks))
        there = [block_hash in self.disk for block_hash, _ in load.blocks]
        num_blocks = min(num_blocks, there.index(False) if False in there else len(there))
        for block_hash, block_id in load.blocks[:num_blocks]:
            self.arena[block_id] = block_hash
        bad = tuple(h for h, _ in load.blocks[num_blocks : num_blocks + 1] if is_bad)
        self.say(BlocksLoaded(load_id=load.load_id, num_blocks=num_blocks, bad_hashes=bad))
        assert not self.disk & set(bad) or not bad

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), is_whole=st.booleans())
    def write(self, data: st.DataObject, is_whole: bool) -> None:
        write = data.draw(st.sampled_from(self.writes))
        self.writes.remove(write)
        kept = []
        for block_hash, block_id in write.blocks:
            assert self.arena[block_id] == block_hash, "a block changed while it was written"
            if is_whole or block_hash in self.disk or data.draw(st.booleans()):
                kept.append(block_hash)
        if write.write_id not in self.lost_writes:
            self.disk |= set(kept)
        self.say(BlocksWritten(write_id=write.write_id, hashes=tuple(kept)))

    @precondition(lambda self: self.untold)
    @rule(num_blocks=st.integers(1, 4), tenant=st.sampled_from(("", *_TENANTS)))
    def tell_contents(self, num_blocks: int, tenant: str) -> None:
        part, self.untold = self.untold[:num_blocks], self.untold[num_blocks:]
        self.say(found([h for h in part if h in self.disk], tenant))

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        hashes = data.draw(st.lists(st.sampled_from(sorted(self.disk)), max_size=2))
        self.disk -= set(hashes)
        self.say(DiskDropped(hashes=tuple(hashes)))

    # -- the rest --

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 2.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.take()
        due = self.core.next_due()
        assert due is None or due > self.now

    @rule(
        tokens=_CHAINS,
        kind=st.sampled_from(PinKind),
        ttl_s=st.sampled_from([1.0, 100.0]),
    )
    def pin(self, tokens: str, kind: PinKind, ttl_s: float) -> None:
        self.pins.append(self.number())
        self.say(Pin(pin_id=self.pins[-1], kind=kind, hashes=chain(tokens), ttl_s=ttl_s))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.say(Unpin(pin_id=data.draw(st.sampled_from(self.pins))))

    @precondition(lambda self: self.num_begun % 8 == 7)
    @rule()
    def clear(self) -> None:
        self.untold.clear()
        self.say(ClearCache())
        if self.core.ledger().is_quiet:
            assert not self.published
            assert self.core.ledger().num_cached == 0

    @precondition(lambda self: self.num_begun % 25 == 24)
    @rule(hand_back=st.booleans())
    def drain(self, hand_back: bool) -> None:
        self.is_draining = True
        self.say(Drain(hand_back=hand_back))
        assert not (hand_back and self.reading)

    # -- what must be true --

    @invariant()
    def what_is_lent_is_what_was_asked_for(self) -> None:
        for read_id, reply in getattr(self, "told", {}).items():
            lent = [self.arena[block_id] for block_id in reply.block_ids]
            assert lent == list(self.asked[read_id][: len(lent)])

    @invariant()
    def what_is_published_is_somewhere(self) -> None:
        if hasattr(self, "core"):
            assert self.published <= set(self.arena) | self.disk
            assert self.published >= self.disk - set(self.untold)

    @invariant()
    def nobody_uses_what_another_writes(self) -> None:
        if not hasattr(self, "core"):
            return
        owned = [b for load in self.loads for _, b in load.blocks]
        owned += [b for wanted in self.reading.values() for b in self.targets(wanted)]
        owned += [b for wanted in self.ending.values() for b in self.targets(wanted)]
        assert len(owned) == len(set(owned))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for read_id in list(self.asked):
            self.say(UnlockPrefix(read_id=read_id))
        for attempt_id in list(self.reading):
            self.say(Abort(attempt_id=attempt_id))
            self.say(ReadEnded(attempt_id=attempt_id))
        for attempt_id in list(self.ending):
            self.say(ReadEnded(attempt_id=attempt_id))
        while self.loads or self.writes:
            for load in self.loads:
                self.core.handle(BlocksLoaded(load_id=load.load_id, num_blocks=0), self.now)
            for write in self.writes:
                self.core.handle(BlocksWritten(write_id=write.write_id, hashes=()), self.now)
            self.loads, self.writes = [], []
            self.take()
        self.core.validate()
        ledger = self.core.ledger()
        assert ledger.is_quiet, ledger


StoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStoreCore = StoreMachine.TestCase
