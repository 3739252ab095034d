"""Puts: chains that a store reads from the workers that offer them.

    state        event                                  effects and next state
    -            Put, draining, too many, or no room    PutAnswered(refusal)                    -> ended
    -            Put, all is here or on its way         PutAnswered(0)                          -> ended
    -            Put                                    PutAnswered(n), FetchReserved           -> READING
    READING      BlocksFetched                          what is verified is findable            -> READING
    READING      FetchEnded                             so is the rest of it; the others go     -> ended
    READING      time is up, Drain(hand_back)           Revoked                                 -> QUARANTINED
    READING      Abort                                                                          -> QUARANTINED
    QUARANTINED  ReadEnded or FetchEnded                its blocks are released                 -> ended

Rules
- A block comes once: what is here, in either tier, or is read for another put or from the disk is not
  wanted. If that fails, the next offer of the chain finds it missing.
- What lies on disk only is wanted all the same while the disk cannot be read.
- A put wants one run of its chain, from the first missing block on. There is a second one only where a
  chain has a hole, and then it is worth nothing before the first.
- The blocks before it that lie in HOST are held for as long, so the put is a use of them too.
- Blocks are freed only when no read is outstanding, whatever has become of the put.
- Nobody waits while holding blocks: what there is no room for now is not taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.core.protocol import FetchReserved, Revoked
from moonpool.ids import AttemptId, BlockHash, BlockId
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.catalogue import Catalogue
from moonpool.tiering.config import StoreConfig
from moonpool.tiering.frame_builder import StoreFrameBuilder
from moonpool.tiering.gets import Gets
from moonpool.tiering.protocol import NOT_IN_ARENA, Put, PutAnswered, PutRefusal
from moonpool.tiering.shares import Share, Shares


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One put that is read."""

    attempt_id: AttemptId
    tenant: str
    #: The chain up to the last block that is wanted.
    hashes: tuple[BlockHash, ...]
    #: How many blocks of it stand before the first that is wanted.
    first: int
    #: Blocks before that, so far as they lie in HOST.
    held_block_ids: tuple[BlockId, ...]
    #: Blocks for hashes[first:].
    block_ids: tuple[BlockId, ...]
    #: When it is revoked.
    end_at: float
    #: Blocks of `block_ids` that are verified.
    num_come: int = 0

    @property
    def end(self) -> int:
        """Blocks of the chain that are here, or were when it was offered."""
        return self.first + self.num_come


class Puts:
    """All puts of one store.

    Args:
        gets: What these load from the disk is not wanted either.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        catalogue: Catalogue,
        shares: Shares,
        gets: Gets,
        frame: StoreFrameBuilder,
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._shares = shares
        self._gets = gets
        self._frame = frame
        #: In order of beginning, which is that of `end_at`.
        self._reading: dict[AttemptId, _Reading] = {}
        self._quarantined: dict[AttemptId, tuple[BlockId, ...]] = {}
        #: Blocks that are read, or were for a put that is still read.
        self._on_their_way: set[BlockHash] = set()
        self._num_by_tenant: Counter[str] = Counter()
        self.num_offered = 0
        self.num_known = 0
        self.num_blocks = 0
        self.num_expired = 0
        self.refusals: Counter[PutRefusal] = Counter()

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    # -- its life --

    def offer(self, put: Put, now: float, *, is_draining: bool) -> None:
        """A worker offers a chain."""
        if put.attempt_id in self._reading or put.attempt_id in self._quarantined:
            return
        self.num_offered += 1
        if is_draining:
            self._refuse(put, PutRefusal.DRAINING)
            return
        catalogue, host = self._catalogue, self._catalogue.host
        share = self._shares.of(put.tenant)
        first, num_wanted = self._wanted_run(put.hashes, now)
        here = put.hashes[:first]
        held = tuple(b for h in here if (b := host.find(h)) is not None)
        catalogue.adopt(here, held, share)
        host.acquire(held)
        if not num_wanted:
            host.release(held)
            self.num_known += 1
            self._frame.tell(PutAnswered(attempt_id=put.attempt_id, num_wanted_blocks=0))
            return
        num_wanted = min(num_wanted, host.num_available(share))
        refusal = self._refusal(put.tenant, share, num_wanted)
        if refusal is not None:
            host.release(held)
            self._refuse(put, refusal)
            return
        self._begin(put, first, num_wanted, held, share, now)

    def fetched(self, attempt_id: AttemptId, num_tokens: int, now: float) -> None:
        """The KV of tokens [0, num_tokens) lies verified."""
        reading = self._reading.get(attempt_id)
        if reading is not None:
            first = reading.first + reading.num_come
            self._insert(reading, num_tokens)
            self._catalogue.disk.consider(reading.hashes[: reading.end], now, first)

    def fetch_ended(self, attempt_id: AttemptId, num_tokens: int, now: float) -> None:
        """So it does, and no more will come: no read is outstanding."""
        reading = self._reading.get(attempt_id)
        if reading is None:
            # Revoked while it ended.
            self.read_ended(attempt_id)
            return
        self._insert(reading, num_tokens)
        # Its beginning too: what of that could not be written before may be now.
        self._catalogue.disk.consider(reading.hashes[: reading.end], now)
        self._catalogue.host.release(self._remove(reading))

    def abort(self, attempt_id: AttemptId) -> None:
        """Take no more of it. Its blocks stay until no read is outstanding."""
        reading = self._reading.get(attempt_id)
        if reading is not None:
            self._quarantined[attempt_id] = self._remove(reading)

    def read_ended(self, attempt_id: AttemptId) -> None:
        """No read of an aborted or revoked put is outstanding."""
        block_ids = self._quarantined.pop(attempt_id, ())
        if block_ids:
            self._catalogue.host.release(block_ids)

    def revoke_all(self) -> None:
        """Take no more of any."""
        for attempt_id in list(self._reading):
            self._revoke(attempt_id)

    def tick(self, now: float) -> None:
        """Revoke those whose time is up."""
        while self._reading:
            reading = next(iter(self._reading.values()))
            if reading.end_at > now:
                return
            self.num_expired += 1
            self._revoke(reading.attempt_id)

    def next_due(self) -> float | None:
        """When the next one is revoked."""
        reading = next(iter(self._reading.values()), None)
        return None if reading is None else reading.end_at

    # -- how --

    def _wanted_run(self, hashes: tuple[BlockHash, ...], now: float) -> tuple[int, int]:
        """The first block that is wanted, and how many from there on."""
        is_disk_well = self._catalogue.disk.reads.state(now) is BreakerState.CLOSED
        first = 0
        while first < len(hashes) and self._is_known(hashes[first], is_disk_well):
            first += 1
        limit = min(len(hashes), first + self._config.max_put_blocks)
        end = first
        while end < limit and not self._is_known(hashes[end], is_disk_well):
            end += 1
        return first, end - first

    def _is_known(self, block_hash: BlockHash, is_disk_well: bool) -> bool:
        return (
            block_hash in self._catalogue.host
            or (is_disk_well and block_hash in self._catalogue.disk)
            or block_hash in self._on_their_way
            or self._gets.is_loading(block_hash)
        )

    def _refusal(self, tenant: str, share: Share, num_blocks: int) -> PutRefusal | None:
        config = self._config
        if len(self._reading) >= config.max_puts:
            return PutRefusal.TOO_MANY_PUTS
        if self._num_by_tenant[tenant] >= config.max_puts_per_tenant:
            return PutRefusal.TOO_MANY_PUTS
        if num_blocks:
            return None
        return PutRefusal.OVER_QUOTA if self._shares.num_allowed(share) == 0 else PutRefusal.NO_ROOM

    def _begin(
        self,
        put: Put,
        first: int,
        num_blocks: int,
        held: tuple[BlockId, ...],
        share: Share,
        now: float,
    ) -> None:
        hashes = put.hashes[: first + num_blocks]
        reading = _Reading(
            attempt_id=put.attempt_id,
            tenant=put.tenant,
            hashes=hashes,
            first=first,
            held_block_ids=held,
            block_ids=self._catalogue.allocate(num_blocks, share),
            end_at=now + self._config.put_timeout_s,
        )
        self._reading[put.attempt_id] = reading
        self._num_by_tenant[put.tenant] += 1
        self._on_their_way.update(hashes[first:])
        self._catalogue.disk.see(hashes[first:])
        block_size = self._config.block_size
        find = self._catalogue.host.find
        here = tuple(
            NOT_IN_ARENA if (block_id := find(h)) is None else block_id for h in hashes[:first]
        )
        self._frame.tell(PutAnswered(attempt_id=put.attempt_id, num_wanted_blocks=num_blocks))
        self._frame.tell(
            FetchReserved(
                attempt_id=put.attempt_id,
                num_cached_tokens=first * block_size,
                num_tokens=len(hashes) * block_size,
                block_ids=here + reading.block_ids,
                hashes=hashes,
            )
        )

    def _insert(self, reading: _Reading, num_tokens: int) -> None:
        num_come = num_tokens // self._config.block_size - reading.first
        num_come = min(num_come, len(reading.block_ids))
        if num_come <= reading.num_come:
            return
        new = slice(reading.num_come, num_come)
        positions = range(reading.first + new.start, reading.first + new.stop)
        reading.num_come = num_come
        self.num_blocks += len(positions)
        self._catalogue.insert(reading.hashes, positions, reading.block_ids[new])

    def _revoke(self, attempt_id: AttemptId) -> None:
        self.abort(attempt_id)
        self._frame.tell(Revoked(attempt_id=attempt_id))

    def _refuse(self, put: Put, refusal: PutRefusal) -> None:
        self.refusals[refusal] += 1
        self._frame.tell(
            PutAnswered(attempt_id=put.attempt_id, num_wanted_blocks=0, refusal=refusal)
        )

    def _remove(self, reading: _Reading) -> tuple[BlockId, ...]:
        """It is not read any more; the blocks that it holds."""
        del self._reading[reading.attempt_id]
        self._num_by_tenant[reading.tenant] -= 1
        if not self._num_by_tenant[reading.tenant]:
            del self._num_by_tenant[reading.tenant]
        self._on_their_way.difference_update(reading.hashes[reading.first :])
        return reading.held_block_ids + reading.block_ids

    # -- checking --

    def held(self) -> Iterator[BlockId]:
        """Every block that is held here, once for each reference."""
        for reading in self._reading.values():
            yield from reading.held_block_ids
            yield from reading.block_ids
        for block_ids in self._quarantined.values():
            yield from block_ids

    def validate(self) -> None:
        """Raise AssertionError if the books contradict each other."""
        assert not self._reading.keys() & self._quarantined.keys()
        assert len(self._reading) <= self._config.max_puts
        wanted = [h for r in self._reading.values() for h in r.hashes[r.first :]]
        assert len(wanted) == len(set(wanted)), "a block is read for two puts"
        assert set(wanted) == self._on_their_way
        tenants = Counter(reading.tenant for reading in self._reading.values())
        assert tenants == self._num_by_tenant, (tenants, self._num_by_tenant)
        for reading in self._reading.values():
            assert len(reading.hashes) == reading.first + len(reading.block_ids), reading
            assert 0 <= reading.num_come <= len(reading.block_ids), reading
