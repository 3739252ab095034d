"""CUDA IPC: blocks out of another process's pool on this GPU. A check for C, and G9."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from lab import Lab
from peer_owner import fill, make_ipc
from random_engine import pool_layout

from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import CudaError, CudaIpc
from moonpool.engine.device.peer_reads import PeerReads
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.streams import streams_of, thread_stream
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.layout import KvLayout
from moonpool.native import kernels

_OWNER = Path(__file__).with_name("peer_owner.py")
_PEER = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    gpu: str
    ipc_handle: bytes


class _Reader:
    """This process's pools, and what reads the other's."""

    def __init__(self, lab: Lab, layout: KvLayout) -> None:
        self.ipc: CudaIpc = make_ipc(lab.device)
        self.layout = layout
        # Not to be read by anybody: torch's memory, which is given back.
        self.pool = DevicePool(layout, lab.device)
        host_bytes = np.zeros(layout.pool_bytes, np.uint8)
        self.leaves = np.zeros((layout.num_blocks, layout.num_layers), np.uint64)
        self.held = HeldBlocks(self.leaves)
        self.reads = PeerReads(
            self.ipc,
            pool=self.pool,
            host=KvPool(host_bytes.data, layout),
            host_bytes=host_bytes,
            held=self.held,
            kernels=kernels(),
            streams=streams_of(lab.device),
        )


@contextlib.contextmanager
def _owner(lab: Lab, num_bytes: int) -> Iterator[_Offer]:
    """Raises CudaError: It says why not."""
    command = [sys.executable, str(_OWNER), str(lab.device), str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        if said["why"]:
            raise CudaError(said["why"])
        yield _Offer(gpu=said["gpu"], ipc_handle=bytes.fromhex(said["ipc_handle"]))


def check(lab: Lab) -> list[str]:
    """Problems, none if all is well."""
    try:
        problems = _check(lab)
    except (RuntimeError, ValueError) as error:
        problems = [f"CUDA IPC: {error}"]
    print(f"blocks of another process, by CUDA IPC: {len(problems)} problems", flush=True)
    return problems


def _check(lab: Lab) -> list[str]:
    layout = pool_layout(lab.scale.model, 2 * lab.scale.num_copied_blocks)
    num_bytes, num_read = DevicePool.num_bytes(layout), lab.scale.num_copied_blocks
    rng = np.random.default_rng(5)
    sources, targets = (rng.permutation(layout.num_blocks)[:num_read] for _ in range(2))
    problems = []
    with _owner(lab, num_bytes) as offer, thread_stream(lab.device):
        reader = _Reader(lab, layout)
        if offer.gpu != reader.ipc.gpu:
            problems.append(f"CUDA IPC: this GPU is {reader.ipc.gpu} here, {offer.gpu} there")
        same = DevicePool(layout, lab.device)
        fill(same.memory)
        lab.wait()
        expected = _digests(same, sources)
        reader.reads.open(_PEER, offer.ipc_handle, num_bytes, layout.num_blocks)
        middle = layout.num_layers // 2
        for layers in (slice(0, middle), slice(middle, layout.num_layers)):
            wanted = np.ascontiguousarray(expected[:, layers])
            is_bad = reader.reads.read(_PEER, sources, targets, layers.start, wanted)
            if is_bad.any():
                problems.append(f"CUDA IPC: {is_bad.sum()} of {is_bad.size} leaves are wrong")
        ids = [torch.from_numpy(blocks).to(lab.device) for blocks in (sources, targets)]
        for layer in range(layout.num_layers):
            theirs, ours = same.gather(layer, ids[0]), reader.pool.gather(layer, ids[1])
            # As bytes: random ones are not all numbers.
            if not torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8)):
                problems.append(f"CUDA IPC: layer {layer} is another on the device")
        reader.leaves[targets] = expected
        if len(reader.held.lacking(targets.astype(np.int32))):
            problems.append("CUDA IPC: blocks that came are said to be lacking")
        expected[0, 0] ^= np.uint64(1)
        if not reader.reads.read(_PEER, sources, targets, 0, expected[:, :1].copy())[0, 0]:
            problems.append("CUDA IPC: a wrong digest is not told")
        reader.reads.close(_PEER)
        handle = offer.ipc_handle
    try:
        reader.reads.open(_PEER, handle, num_bytes, layout.num_blocks)
    except CudaError:
        pass
    else:
        problems.append("CUDA IPC: memory of a process that has ended can be opened")
        reader.reads.close(_PEER)
    return problems


def _digests(pool: DevicePool, blocks: np.ndarray) -> np.ndarray:
    """uint64[blocks, layers]"""
    found = np.zeros((len(blocks), pool.num_layers), np.uint64)
    ids = torch.from_numpy(blocks).to(pool.device)
    for layer in range(pool.num_layers):
        kv = pool.gather(layer, ids).transpose(0, 1).contiguous().view(torch.uint8).cpu().numpy()
        for row in range(len(blocks)):
            found[row, layer] = xxhash.xxh3_64_intdigest(kv[row])
    return found


def between_processes(lab: Lab) -> None:
    """G9: a chain out of another process's pool: onto the device; and on to host memory, checked."""
    try:
        _measure(lab)
    except CudaError as error:
        print(f"G9 is left out: {error}", flush=True)


@torch.inference_mode()
def _measure(lab: Lab) -> None:
    layout = pool_layout(lab.scale.model, 4 * lab.scale.num_copied_blocks)
    num_bytes = DevicePool.num_bytes(layout)
    rng = np.random.default_rng(1)
    sources, targets = (
        rng.permutation(layout.num_blocks)[: lab.scale.num_copied_blocks] for _ in range(2)
    )
    moved = len(sources) * layout.block_bytes
    with _owner(lab, num_bytes) as offer, thread_stream(lab.device):
        reader = _Reader(lab, layout)
        memory = reader.ipc.open(offer.ipc_handle, num_bytes)
        theirs = DevicePool(layout, lab.device, memory=memory)
        ids = [torch.from_numpy(blocks).to(lab.device) for blocks in (sources, targets)]

        def onto_device() -> None:
            for layer in range(layout.num_layers):
                reader.pool.scatter(layer, ids[1], theirs.gather(layer, ids[0]))

        rate = moved / lab.device_s(onto_device, repeat=2)
        lab.add(
            "G9",
            f"CUDA IPC, {len(sources)} blocks onto the device, payload counted once",
            rate / 1e12,
            "TB/s",
            share=rate / (lab.copy_rate / 2),
            target="as G8",
        )
        lab.wait()
        reader.ipc.close(memory)
        reader.reads.open(_PEER, offer.ipc_handle, num_bytes, layout.num_blocks)
        expected = np.zeros((len(sources), layout.num_layers), np.uint64)
        large = reader.pool.gather(0, ids[1])
        pinned = torch.empty_like(large, device="cpu", pin_memory=lab.is_gpu)
        out = large.numel() * large.itemsize / lab.wall_s(lambda: pinned.copy_(large))
        whole_s = lab.wall_s(lambda: reader.reads.read(_PEER, sources, targets, 0, expected))
        lab.add(
            "G9",
            "the same read whole: to host memory as well, and checked there",
            moved / whole_s / 1e9,
            "GB/s",
            share=moved / whole_s / out,
            target="of device to host",
        )
        reader.reads.close(_PEER)
