"""The interface of all transports: connect to a peer's region, read spans of it into our own pool.

Life of a read
1. The caller holds the target blocks and builds a KvRead: spans, and the leaves to check.
2. `peer.read(read, timeout_s=...)` copies the spans and checks each leaf on our copy.
3. It returns a ReadResult, or raises TransferError, or is cancelled. In every case, once it has
   returned or raised, no byte of it will be written any more: the blocks may be used or freed.

What a transport does not do: lock the source's blocks (the handoff stream does), retry, or choose what
to read. A source block that changed under the reader is a bad leaf, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.errors import TransferError
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import KvRegion
from moonpool.native import LeafCheckArray, LeafGeometry, leaf_checks

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


def peer_lost(what: str) -> TransferError:
    """The peer is gone: the source of these blocks has to be given up."""
    return TransferError(what, code="kv_peer_lost")


def read_timed_out(worker: object, timeout_s: float) -> TransferError:
    """The peer lives, as far as is known, but this read took too long."""
    return TransferError(f"{worker} did not deliver in {timeout_s:.3g} s", code="kv_read_timeout")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalPool:
    """The reader's own memory: the target of every read."""

    #: uint8[layout.pool_bytes], writable.
    bytes: ByteArray
    geometry: LeafGeometry

    @classmethod
    def of(cls, data: ByteArray, layout: KvLayout) -> LocalPool:
        return cls(bytes=data, geometry=LeafGeometry.of_layout(layout))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCopy:
    """A read told in blocks, for transports that copy no bytes of host memory.

    Leaf i * m + j of the read is block i, layer first_layer + j.
    """

    #: int64[n] each.
    sources: Int64Array
    targets: Int64Array
    #: From 0 in the group.
    first_layer: int
    #: uint64[n, m]
    expected: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvRead:
    """What to copy and what to check, in the order in which it is done."""

    #: int64[n, 3] of (source offset, target offset, length); none overlap in the target.
    spans: Int64Array
    #: LEAF_CHECK_DTYPE[m], in order of `after_span` and, within a span, of their place in it.
    checks: LeafCheckArray
    #: int64[m]: where each of `checks` stood among the leaves that `of` was given.
    order: Int64Array
    #: Of all spans.
    num_bytes: int
    #: The same in blocks; None if it is not of whole blocks in this order.
    block_copy: BlockCopy | None = None

    @classmethod
    def of(
        cls,
        spans: Int64Array,
        *,
        blocks: npt.ArrayLike,
        layers: npt.ArrayLike,
        expected: npt.ArrayLike,
        after_span: npt.ArrayLike,
        block_copy: BlockCopy | None = None,
    ) -> KvRead:
        """A read of `spans` that checks m leaves; the four columns are parallel, in any order.

        Args:
            spans: int64[n, 3], as a copy plan makes them.
            blocks: Target block of each leaf.
            layers: Layer of each leaf, from 0 in the group.
            expected: Its digest, uint64.
            after_span: Row of `spans` that completes it.
            block_copy: The same in blocks.
        """
        checks = leaf_checks(blocks, layers, expected, after_span)
        order = np.lexsort((checks["layer"], checks["block"], checks["after_span"]))
        return cls(
            spans=np.ascontiguousarray(spans, np.int64),
            checks=checks.take(order),
            order=order,
            num_bytes=int(np.add.reduce(spans[:, 2])),
            block_copy=block_copy,
        )

    def bad_leaves(self, is_bad: npt.NDArray[np.bool_] | None) -> tuple[int, ...]:
        """The caller's numbers of the checks marked in `is_bad`, ascending; None marks none."""
        return () if is_bad is None else tuple(sorted(self.order[is_bad].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """All bytes were copied; leaves not named here match their digests."""

    num_bytes: int
    #: Numbers of leaves, as given to KvRead.of, whose copy does not match, ascending.
    bad_leaves: tuple[int, ...]
    elapsed_s: float


class KvPeer(Protocol):
    """One incarnation of one peer, connected. Reads may overlap, and end in any order."""

    @property
    def region(self) -> KvRegion: ...

    @property
    def is_lost(self) -> bool:
        """True once the peer is known to be gone, or close() was called: every read fails."""
        ...

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        """Copy and check. Once this returns or raises, no byte of it will be written any more.

        Raises:
            TransferError: Peer lost, refused, out of bounds, or too slow. Targets hold anything.
        """
        ...

    async def close(self) -> None:
        """End pending reads with TransferError, wait for their last copies, let go of the peer."""
        ...


class Transport(Protocol):
    """One way to reach peers. Used as an async context manager around its peers' lives."""

    @property
    def name(self) -> str:
        """shm, cuda_ipc, nixl or grpc: as it is announced and counted."""
        ...

    @property
    def unusable(self) -> str | None:
        """Why it reaches nobody from this process, in words; None if it works."""
        ...

    def announce(self, region: KvRegion) -> KvRegion:
        """This process's own region, with what peers need to read it by this transport."""
        ...

    def why_not(self, region: KvRegion) -> str | None:
        """A reason in words why this transport cannot reach the region, or None if it may."""
        ...

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        """Reach the incarnation that owns `region`.

        Raises:
            TransferError: Nobody there, another incarnation, refused, or too slow.
        """
        ...
