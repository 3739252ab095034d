"""PeerReads: blocks out of the pools of peers on the same GPU, into ours, and on to host memory.

    peer's pool -- gather, scatter (device) --> our pool -- HostStaging --> our pool in host memory -- digests

What comes lies where every arrived block lies, checked on our own copy, and lies on the device already: a
step need not copy it in (held.py).

A thread of its own does this, on a stream of its own, one read after another, each to its end:

- No step waits for a read, and no read for a step.
- A peer's pool is closed between two reads: nothing uses it then, also if the last read failed.
- Blocks that are read are in no step: the core gives them to nobody before it is told of their arrival.

A copy that fails may leave the GPU's context unusable. Then the engine's next step says so, and the worker
ends, as it does for any error of CUDA.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moonpool.core.step import Int32Array
from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import CudaError, SharedMemory
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.staging import HostStaging
from moonpool.engine.device.streams import Streams
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.region import DeviceAccess
from moonpool.native import Kernels, LeafGeometry, leaf_checks
from moonpool.native.geometry import ByteArray

_NO_BLOCKS: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenPool:
    memory: torch.Tensor
    pool: DevicePool


class PeerReads:
    """Implements worker.device_server.PeerMemory. Made and used by one thread.

    Args:
        shared: What the pool's memory was allocated from.
        host_bytes: What `host` is a view of.
        held: Of the runner over this pool.
        streams: Made in this thread.
    """

    def __init__(
        self,
        shared: SharedMemory,
        *,
        pool: DevicePool,
        host: KvPool,
        host_bytes: ByteArray,
        held: HeldBlocks,
        kernels: Kernels,
        streams: Streams,
    ) -> None:
        self._shared = shared
        self._pool = pool
        self._host = host
        self._host_bytes = host_bytes
        self._held = held
        self._kernels = kernels
        self._streams = streams
        self._geometry = LeafGeometry.of_layout(host.layout)
        self._staging = HostStaging(pool, host, streams)
        self._peers: dict[int, _OpenPool] = {}

    def offer(self) -> DeviceAccess:
        """This pool, for peers. Raises CudaError."""
        memory = self._pool.memory
        return DeviceAccess(
            gpu=self._shared.gpu, ipc_handle=self._shared.export(memory), num_bytes=len(memory)
        )

    def open(self, peer: int, ipc_handle: bytes, num_bytes: int, num_blocks: int) -> None:
        """Map a pool of `num_blocks` blocks like ours.

        Raises:
            CudaError: There is no such memory, or it has another size.
        """
        assert peer not in self._peers, peer
        layout = replace(self._pool.layout, num_blocks=num_blocks)
        if num_bytes != DevicePool.num_bytes(layout):
            raise CudaError(
                f"a pool of {num_blocks} blocks has {DevicePool.num_bytes(layout)} bytes,"
                f" not {num_bytes}"
            )
        memory = self._shared.open(ipc_handle, num_bytes)
        pool = DevicePool(layout, self._pool.device, memory=memory)
        self._peers[peer] = _OpenPool(memory=memory, pool=pool)

    def read(
        self,
        peer: int,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        first_layer: int,
        expected: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.bool_]:
        """Read layers [first_layer, first_layer + m) of n blocks; returns when nothing is written any more.

        Args:
            sources: [n], blocks of the peer's pool.
            targets: [n], blocks of ours, all different.
            expected: [n, m], digests.

        Returns:
            [n, m]: True where our copy in host memory has another digest.

        Raises:
            CudaError: The peer is not open, or blocks or layers are outside its pool or ours.
            RuntimeError: A copy failed.
        """
        opened = self._peers.get(peer)
        layers = range(first_layer, first_layer + expected.shape[1])
        if opened is None:
            raise CudaError(f"peer {peer} is not open")
        _check_bounds("source", sources, opened.pool.layout.num_blocks)
        _check_bounds("target", targets, self._pool.layout.num_blocks)
        if not 0 <= layers.start < layers.stop <= self._pool.num_layers or not len(targets):
            raise CudaError(f"layers {layers} of {len(targets)} blocks")
        # From here on these layers hold anything.
        self._held.note(targets, first_layer, expected, np.zeros(expected.shape, np.bool_))
        checker = _LeafChecker(
            self._kernels, self._host_bytes, self._geometry, targets, first_layer, expected
        )
        try:
            with torch.inference_mode():
                self._copy(opened.pool, sources, targets, layers, checker)
        except RuntimeError:
            self._let_go()
            raise
        self._held.note(targets, first_layer, expected, ~checker.is_bad)
        return checker.is_bad

    def close(self, peer: int) -> None:
        """Unmap a peer's pool; nothing if it is not open. Raises CudaError."""
        opened = self._peers.pop(peer, None)
        if opened is not None:
            self._shared.close(opened.memory)

    def close_all(self) -> None:
        """Unmap all that is open, whatever CUDA says."""
        while self._peers:
            with contextlib.suppress(CudaError):
                self.close(next(iter(self._peers)))

    def _copy(
        self,
        source: DevicePool,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        layers: range,
        checker: _LeafChecker,
    ) -> None:
        theirs, ours = (torch.from_numpy(ids).to(self._pool.device) for ids in (sources, targets))
        staging = self._staging
        staging.begin(_NO_BLOCKS, targets.astype(np.int32), checker, layers=layers)
        for layer in layers:
            self._pool.scatter(layer, ours, source.gather(layer, theirs))
            staging.after_layer(layer)
        staging.finish()

    def _let_go(self) -> None:
        """After an error: what was asked for before it has ended, and the rest is forgotten."""
        with contextlib.suppress(RuntimeError):
            self._streams.mark().wait()
        self._staging = HostStaging(self._pool, self._host, self._streams)


class _LeafChecker:
    """A LayerMark: compares a layer's digests when it lies in host memory, while it is warm in the cache."""

    def __init__(
        self,
        kernels: Kernels,
        host_bytes: ByteArray,
        geometry: LeafGeometry,
        targets: npt.NDArray[np.int64],
        first_layer: int,
        expected: npt.NDArray[np.uint64],
    ) -> None:
        self._kernels = kernels
        self._host_bytes = host_bytes
        self._geometry = geometry
        self._targets = targets
        self._first_layer = first_layer
        self._expected = expected
        self.is_bad = np.zeros(expected.shape, np.bool_)

    def layer_done(self, layer: int) -> None:
        column = layer - self._first_layer
        checks = leaf_checks(self._targets, layer, self._expected[:, column], -1)
        self.is_bad[:, column] = self._kernels.verify_leaves(
            self._host_bytes, self._geometry, checks
        )


def _check_bounds(what: str, block_ids: npt.NDArray[np.int64], num_blocks: int) -> None:
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < num_blocks:
        raise CudaError(f"a {what} block is outside its pool of {num_blocks}")
