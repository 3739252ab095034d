"""PeerScout: connects to workers when they announce themselves, so that no request waits for it.

Any worker may hold a prefix that this one lacks, whatever its role. A first connection costs a round
trip, checks, and the mapping of the peer's whole pool. Whatever goes wrong here is no error: the handoff
or the fetch that needs the peer connects again and says why it cannot.
"""

from __future__ import annotations

import structlog

from moonpool.bus.protocol import Bus
from moonpool.bus.subjects import Subjects
from moonpool.errors import MoonpoolError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import WorkerKey
from moonpool.wire.control import ReceivedAnnounce, decode_announce
from moonpool.worker.peers import PeerDirectory

log = structlog.get_logger("moonpool.worker")

#: Workers that are remembered as tried; of more, those tried longest ago are tried again.
_MAX_TRIED = 4_096


class PeerScout:
    """Listens to announcements.

    Args:
        own: This worker, which needs no way to itself.
    """

    def __init__(
        self, *, bus: Bus, subjects: Subjects, peers: PeerDirectory, own: WorkerKey
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._own = own
        #: Those that were tried: once each, as long as they live. In the order of trying.
        self._tried: dict[str, WorkerKey] = {}

    async def run(self) -> None:
        """Listen until cancelled."""
        async for message in await self._bus.subscribe(self._subjects.announces):
            try:
                announce = decode_announce(message.data)
                if self._is_new(announce):
                    self._note_tried(announce.worker)
                    await self._peers.get(
                        SourceRef(key=announce.worker, address=announce.grpc_address)
                    )
            except MoonpoolError as error:
                log.info("kv.peer_not_connected", why=error.message)

    def _is_new(self, announce: ReceivedAnnounce) -> bool:
        return (
            not announce.is_leaving
            and announce.worker.worker_id != self._own.worker_id
            and self._tried.get(announce.worker.worker_id) != announce.worker
        )

    def _note_tried(self, worker: WorkerKey) -> None:
        self._tried.pop(worker.worker_id, None)
        self._tried[worker.worker_id] = worker
        if len(self._tried) > _MAX_TRIED:
            del self._tried[next(iter(self._tried))]
