"""HostStaging: between the device's pool and the pool in host memory, which is what others read.

Block ids are the same in both. A block that is final leaves for host memory before its digest is
written, so that peers, stores and transports see what they see of a worker on a CPU. A block that a
peer's KV was read into comes to the device before anything there reads it.

Both ways go layer by layer, all blocks of a layer in one copy, on the side stream:

    out   gather (device, one kernel) -> pinned buffer (one copy) -> rows of the host pool (this thread)
    in    rows of the host pool (this thread) -> pinned buffer -> device (one copy) -> scatter (one kernel)

The life of a step:

    1. begin          which blocks come, which leave
    2. before_layer   layer i of what comes is under way, and the main stream waits for it
    3. after_layer    the KV of layer i is asked for; marks whichever layers have reached host memory
    4. finish         waits for the rest, marking layer after layer

Rules
- Layers are marked in order, each when its blocks lie in host memory: `mark` writes digests from there.
- The device never waits for this thread: a copy out is asked for when it has a buffer.
- This thread waits in before_layer for a buffer of an earlier layer, and in finish; nowhere else.

Not done here: registering the host pool itself with the GPU, which would spare this thread the rows; it
is to be measured first.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonpool.core.step import Int32Array, LayerMark
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.streams import StreamMark, Streams
from moonpool.engine.kv_pool import KvPool, moved_as

#: Pinned buffers each way: the copies that may be under way while this thread moves rows.
_NUM_BUFFERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Some blocks, as both pools are told of them."""

    num_blocks: int
    #: int64[n] on the device.
    on_device: Tensor
    #: Rows of the host pool (KvPool.head_index).
    on_host: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Departure:
    """A layer whose KV was asked for. `copy` is None until it has a buffer, or if nothing leaves."""

    layer: int
    written: StreamMark
    copied: StreamMark | None = None
    buffer: Tensor | None = None


class _Buffers:
    """Pinned memory for a few layers of some blocks, used in turn."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._buffers: list[Tensor] = []
        self._num_blocks = 0

    def make_room(self, num_blocks: int) -> None:
        """Each buffer holds at least so many blocks. None may be in use."""
        if num_blocks > self._num_blocks:
            pool = self._pool
            self._num_blocks = 1 << (num_blocks - 1).bit_length()
            block = 2 * pool.num_kv_heads * pool.block_size * pool.head_dim
            self._buffers = [
                torch.empty(
                    self._num_blocks * block,
                    dtype=moved_as(pool.dtype),
                    pin_memory=pool.device.type == "cuda",
                )
                for _ in range(_NUM_BUFFERS)
            ]

    def at(self, layer: int, blocks: _Blocks) -> Tensor:
        """[2, n, kv_heads, tokens, head_dim] in the memory whose turn it is."""
        pool = self._pool
        shape = (2, blocks.num_blocks, pool.num_kv_heads, pool.block_size, pool.head_dim)
        return self._buffers[layer % _NUM_BUFFERS][: math.prod(shape)].view(shape)


class HostStaging:
    """See the module. One step at a time."""

    def __init__(self, pool: DevicePool, host: KvPool, streams: Streams) -> None:
        """Both pools have one layout."""
        self._pool = pool
        self._host = host
        self._streams = streams
        self._buffers_in = _Buffers(pool)
        self._buffers_out = _Buffers(pool)
        self._arriving: _Blocks | None = None
        self._leaving: _Blocks | None = None
        self._mark: LayerMark | None = None
        #: Of each arrival of this step, by layer.
        self._arrivals: list[StreamMark] = []
        #: Layers not yet marked, in order; the first of them are being copied.
        self._departures: deque[_Departure] = deque()
        #: Layers before this one are marked, or none of this step's.
        self._num_marked = 0
        self._end_layer = pool.num_layers

    def begin(
        self,
        arriving: Int32Array,
        leaving: Int32Array,
        mark: LayerMark,
        *,
        layers: range | None = None,
    ) -> None:
        """A step begins. Nothing of the step before is outstanding.

        Args:
            layers: Those that `after_layer` is called for; all if None.
        """
        assert not self._departures, self._departures
        layers = range(self._pool.num_layers) if layers is None else layers
        self._arriving = self._describe(arriving, self._buffers_in)
        self._leaving = self._describe(leaving, self._buffers_out)
        self._mark = mark
        self._arrivals = []
        self._num_marked, self._end_layer = layers.start, layers.stop

    def before_layer(self, layer: int) -> None:
        """Brings in what arrived of `layer`; work of the main stream from here on sees it."""
        blocks = self._arriving
        if blocks is None:
            return
        if layer >= _NUM_BUFFERS:
            self._arrivals[layer - _NUM_BUFFERS].wait()
        buffer = self._buffers_in.at(layer, blocks)
        self._host.read_into(layer, blocks.on_host, buffer)
        with self._streams.side():
            arrived = buffer.to(self._pool.device, non_blocking=True)
            self._pool.scatter(layer, blocks.on_device, arrived)
            mark = self._streams.mark()
        self._arrivals.append(mark)
        self._streams.hold(mark)

    def bring_all_in(self) -> None:
        """All layers of what arrived: for a step that is not computed layer by layer."""
        for layer in range(self._pool.num_layers):
            self.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """All of `layer`'s KV of this step was asked for of the main stream."""
        self._departures.append(_Departure(layer=layer, written=self._streams.mark()))
        self._start_copies()
        while self._departures and self._has_left(self._departures[0]):
            self._mark_first()

    def finish(self) -> None:
        """Returns when every layer is marked."""
        while self._departures:
            first = self._departures[0]
            (first.copied or first.written).wait()
            self._mark_first()
        assert self._num_marked == self._end_layer, self._num_marked

    def _describe(self, block_ids: Int32Array, buffers: _Buffers) -> _Blocks | None:
        if len(block_ids) == 0:
            return None
        ids = block_ids.astype(np.int64)
        buffers.make_room(len(ids))
        return _Blocks(
            num_blocks=len(ids),
            on_device=torch.from_numpy(ids).to(self._pool.device),
            on_host=self._host.head_index(ids[:, None]),
        )

    def _has_left(self, departure: _Departure) -> bool:
        return (departure.copied or departure.written).is_reached()

    def _start_copies(self) -> None:
        """Copies out for as many of the first layers as there are buffers."""
        blocks = self._leaving
        if blocks is None:
            return
        for place in range(min(_NUM_BUFFERS, len(self._departures))):
            if self._departures[place].copied is None:
                self._departures[place] = self._copy_out(self._departures[place], blocks)

    def _copy_out(self, departure: _Departure, blocks: _Blocks) -> _Departure:
        with self._streams.side(after=departure.written):
            kv = self._pool.gather(departure.layer, blocks.on_device)
            buffer = self._buffers_out.at(departure.layer, blocks)
            buffer.copy_(kv, non_blocking=True)
            copied = self._streams.mark()
        return _Departure(
            layer=departure.layer, written=departure.written, copied=copied, buffer=buffer
        )

    def _mark_first(self) -> None:
        departure = self._departures.popleft()
        if self._leaving is not None:
            assert departure.buffer is not None, departure
            self._host.store(departure.layer, self._leaving.on_host, departure.buffer)
        assert self._mark is not None, "no step has begun"
        assert departure.layer == self._num_marked, (departure.layer, self._num_marked)
        self._num_marked += 1
        self._mark.layer_done(departure.layer)
        self._start_copies()
