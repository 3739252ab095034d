"""PeerScout: connects to workers when they announce themselves, so that no request waits for it.

Any worker may hold a prefix that this one lacks, whatever its role. A first connection costs a round
trip, checks, and the mapping of the peer's whole pool. Whatever goes wrong here is no error: the handoff
or the fetch that needs the peer connects again and says why it cannot.
"""

from __future__ import annotations

import asyncio

import structlog

from moonpool.errors import MoonpoolError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import WorkerId, WorkerKey
from moonpool.wire.control import ReceivedAnnounce
from moonpool.worker.peers import PeerDirectory

log = structlog.get_logger("moonpool.worker")

#: Workers that are remembered as tried; of more, those tried longest ago are tried again.
_MAX_TRIED = 4_096
#: Workers that wait to be tried; those beyond are heard again a second later.
_MAX_WAITING = 1_024


class PeerScout:
    """Tries each incarnation once, one after the other. On one loop.

    Args:
        own: This worker, which needs no way to itself.
    """

    def __init__(self, *, peers: PeerDirectory, own: WorkerKey) -> None:
        self._peers = peers
        self._own = own
        #: Those that were tried: once each, as long as they live. In the order of trying.
        self._tried: dict[WorkerId, WorkerKey] = {}
        #: Those that are tried next, in this order.
        self._waiting: dict[WorkerId, SourceRef] = {}
        self._is_due = asyncio.Event()

    def on_announced(self, announce: ReceivedAnnounce) -> None:
        """Someone lives, or leaves."""
        worker_id = announce.worker.worker_id
        if announce.is_leaving:
            self._waiting.pop(worker_id, None)
        elif self._is_new(announce.worker) and (
            worker_id in self._waiting or len(self._waiting) < _MAX_WAITING
        ):
            self._waiting[worker_id] = SourceRef(key=announce.worker, address=announce.grpc_address)
            self._is_due.set()

    async def run(self) -> None:
        """Connect until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._waiting:
                source = self._waiting.pop(next(iter(self._waiting)))
                self._note_tried(source.key)
                try:
                    await self._peers.get(source)
                except MoonpoolError as error:
                    log.info("kv.peer_not_connected", why=error.message)

    def _is_new(self, worker: WorkerKey) -> bool:
        return (
            worker.worker_id != self._own.worker_id and self._tried.get(worker.worker_id) != worker
        )

    def _note_tried(self, worker: WorkerKey) -> None:
        self._tried.pop(worker.worker_id, None)
        self._tried[worker.worker_id] = worker
        if len(self._tried) > _MAX_TRIED:
            del self._tried[next(iter(self._tried))]
