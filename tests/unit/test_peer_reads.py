"""PeerReads over two pools on a CPU: what comes, what is told of it, and what errors leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xxhash

from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import CudaError
from moonpool.engine.device.peer_reads import PeerReads
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.streams import InlineStreams, StreamMark, Streams
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.digest import canonical_bytes
from moonpool.kv.layout import KvLayout
from moonpool.native import kernels
from support.cuda_runtime import StandInCuda, stand_in_ipc
from support.device import CPU, HeldStreams

LAYERS = 7
LAYOUT = KvLayout.block_major(
    num_blocks=12, num_layers=LAYERS, num_kv_heads=2, head_dim=8, dtype="bfloat16"
)
ORDERS = {
    "block_major": LAYOUT,
    "layer_major": KvLayout.layer_major(
        num_blocks=12, num_layers=LAYERS, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    ),
    "float8": KvLayout.block_major(
        num_blocks=12, num_layers=LAYERS, num_kv_heads=2, head_dim=8, dtype="float8_e4m3"
    ),
}


class Node:
    """A process on the GPU: its pool there, the one in host memory, and what reads peers."""

    def __init__(self, layout: KvLayout = LAYOUT, streams: Streams | None = None) -> None:
        self.layout = layout
        self.runtime: StandInCuda
        self.runtime, ipc = stand_in_ipc()
        self.pool = DevicePool(layout, CPU, memory=ipc.allocate(DevicePool.num_bytes(layout)))
        self.bytes = np.zeros(layout.pool_bytes, np.uint8)
        self.leaves = np.zeros((layout.num_blocks, LAYERS), np.uint64)
        self.held = HeldBlocks(self.leaves)
        self.reads = PeerReads(
            ipc,
            pool=self.pool,
            host=KvPool(self.bytes.data, layout),
            host_bytes=self.bytes,
            held=self.held,
            kernels=kernels(),
            streams=streams or InlineStreams(),
        )

    def fill(self) -> None:
        """Random KV on the device, and its digests."""
        values = np.random.default_rng(3).integers(0, 64, len(self.pool.memory), np.uint8)
        self.pool.memory.copy_(torch.from_numpy(values))
        for block in range(self.layout.num_blocks):
            for layer in range(LAYERS):
                self.leaves[block, layer] = xxhash.xxh3_64_intdigest(self.leaf(block, layer))

    def leaf(self, block: int, layer: int) -> bytes:
        ids = torch.tensor([block])
        return bytes(self.pool.gather(layer, ids).contiguous().view(torch.uint8).numpy())

    def open(self, peer: int, other: Node) -> None:
        offer = other.reads.offer()
        num_blocks = other.layout.num_blocks
        self.reads.open(peer, offer.ipc_handle, offer.num_bytes, num_blocks)

    def read(
        self, other: Node, sources: Sequence[int], targets: Sequence[int], layers: range
    ) -> list[tuple[int, int]]:
        """From peer 1; returns (block of ours, layer) of what is bad."""
        expected = other.leaves[list(sources), layers.start : layers.stop]
        is_bad = self.reads.read(
            1, np.array(sources), np.array(targets), layers.start, np.ascontiguousarray(expected)
        )
        return [(targets[row], layers[column]) for row, column in np.argwhere(is_bad).tolist()]


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_arrive_on_the_device_and_in_host_memory(order: str) -> None:
    layout = ORDERS[order]
    source, reader = Node(layout), Node(dataclasses.replace(layout, num_blocks=12))
    source.fill()
    reader.open(1, source)
    sources, targets = [7, 2, 11], [0, 9, 4]
    assert reader.read(source, sources, targets, range(2)) == []
    assert reader.read(source, sources, targets, range(2, LAYERS)) == []
    for theirs, ours in zip(sources, targets, strict=True):
        for layer in range(LAYERS):
            assert reader.leaf(ours, layer) == source.leaf(theirs, layer)
            copied = canonical_bytes(reader.bytes, layout, ours, layer)
            assert bytes(copied) == source.leaf(theirs, layer)
    others = [block for block in range(12) if block not in targets]
    assert not any(any(reader.leaf(block, layer)) for block in others for layer in range(LAYERS))
    reader.leaves[targets] = source.leaves[sources]
    assert reader.held.lacking(np.arange(12, dtype=np.int32)).tolist() == others
    reader.reads.close(1)
    assert reader.runtime.num_open == 0


def test_pools_of_other_lengths_are_read_and_bounds_are_each_ones_own() -> None:
    source, reader = Node(dataclasses.replace(LAYOUT, num_blocks=30)), Node()
    source.fill()
    reader.open(1, source)
    assert reader.read(source, [29], [11], range(LAYERS)) == []
    for sources, targets, layers in (
        ([30], [1], range(1)),
        ([-1], [1], range(1)),
        ([3], [12], range(1)),
        ([3], [1], range(6, 8)),
        ([3], [1], range(-1, 2)),
    ):
        expected = np.zeros((1, len(layers)), np.uint64)
        with pytest.raises(CudaError, match=r"outside its pool|layers range"):
            reader.reads.read(1, np.array(sources), np.array(targets), layers.start, expected)


def test_what_does_not_match_is_told_and_comes_in_from_host_memory() -> None:
    source, reader = Node(), Node()
    source.fill()
    reader.open(1, source)
    # The holder's device lacks what lies in its host memory: its next step takes it in.
    source.pool.layer(3)[7] = 0
    assert reader.read(source, [2, 7, 5], [0, 1, 2], range(LAYERS)) == [(1, 3)]
    reader.leaves[[0, 1, 2]] = source.leaves[[2, 7, 5]]
    assert reader.held.lacking(np.arange(3, dtype=np.int32)).tolist() == [1]


def test_layers_are_checked_as_they_reach_host_memory() -> None:
    streams = HeldStreams()
    source, reader = Node(), Node(streams=streams)
    source.fill()
    reader.open(1, source)
    assert reader.read(source, [1], [6], range(1, LAYERS)) == []
    # A layer has a mark when it is written, and one when it is copied, which is waited for.
    assert streams.num_marks == 2 * (LAYERS - 1)
    assert streams.num_reached == streams.num_marks


class _BrokenMark:
    def is_reached(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nmore words")

    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    def seconds_since(self, earlier: StreamMark) -> float:
        raise AssertionError


class BreakingStreams(InlineStreams):
    """Fails once, after some marks."""

    def __init__(self, after: int) -> None:
        self._left = after

    def mark(self) -> StreamMark:
        self._left -= 1
        return _BrokenMark() if self._left == 0 else super().mark()


@pytest.mark.parametrize("after", [2, 4, 2 * LAYERS])
def test_a_copy_that_fails_leaves_nothing_behind(after: int) -> None:
    source, reader = Node(), Node(streams=BreakingStreams(after))
    source.fill()
    reader.open(1, source)
    reader.leaves[[4, 5]] = source.leaves[[1, 2]]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        reader.read(source, [1, 2], [4, 5], range(LAYERS))
    assert reader.held.lacking(np.array([4, 5], np.int32)).tolist() == [4, 5]
    assert reader.read(source, [1, 2], [4, 5], range(LAYERS)) == []
    assert reader.held.lacking(np.array([4, 5], np.int32)).tolist() == []


def test_a_copy_that_fails_takes_away_what_was_there() -> None:
    source, reader = Node(), Node(streams=BreakingStreams(2 * LAYERS + 6))
    source.fill()
    reader.open(1, source)
    assert reader.read(source, [1], [4], range(LAYERS)) == []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        reader.read(source, [2], [4], range(LAYERS))
    # The first block's KV comes again, to host memory.
    reader.leaves[4] = source.leaves[1]
    assert reader.held.lacking(np.array([4], np.int32)).tolist() == [4]


def test_a_peer_is_opened_only_as_what_it_is() -> None:
    source, reader = Node(), Node()
    offer = source.reads.offer()
    with pytest.raises(CudaError, match="a pool of 13 blocks has"):
        reader.reads.open(1, offer.ipc_handle, offer.num_bytes, 13)
    source.runtime.end()
    with pytest.raises(CudaError, match="invalid resource handle"):
        reader.reads.open(1, offer.ipc_handle, offer.num_bytes, 12)
    with pytest.raises(CudaError, match="peer 1 is not open"):
        reader.read(source, [1], [1], range(1))
    reader.reads.close(1)


def test_all_is_closed_in_the_end_whatever_cuda_says() -> None:
    reader = Node()
    for peer in (1, 2, 3):
        reader.open(peer, Node())
    reader.runtime.errors["cudaIpcCloseMemHandle"] = 1
    reader.reads.close_all()
    with pytest.raises(CudaError, match="not open"):
        reader.read(Node(), [1], [1], range(1))
