"""HostStaging while copies are under way: the order of marks, and who waits for whom."""

from __future__ import annotations

import numpy as np
import torch

from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.staging import HostStaging
from moonpool.engine.kv_pool import KvPool
from moonpool.kv.layout import KvLayout
from support.device import CPU, HeldStreams
from support.engine import NoMark

LAYERS = 6
LAYOUT = KvLayout.block_major(
    num_blocks=8, num_layers=LAYERS, num_kv_heads=2, head_dim=8, dtype="bfloat16"
)
NONE = np.empty(0, np.int32)


class Staged:
    """Both pools, the device's filled with values that tell block and layer."""

    def __init__(self) -> None:
        self.pool = DevicePool(LAYOUT, CPU)
        self.host = KvPool(bytearray(LAYOUT.pool_bytes), LAYOUT)
        self.streams = HeldStreams()
        self.staging = HostStaging(self.pool, self.host, self.streams)
        self.mark = NoMark()

    def fill_device(self) -> None:
        for layer in range(LAYERS):
            for block in range(8):
                self.pool.layer(layer)[block] = layer * 8 + block

    def host_value(self, layer: int, block: int) -> float:
        return float(self.host.read(layer, self.host.head_index(np.array([[block]])), 1).mean())


def test_layers_are_marked_in_order_as_their_copies_end() -> None:
    staged = Staged()
    staged.fill_device()
    staged.staging.begin(NONE, np.array([5, 2], np.int32), staged.mark)
    for layer in range(LAYERS):
        staged.staging.after_layer(layer)
    # Three buffers, so three copies: marks 1, 3, 5 say written, 2, 4, 6 copied, the rest written.
    assert staged.mark.layers == []
    assert staged.streams.num_marks == LAYERS + 3
    staged.streams.num_reached = 4
    staged.staging.finish()
    assert staged.mark.layers == list(range(LAYERS))
    assert [staged.host_value(layer, 5) for layer in range(LAYERS)] == [
        layer * 8 + 5 for layer in range(LAYERS)
    ]
    assert [staged.host_value(layer, 2) for layer in range(LAYERS)] == [
        layer * 8 + 2 for layer in range(LAYERS)
    ]
    assert staged.host_value(0, 3) == 0.0


def test_what_has_ended_is_marked_while_later_layers_are_asked_for() -> None:
    staged = Staged()
    staged.staging.begin(NONE, np.array([1], np.int32), staged.mark)
    staged.staging.after_layer(0)
    assert staged.mark.layers == []
    staged.streams.num_reached = staged.streams.num_marks
    staged.staging.after_layer(1)
    assert staged.mark.layers == [0]
    assert staged.streams.waits == []


def test_without_blocks_that_leave_a_mark_waits_for_its_layer_only() -> None:
    staged = Staged()
    staged.staging.begin(NONE, NONE, staged.mark)
    for layer in range(LAYERS):
        staged.staging.after_layer(layer)
    assert staged.mark.layers == []
    staged.staging.finish()
    assert staged.mark.layers == list(range(LAYERS))
    assert staged.streams.num_marks == LAYERS


def test_what_arrived_comes_layer_by_layer_and_the_main_stream_waits_for_it() -> None:
    staged = Staged()
    values = torch.arange(2 * 2 * 2 * 16 * 8).view(2, 2, 2, 16, 8).remainder(64).to(torch.bfloat16)
    index = staged.host.head_index(np.array([[6], [1]]))
    for layer in range(LAYERS):
        staged.host.store(layer, index, values + layer)
    staged.staging.begin(np.array([6, 1], np.int32), NONE, staged.mark)
    staged.staging.before_layer(0)
    assert staged.streams.held == [1]
    assert torch.equal(staged.pool.layer(0)[6], values[:, 0])
    assert torch.equal(staged.pool.layer(0)[1], values[:, 1])
    assert not staged.pool.layer(1).any()
    for layer in range(1, LAYERS):
        staged.staging.before_layer(layer)
        assert torch.equal(staged.pool.layer(layer)[1], values[:, 1] + layer)
    # A buffer is written again only when the copy out of it has ended.
    assert staged.streams.waits == [1, 2, 3]
    assert staged.streams.held == [1, 2, 3, 4, 5, 6]
    assert not staged.pool.layer(0)[5].any()


def test_buffers_grow_between_steps() -> None:
    staged = Staged()
    staged.fill_device()
    for blocks in ([0], [3, 1, 7, 2, 0], [4, 5]):
        staged.staging.begin(NONE, np.array(blocks, np.int32), staged.mark)
        for layer in range(LAYERS):
            staged.staging.after_layer(layer)
        staged.staging.finish()
        for block in blocks:
            assert staged.host_value(LAYERS - 1, block) == (LAYERS - 1) * 8 + block
