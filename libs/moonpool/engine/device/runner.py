"""DeviceRunner: implements core.step.Runner on a device whose pool is its own.

    plan -> StepBatch (numpy) -> one upload -> attention.plan -> model.forward -> lm_head -> sample
                                                    |  ^
                               before/after_layer   v  |
                                               HostStaging <-> the pool in host memory -> mark

What peers, stores and the service process see is the pool in host memory, as on a CPU. A step asks for
all of its work first and waits at its end: for its blocks in host memory, then for its tokens. Decode
steps that fit one of its graphs are asked for at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from torch import Tensor

from moonpool.core.step import (
    Int32Array,
    LayerMark,
    SampleSpec,
    StepPlan,
    StepResult,
    StepRow,
    StepTiming,
)
from moonpool.engine.attention import AttentionBackend
from moonpool.engine.batch import Int64Array, StepBatch, build_batch
from moonpool.engine.device.attention import GatheredAttention
from moonpool.engine.device.flashinfer import (
    HEAD_DIMS,
    FlashInferAttention,
    FlashInferKernels,
    find_flashinfer,
    make_workspace,
)
from moonpool.engine.device.graphs import DecodeGraphs, graph_sizes
from moonpool.engine.device.held import HeldBlocks
from moonpool.engine.device.ipc import SharedMemory
from moonpool.engine.device.kernels import DeviceKernels, TorchKernels
from moonpool.engine.device.model import DeviceModel, load_device_model
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.sampling import NOT_FINITE, sample_on_device
from moonpool.engine.device.staging import HostStaging
from moonpool.engine.device.streams import Streams, streams_of
from moonpool.engine.device.tables import StepUpload
from moonpool.engine.kv_pool import TORCH_DTYPES, KvPool
from moonpool.errors import ConfigError
from moonpool.hub.model_dir import ModelDir
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.layout import KvDtype, KvLayout

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = structlog.get_logger("moonpool.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """What computes on a device: FlashInfer's, or torch's where that is missing."""

    kernels: DeviceKernels
    attention: AttentionBackend
    #: None: each step is asked for kernel by kernel.
    graphs: DecodeGraphs | None = None


class DeviceRunner:
    """Runs plans over one pool. Not thread-safe; one plan at a time."""

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        host: KvPool,
        *,
        upload: StepUpload,
        parts: DeviceParts,
        streams: Streams,
        max_num_seqs: int,
        held: HeldBlocks | None = None,
    ) -> None:
        """`upload` is the one that `parts.attention` plans from. Both pools have one layout.

        Args:
            held: What a PeerReads over this pool notes; None if there is none.
        """
        config = model.config
        shape = (pool.num_layers, pool.num_kv_heads, pool.head_dim)
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if shape != expected:
            raise ValueError(f"layout has (layers, KV heads, head size) {shape}, model {expected}")
        self._model = model
        #: Of both, whoever copies beside steps may write blocks that are in no step.
        self.pool, self.host = pool, host
        self._upload = upload
        self._parts = parts
        self._streams = streams
        self._staging = HostStaging(pool, host, streams)
        self._held = held
        #: Last token drawn into each slot.
        self._last_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        """Computes the plan; `mark.layer_done` is called once for every layer, in order."""
        with torch.inference_mode():
            return self._run(plan, mark)

    def _run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        started = time.perf_counter()
        batch = build_batch(plan, self._last_tokens, self.pool.block_size)
        self.pool.clear_tails(plan.zero_tails)
        self._staging.begin(self._arriving(plan, batch), plan.leaf_block_ids, mark)
        begun = self._streams.mark()
        logits = self._logits(batch)
        headed = self._streams.mark()
        drawn = None
        if logits is not None:
            drawn = sample_on_device(logits, batch.samples, self._parts.kernels)
        sampled = self._streams.mark()
        self._staging.finish()
        tokens = [] if drawn is None else drawn.tolist()
        sampled.wait()
        for slot, token in zip(batch.sample_slots.tolist(), tokens, strict=True):
            if token != NOT_FINITE:
                self._last_tokens[slot] = token
        forward_s, sample_s = headed.seconds_since(begun), sampled.seconds_since(headed)
        elapsed_s = time.perf_counter() - started
        return StepResult(
            step=plan.step,
            tokens=tuple(() if token == NOT_FINITE else (token,) for token in tokens),
            timing=StepTiming(
                # Logits included: nobody waits between the two.
                forward_s=forward_s,
                sample_s=sample_s,
                other_s=max(0.0, elapsed_s - forward_s - sample_s),
            ),
        )

    def _arriving(self, plan: StepPlan, batch: StepBatch) -> Int32Array:
        """What arrived and is not here yet. What this step writes is nobody else's any more."""
        if self._held is None:
            return plan.arrived_block_ids
        arriving = self._held.lacking(plan.arrived_block_ids)
        self._held.forget(arriving)
        self._held.forget(batch.block_ids)
        return arriving

    def _logits(self, batch: StepBatch) -> Tensor | None:
        """[samples, vocab], asked for; None if nothing is sampled."""
        parts, staging = self._parts, self._staging
        size = parts.graphs.size_for(batch) if parts.graphs is not None else None
        if parts.graphs is not None and size is not None:
            staging.bring_all_in()
            logits = parts.graphs.run(batch, size)
            for layer in range(self.pool.num_layers):
                staging.after_layer(layer)
            return logits
        step = self._upload.send(batch)
        parts.attention.plan(batch.pages)
        hidden = self._model.forward(
            step,
            pool=self.pool,
            attention=parts.attention,
            kernels=parts.kernels,
            before_layer=staging.before_layer,
            after_layer=staging.after_layer,
        )
        return None if hidden is None else self._model.lm_head(hidden)


def make_parts(
    model: DeviceModel,
    pool: DevicePool,
    upload: StepUpload,
    *,
    flashinfer: ModuleType | None,
    graph_batch_sizes: tuple[int, ...] = (),
    max_model_len: int = 0,
) -> DeviceParts:
    """FlashInfer's parts if it is given, and graphs for these sizes; else torch's, without graphs."""
    if flashinfer is None:
        return DeviceParts(kernels=TorchKernels(), attention=GatheredAttention(pool))
    graphs = None
    if graph_batch_sizes:
        with torch.inference_mode():
            graphs = DecodeGraphs(
                flashinfer, model, pool, sizes=graph_batch_sizes, max_model_len=max_model_len
            )
    attention = FlashInferAttention(
        flashinfer,
        pool,
        upload,
        num_heads=model.config.num_heads,
        dtype=model.dtype,
        workspace=make_workspace(pool.device),
    )
    return DeviceParts(kernels=FlashInferKernels(flashinfer), attention=attention, graphs=graphs)


def open_gpu(device: str) -> torch.device:
    """The GPU, as this thread's current one. Raises ConfigError: there is no such GPU here."""
    where = torch.device(device)
    if not torch.cuda.is_available():
        raise ConfigError(f"device = {device!r}: torch {torch.__version__} finds no GPU here")
    if (where.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = {device!r}: there are {torch.cuda.device_count()} GPUs here")
    torch.cuda.set_device(where)
    return where


def load_device_runner(
    model_dir: ModelDir,
    buffer: WriteableBuffer,
    layout: KvLayout,
    *,
    device: str,
    dtype: KvDtype,
    max_num_seqs: int,
    max_model_len: int,
    num_threads: int = 1,
    shared: SharedMemory | None = None,
    held: HeldBlocks | None = None,
) -> DeviceRunner:
    """Loads the model onto a GPU and binds it to a pool there, beside `buffer` in host memory.

    Sets torch's threads for this process: they move rows between pinned memory and `buffer`.

    Args:
        shared: Where the pool's memory comes from, if peers are to read it.
        held: What a PeerReads over the pool notes, if there is to be one.

    Raises:
        ConfigError: there is no such GPU here.
        CudaError: It does not have the memory.
        ModelError: the model's files are damaged or do not fit its configuration.
        ValueError: the layout is not this model's, or the buffer is too small.
    """
    torch.set_num_threads(num_threads)
    where = open_gpu(device)
    flashinfer = find_flashinfer()
    head_dim = model_dir.config.head_dim
    if flashinfer is not None and head_dim not in HEAD_DIMS:
        log.warning("engine.flashinfer_unfit", head_dim=head_dim, falls_back_to="torch")
        flashinfer = None
    model = load_device_model(
        model_dir, where, dtype=TORCH_DTYPES[dtype], num_positions=max_model_len
    )
    memory = shared.allocate(DevicePool.num_bytes(layout)) if shared is not None else None
    pool, upload = DevicePool(layout, where, memory=memory), StepUpload(where)
    parts = make_parts(
        model,
        pool,
        upload,
        flashinfer=flashinfer,
        graph_batch_sizes=graph_sizes(max_num_seqs),
        max_model_len=max_model_len,
    )
    runner = DeviceRunner(
        model,
        pool,
        KvPool(buffer, layout),
        upload=upload,
        parts=parts,
        streams=streams_of(where),
        max_num_seqs=max_num_seqs,
        held=held,
    )
    warm_up(runner, pool)
    log.info("engine.device", device=torch.cuda.get_device_name(where), kernels=parts.kernels.name)
    return runner


class _NoMark:
    """A LayerMark that nobody reads."""

    def layer_done(self, layer: int) -> None:
        return


def warm_up(runner: DeviceRunner, pool: DevicePool) -> None:
    """Runs a chunk and a token of nobody: kernels are compiled and loaded now, or fail now."""
    spec = SampleSpec(sampling=SamplingParams(temperature=0.7, top_k=5, top_p=0.9), position=0)
    block_table = np.array([pool.scratch_block], dtype=np.int32)

    def row(num_tokens: int) -> StepRow:
        return StepRow(
            slot=0,
            start=0,
            num_tokens=num_tokens,
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            block_tables=(block_table,),
            sample=spec,
        )

    plan = StepPlan(
        step=0,
        rows=(row(1), row(2)),
        leaf_block_ids=np.empty(0, dtype=np.int32),
        zero_tails=np.empty((0, 2), dtype=np.int32),
    )
    runner.run(plan, _NoMark())
