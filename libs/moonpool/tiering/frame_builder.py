"""StoreFrameBuilder: what the next StoreFrame takes along."""

from __future__ import annotations

from moonpool.core.protocol import BlockLedger
from moonpool.kv.events import CacheEvent
from moonpool.tiering.protocol import DiskWork, StoreFrame, StoreReply


class StoreFrameBuilder:
    """Gathers replies and disk work from one frame to the next, in order."""

    def __init__(self) -> None:
        self._replies: list[StoreReply] = []
        self._disk_work: list[DiskWork] = []

    def tell(self, reply: StoreReply) -> None:
        self._replies.append(reply)

    def do(self, work: DiskWork) -> None:
        self._disk_work.append(work)

    def take(self, ledger: BlockLedger, cache_events: tuple[CacheEvent, ...]) -> StoreFrame:
        """The frame; the builder is empty after it."""
        frame = StoreFrame(
            replies=tuple(self._replies),
            disk_work=tuple(self._disk_work),
            ledger=ledger,
            cache_events=cache_events,
        )
        self._replies.clear()
        self._disk_work.clear()
        return frame
