"""What of an engine on a GPU reads peers' memory there, on a CPU over a stand-in for CUDA's runtime."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import CudaIpc
from moonpool.engine.device.peer_reads import PeerReads
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.streams import InlineStreams
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import DeviceAccess
from moonpool.native import kernels
from moonpool.native.geometry import ByteArray
from moonpool.worker.device_server import PeerMemory, serve_device
from support.cuda_runtime import StandInCuda, stand_in_ipc
from support.device import CPU


class DeviceNode:
    """A pool on the device beside one in host memory, and its PeerReads.

    Args:
        host_bytes: The pool in host memory.
        leaves: uint64[num_blocks, num_layers], its digests.
    """

    def __init__(
        self,
        layout: KvLayout,
        host_bytes: ByteArray,
        leaves: npt.NDArray[np.uint64],
        *,
        gpu: str = "GPU-0",
    ) -> None:
        self.runtime: StandInCuda
        self.ipc: CudaIpc
        self.runtime, self.ipc = stand_in_ipc(gpu)
        self.layout = layout
        self.pool = DevicePool(layout, CPU, memory=self.ipc.allocate(DevicePool.num_bytes(layout)))
        self.host = KvPool(host_bytes.data, layout)
        self.held = HeldBlocks(leaves)
        self._host_bytes = host_bytes

    def make_reads(self) -> PeerReads:
        return PeerReads(
            self.ipc,
            pool=self.pool,
            host=self.host,
            host_bytes=self._host_bytes,
            held=self.held,
            kernels=kernels(),
            streams=InlineStreams(),
        )

    def bring_in(self) -> None:
        """All of host memory to the device, as steps do it."""
        ids = np.arange(self.layout.num_blocks)
        index = self.host.head_index(ids[:, None])
        for layer in range(self.layout.num_layers):
            kv = self.host.read(layer, index, len(ids))
            self.pool.scatter(layer, torch.from_numpy(ids), kv)

    def serve(self, fd: int, memory: PeerMemory | None = None) -> DeviceThread:
        """Serve the DeviceLink whose engine's end is `fd`, as an engine does; by `memory` if it is given."""
        return DeviceThread(lambda sock: serve_device(sock, memory or self.make_reads()), fd)


class DeviceThread:
    """A thread at the engine's end of a DeviceLink, which it duplicates."""

    def __init__(self, serve: Callable[[socket.socket], None], fd: int) -> None:
        self._sock = socket.socket(fileno=os.dup(fd))
        self._serve = serve
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="device")
        self._thread.start()

    def join(self) -> None:
        """After the link was left; raises what ended the thread."""
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the device's thread hangs"
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            self._serve(self._sock)
        except BaseException as error:  # noqa: BLE001 - told by `join`
            self.failure = error


class GatedReads:
    """A PeerMemory whose reads wait for the test, with what came of it in order."""

    def __init__(self, inner: PeerReads) -> None:
        self._inner = inner
        self.has_begun = threading.Event()
        self.may_go = threading.Event()
        self.log: list[str] = []
        #: What the next read raises.
        self.error: Exception | None = None

    def offer(self) -> DeviceAccess:
        return self._inner.offer()

    def open(self, peer: int, ipc_handle: bytes, num_bytes: int, num_blocks: int) -> None:
        self._inner.open(peer, ipc_handle, num_bytes, num_blocks)
        self.log.append(f"opened {peer}")

    def read(
        self,
        peer: int,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        first_layer: int,
        expected: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.bool_]:
        self.has_begun.set()
        assert self.may_go.wait(timeout=20), "nobody opened the gate"
        error, self.error = self.error, None
        if error is not None:
            raise error
        is_bad = self._inner.read(peer, sources, targets, first_layer, expected)
        self.log.append(f"read {peer}")
        return is_bad

    def close(self, peer: int) -> None:
        self._inner.close(peer)
        self.log.append(f"closed {peer}")

    def close_all(self) -> None:
        self._inner.close_all()
