"""The device half of the engine on torch's CPU, with torch's kernels or FlashInfer's stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.model import DeviceModel, load_device_model
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.runner import DeviceRunner, make_parts
from moonpool.engine.device.streams import InlineStreams, StreamMark, Streams
from moonpool.engine.device.tables import StepUpload
from moonpool.engine.kv_pool import TORCH_DTYPES, KvPool
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvDtype, KvLayout

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CPU = torch.device("cpu")


class DeviceEngine:
    """A DeviceRunner, its own pool, and the one that others see."""

    def __init__(
        self,
        model_dir: ModelDir,
        *,
        flashinfer: ModuleType | None = None,
        graph_batch_sizes: tuple[int, ...] = (),
        dtype: KvDtype = "float32",
        num_blocks: int = 64,
        layout: KvLayout | None = None,
        buffer: WriteableBuffer | None = None,
        streams: Streams | None = None,
        model: DeviceModel | None = None,
        memory: torch.Tensor | None = None,
        held: HeldBlocks | None = None,
    ) -> None:
        layout = layout or model_dir.config.kv_layout(num_blocks, dtype)
        self.layout = layout
        self.buffer = bytearray(0 if buffer is not None else layout.pool_bytes)
        self.host = KvPool(self.buffer if buffer is None else buffer, layout)
        self.pool = DevicePool(layout, CPU, memory=memory)
        upload = StepUpload(CPU)
        self.model = model or load_device_model(model_dir, CPU, dtype=TORCH_DTYPES[dtype])
        self.parts = make_parts(
            self.model,
            self.pool,
            upload,
            flashinfer=flashinfer,
            graph_batch_sizes=graph_batch_sizes,
            max_model_len=512,
        )
        self.runner = DeviceRunner(
            self.model,
            self.pool,
            self.host,
            upload=upload,
            parts=self.parts,
            streams=streams or InlineStreams(),
            max_num_seqs=16,
            held=held,
        )


class HeldMark:
    """A mark that is reached when the test says so, or when somebody waits for it."""

    def __init__(self, owner: HeldStreams, number: int) -> None:
        self._owner = owner
        self.number = number

    def is_reached(self) -> bool:
        return self.number <= self._owner.num_reached

    def wait(self) -> None:
        self._owner.waits.append(self.number)
        self._owner.num_reached = max(self._owner.num_reached, self.number)

    def seconds_since(self, earlier: Any) -> float:
        return float(self.number - earlier.number)


class HeldStreams:
    """Streams whose work is done at once and seems to be under way: marks are numbered from 1."""

    def __init__(self) -> None:
        self.num_marks = 0
        self.num_reached = 0
        self.waits: list[int] = []
        self.held: list[int] = []

    def mark(self) -> HeldMark:
        self.num_marks += 1
        return HeldMark(self, self.num_marks)

    @contextlib.contextmanager
    def _side(self) -> Iterator[None]:
        yield

    def side(self, after: StreamMark | None = None) -> AbstractContextManager[None]:
        return self._side()

    def hold(self, mark: StreamMark) -> None:
        assert isinstance(mark, HeldMark), mark
        self.held.append(mark.number)
