"""Neighbours: a store node among the others of its ring.

    each second: tell the directory of this node -> hear of the others -> take the chains that they ask for

A chain is taken as an offer of a worker is: this node's own core says what it lacks, and reads it from the
node that asked; a few at a time, so that offers of workers find room. What to ask for and what to take is
decided in tiering/copies.py. Nothing here is on the way of a request, and a directory that is away changes
nothing but that.

On the way out the others are asked to take what was used last, while it can still be read, until they tell that
they have it. Whoever is silent meanwhile may come back; whoever leaves as well will not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from dataclasses import replace

import structlog

from moonpool.clock import Clock
from moonpool.errors import UnavailableError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import BlockHash, WorkerId, WorkerKey
from moonpool.store.directory import Directory
from moonpool.store.directory_keeper import BEAT_S, DirectoryKeeper
from moonpool.tiering.copies import CopyBook, TakeChain
from moonpool.tiering.protocol import PutRefusal
from moonpool.tiering.store_record import RingView, StoreMember, StoreRecord
from moonpool.wire.store import PutAnswer, PutOffer

#: For one chain, reading included.
TAKE_TIMEOUT_S = 30.0

log = structlog.get_logger("moonpool.store")


class Neighbours:
    """See the file's head.

    Args:
        key: This life of this node.
        address: gRPC, where others read from it.
        directory: Entered by whoever made it.
        book: This node's own.
        take: Offers a chain to this node's own core; returns when its reading has ended.
    """

    def __init__(
        self,
        *,
        key: WorkerKey,
        address: str,
        directory: Directory,
        book: CopyBook,
        take: Callable[[PutOffer], Awaitable[PutAnswer]],
        clock: Clock,
        beat_s: float = BEAT_S,
    ) -> None:
        self._member = StoreMember(key=key, address=address, since_unix_s=clock.unix())
        self._book = book
        self._take_offer = take
        self._clock = clock
        self._is_leaving = False
        self._left = asyncio.Event()
        self._keeper = DirectoryKeeper(
            directory, record=self._record, on_view=self._on_view, beat_s=beat_s
        )
        self._tasks: asyncio.TaskGroup | None = None
        #: Nodes that do not leave, as of the last view; while this one leaves, those too that are silent since.
        self._others: set[WorkerId] = set()

    @property
    def num_others(self) -> int:
        """Nodes that do not leave, as far as is known; this one left out."""
        return len(self._others)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                async with self._keeper:
                    await asyncio.Event().wait()
        finally:
            self._tasks = None

    def note_put(self, hashes: tuple[BlockHash, ...]) -> None:
        """A chain was offered here and not refused."""
        self._book.note_kept(hashes)

    def note_lent(self, hashes: tuple[BlockHash, ...], reader: WorkerKey | None) -> None:
        """A reader was lent these leading blocks of a chain."""
        reader_id = reader.worker_id if reader is not None else None
        self._book.note_lent(hashes, self._clock.now(), reader=reader_id)

    def note_returned(self, reader: WorkerKey) -> None:
        """A stream of that reader, who was lent something, has ended."""
        self._book.note_returned(reader.worker_id, self._clock.now())

    async def leave(self, *, timeout_s: float) -> Set[BlockHash] | None:
        """Ask the others to take what was used last; returns when they have it, or nobody comes for it any more.

        The node must still lend. Without others, or without word from them, it returns at once.

        Returns:
            The blocks that others have told that they have; None: there were no others.
        """
        if self._is_leaving or not self._others:
            return None
        self._is_leaving = True
        self._book.leave()
        self._keeper.hasten(True)
        self._keeper.beat_now()
        log.info("store.leaving_ring", num_others=self.num_others)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        return self._book.handed

    # -- parts --

    def _record(self) -> StoreRecord:
        member = replace(self._member, is_draining=self._is_leaving)
        return self._book.record(member, self._clock.now(), self._clock.unix())

    def _on_view(self, view: RingView) -> None:
        staying: set[WorkerId] = set()
        draining: set[WorkerId] = set()
        for member in view.members:
            if member.key.worker_id != self._member.key.worker_id:
                (draining if member.is_draining else staying).add(member.key.worker_id)
            elif member.key == self._member.key and member.joined_unix_s is not None:
                # The record of an earlier life ends soon: from here on this one tells it.
                self._member = replace(self._member, joined_unix_s=member.joined_unix_s)
        self._others = (self._others - draining) | staying if self._is_leaving else staying
        self._book.on_view(view, self._clock.now())
        self._keeper.hasten(self._is_leaving or self._book.is_waited_for)
        self._end_leaving()
        self._take()

    def _end_leaving(self) -> None:
        """If this node leaves: whether it has left, or has to ask for more."""
        if not self._is_leaving or self._left.is_set():
            return
        if self._book.is_left(self._clock.now()) or not self._others:
            self._left.set()
        elif not self._book.num_asked:
            self._keeper.beat_now()

    def _take(self) -> None:
        if self._tasks is not None:
            for take in self._book.takes(self._clock.now()):
                self._tasks.create_task(self._take_one(take))

    async def _take_one(self, take: TakeChain) -> None:
        offer = PutOffer(
            store=self._member.key,
            tenant=take.tenant,
            hashes=take.hashes,
            source=SourceRef(key=take.source, address=take.address),
            deadline_s=TAKE_TIMEOUT_S,
        )
        refusal: PutRefusal | None = PutRefusal.DRAINING
        try:
            answer = await self._take_offer(offer)
            refusal = answer.refusal
        except UnavailableError:
            # This node stops.
            return
        finally:
            is_waited_for = self._book.on_taken(take, self._clock.now(), refusal=refusal)
        if answer.num_wanted_blocks:
            log.debug("store.taken", source=str(take.source), num_blocks=answer.num_wanted_blocks)
        self._take()
        if is_waited_for and not self._book.num_taking:
            # It waits for nothing else.
            self._keeper.beat_now()
