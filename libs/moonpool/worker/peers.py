"""Peers: the workers and stores that this worker reads from. One connection per incarnation, reused.

Life of a peer
  1. The first to need it connects: gRPC channel, Describe, checks (compatibility.py), copy plan between
     the two layouts, transport. Whoever asks meanwhile waits for the same attempt.
  2. All streams and reads use it.
  3. It is dropped when it is found lost, LINGER_S after its process has gone (what it wrote can still
     be read and verified until then), when another incarnation of the worker is connected, or when
     this worker stops. What was dropped is closed: its pool is unmapped. The next to need it
     connects anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from moonpool.errors import MoonpoolError, TransferError
from moonpool.handoff.messages import SourceRef
from moonpool.ids import WorkerKey
from moonpool.kv.layout import CopyPlan
from moonpool.transport.base import KvPeer
from moonpool.worker.reader_leases import ReaderLeases

log = structlog.get_logger("moonpool.worker")

#: For all of step 1: a peer that takes longer is no source.
CONNECT_S = 3.0
#: Reads that a peer's death overtook end within this time.
LINGER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peer:
    """One incarnation of one worker, connected."""

    key: WorkerKey
    channel: grpc.aio.Channel
    #: Any: generated code has no types.
    stub: Any
    #: What a store can be asked beside that; nobody answers at a peer that is none.
    store_stub: Any
    #: What this worker reads of the prefixes that it holds.
    prefixes: ReaderLeases
    kv: KvPeer
    #: From its layout to ours.
    plan: CopyPlan
    #: The transport's name.
    transport: str

    async def wait_gone(self) -> None:
        """Until the connection to the peer's process is no more."""
        while (state := self.channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self.channel.wait_for_state_change(state)

    async def close(self) -> None:
        """Wait for the last copies, then let go; also if waiting fails, or is given up."""
        try:
            await self.kv.close()
        finally:
            self.prefixes.close()
            await self.channel.close()


class PeerDirectory:
    """Connections to sources, by incarnation. On one loop.

    Args:
        connect: Makes a peer; raises MoonpoolError if it does not fit or is not there.
    """

    def __init__(self, connect: Callable[[SourceRef], Awaitable[Peer]]) -> None:
        self._connect = connect
        self._peers: dict[WorkerKey, Peer] = {}
        self._attempts: dict[WorkerKey, asyncio.Task[Peer | MoonpoolError]] = {}
        self._watchers: dict[WorkerKey, asyncio.Task[None]] = {}
        #: Of attempts, watchers and closings; None while nothing may begin.
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Connect, watch and close peers, until cancelled; then close all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._tasks = None
        finally:
            async with AsyncExitStack() as stack:
                while self._peers:
                    _, peer = self._peers.popitem()
                    stack.push_async_callback(peer.close)

    def connected(self, key: WorkerKey) -> Peer | None:
        """The peer if its connection stands."""
        return self._peers.get(key)

    async def get(self, source: SourceRef) -> Peer:
        """The peer, connected. Whoever asks during an attempt shares its outcome.

        Raises:
            MoonpoolError: Nobody there, another incarnation, or it does not fit, in words.
        """
        known = self._peers.get(source.key)
        if known is not None:
            return known
        attempt = self._attempts.get(source.key)
        if attempt is None:
            if self._tasks is None:
                raise TransferError("This worker stops.", code="kv_peer_lost")
            attempt = self._tasks.create_task(self._attempt(source))
            self._attempts[source.key] = attempt
        # Who leaves does not end the attempt for the others.
        outcome = await asyncio.shield(attempt)
        if isinstance(outcome, MoonpoolError):
            raise outcome
        return outcome

    def drop(self, peer: Peer) -> None:
        """Use it no more, and close it. May be called twice."""
        if self._tasks is None or self._peers.get(peer.key) is not peer:
            # When it stops, `run` closes all that are left.
            return
        del self._peers[peer.key]
        self._watchers.pop(peer.key).cancel()
        log.info("kv.peer_dropped", peer=str(peer.key))
        self._tasks.create_task(peer.close())

    async def _attempt(self, source: SourceRef) -> Peer | MoonpoolError:
        try:
            async with asyncio.timeout(CONNECT_S):
                peer = await self._connect(source)
        except TimeoutError:
            return TransferError(
                f"{source.key} at {source.address} did not answer in {CONNECT_S:g} s.",
                code="kv_peer_lost",
            )
        except MoonpoolError as error:
            return error
        finally:
            del self._attempts[source.key]
        for other in list(self._peers.values()):
            if other.key.worker_id == peer.key.worker_id:
                self.drop(other)
        self._peers[peer.key] = peer
        if self._tasks is not None:
            self._watchers[peer.key] = self._tasks.create_task(self._watch(peer))
        return peer

    async def _watch(self, peer: Peer) -> None:
        await peer.wait_gone()
        await asyncio.sleep(LINGER_S)
        self.drop(peer)
