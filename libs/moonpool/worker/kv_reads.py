"""KvReads: performs the reads that the machines ask for, and keeps our leaves of what came.

A read copies layers of blocks from a peer's pool into blocks that the core reserved, checks each leaf
on our own copy, and writes the leaves of the blocks that are right into our leaf array, so that the
next reader of these blocks can check its copy as well. It always ends in exactly one ReadDone, also if
it is stopped: then when nothing writes any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import structlog

from moonpool.errors import TransferError
from moonpool.failpoints import Failpoints
from moonpool.handoff.effects import StartRead
from moonpool.handoff.events import ReadDone
from moonpool.ids import AttemptId
from moonpool.transport.base import BlockCopy, KvRead, ReadResult, peer_lost
from moonpool.worker.attempt_book import AttemptBook
from moonpool.worker.attempt_record import ReadRecord
from moonpool.worker.books import WorkerBooks
from moonpool.worker.peers import Peer, PeerDirectory

log = structlog.get_logger("moonpool.worker")

#: A read that stands still this long has failed, whatever its size; beyond it the slowest link counts.
_READ_BASE_S = 3.0
_SLOWEST_BYTES_PER_S = 50e6


class _Read:
    """One read that has not ended."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        #: A task that is cancelled before it begins would not tell its end.
        self.has_begun = False
        self.is_stopped = False


class KvReads:
    """All reads of this worker. On one loop.

    Args:
        leaf_digests: uint64[num_blocks, num_layers], this worker's own.
        on_done: Takes each read's end.
    """

    def __init__(
        self,
        *,
        peers: PeerDirectory,
        leaf_digests: npt.NDArray[np.uint64],
        first_layer: int,
        book: AttemptBook,
        books: WorkerBooks,
        failpoints: Failpoints,
        on_done: Callable[[ReadDone], None],
    ) -> None:
        self._peers = peers
        self._leaf_digests = leaf_digests
        self._first_layer = first_layer
        self._book = book
        self._books = books
        self._failpoints = failpoints
        self._on_done = on_done
        self._reads: dict[AttemptId, list[_Read]] = {}
        self._num_open = 0
        #: When a link that a failpoint limits can take the next read.
        self._link_free_at = 0.0

    @property
    def num_open(self) -> int:
        """Reads that have not ended."""
        return self._num_open

    def start(self, effect: StartRead, tasks: asyncio.TaskGroup) -> None:
        """Begin a read; its outcome comes through `on_done`."""
        read = _Read()
        self._reads.setdefault(effect.read_id.attempt_id, []).append(read)
        self._num_open += 1
        read.task = tasks.create_task(self._run(effect, read))

    def stop(self, attempt_id: AttemptId) -> None:
        """Cut the attempt's reads short."""
        for read in self._reads.get(attempt_id, ()):
            read.is_stopped = True
            if read.has_begun and read.task is not None:
                read.task.cancel()

    async def _run(self, effect: StartRead, read: _Read) -> None:
        attempt_id = effect.read_id.attempt_id
        done = ReadDone(read_id=effect.read_id, is_ok=False)
        read.has_begun = True
        try:
            if not read.is_stopped:
                peer = self._peers.connected(effect.source.key)
                if peer is None:
                    raise peer_lost(f"{effect.source.key} is not connected")
                done = await self._read(effect, peer)
        except (TransferError, ValueError) as error:
            # ValueError: the source named blocks or layers that are not in its pool.
            log.warning("kv.read_failed", source=str(effect.source.key), message=str(error))
        finally:
            self._num_open -= 1
            self._reads[attempt_id].remove(read)
            if not self._reads[attempt_id]:
                del self._reads[attempt_id]
            self._on_done(done)

    async def _read(self, effect: StartRead, peer: Peer) -> ReadDone:
        num_layers = effect.end_layer - effect.first_layer
        first_column = effect.first_layer - self._first_layer
        columns = slice(first_column, first_column + num_layers)
        sources = np.asarray(effect.source_block_ids, np.int64)
        targets = np.asarray(effect.target_block_ids, np.int64)
        expected = np.frombuffer(b"".join(effect.digests), "<u8").reshape(len(targets), num_layers)
        fault, _, argument = self._fault(effect).partition(":")
        match fault:
            case "flip":
                # The same as a byte that arrived wrong: copy and digest do not agree.
                expected = expected ^ np.uint64(1)
            case "drop":
                raise TransferError("dropped on purpose", code="kv_peer_lost")
            case "delay":
                await asyncio.sleep(int(argument) / 1_000)
        copies = peer.plan.copies(sources, targets, effect.first_layer, effect.end_layer)
        read = KvRead.of(
            copies.spans,
            blocks=targets.repeat(num_layers),
            layers=np.arange(expected.size) % num_layers + first_column,
            expected=expected.reshape(-1),
            after_span=copies.last_spans.reshape(-1),
            block_copy=BlockCopy(
                sources=sources, targets=targets, first_layer=first_column, expected=expected
            ),
        )
        started_ns = time.time_ns()
        try:
            result = await peer.kv.read(
                read, timeout_s=_READ_BASE_S + read.num_bytes / _SLOWEST_BYTES_PER_S
            )
        finally:
            if peer.kv.is_lost:
                self._peers.drop(peer)
        if fault == "limit":
            await self._take_link(result, bytes_per_s=max(int(argument), 1))
        bad = sorted({leaf // num_layers for leaf in result.bad_leaves})
        if bad:
            good = np.delete(np.arange(len(targets)), bad)
            self._leaf_digests[targets[good], columns] = expected[good]
        else:
            self._leaf_digests[targets, columns] = expected
        self._book.read_done(
            effect.read_id.attempt_id,
            ReadRecord(
                started_ns=started_ns,
                ended_ns=time.time_ns(),
                num_bytes=result.num_bytes,
                num_bad_leaves=len(result.bad_leaves),
                first_layer=effect.first_layer,
                end_layer=effect.end_layer,
                num_blocks=len(targets),
            ),
        )
        self._books.read(result, backend=peer.transport, num_bad_blocks=len(bad))
        if bad:
            log.warning(
                "kv.digest_mismatch",
                source=str(effect.source.key),
                num_bad_leaves=len(result.bad_leaves),
                num_leaves=expected.size,
                transport=peer.transport,
            )
        return ReadDone(read_id=effect.read_id, bad_indices=tuple(bad))

    def _fault(self, effect: StartRead) -> str:
        """What a failpoint wants this read to suffer; empty: nothing."""
        fault = self._failpoints.hit("transport.read")
        if fault is None and effect.is_prefix:
            fault = self._failpoints.hit("fetch.read")
        return fault or ""

    async def _take_link(self, result: ReadResult, *, bytes_per_s: int) -> None:
        """Wait as long as the bytes would have taken on a link that all limited reads share."""
        now = time.monotonic()
        begun_at = max(self._link_free_at, now - result.elapsed_s)
        self._link_free_at = begun_at + result.num_bytes / bytes_per_s
        await asyncio.sleep(max(self._link_free_at - now, 0.0))
