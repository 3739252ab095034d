"""Engines with random weights, and plans by hand: what is measured is the runner, not the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lab import Lab
from torch import Tensor

from moonpool.core.step import Int32Array, SampleSpec, StepPlan, StepResult, StepRow
from moonpool.engine.device.model import DeviceLayer, DeviceLinear, DeviceModel
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.runner import DeviceRunner, make_parts
from moonpool.engine.device.streams import streams_of
from moonpool.engine.device.tables import StepUpload
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.rope import RopeTable
from moonpool.hub.model_config import ModelConfig
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.layout import KvDtype, KvLayout

BLOCK = 16
GREEDY = SampleSpec(sampling=SamplingParams(temperature=0.0), position=0)
NO_BLOCKS: Int32Array = np.empty(0, np.int32)


class NoMark:
    """A LayerMark that nobody reads."""

    def layer_done(self, layer: int) -> None:
        return


def random_model(config: ModelConfig, device: torch.device, num_positions: int) -> DeviceModel:
    """bfloat16 weights whose products keep their size from layer to layer; never zeros."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return weight.normal_(std=columns**-0.5, generator=generator)

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)

    hidden, middle = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    layers = tuple(
        DeviceLayer(
            attention_norm=norm(),
            qkv=DeviceLinear(weight=matrix(qkv, hidden)),
            attention_out=DeviceLinear(weight=matrix(hidden, query)),
            mlp_norm=norm(),
            gate_up=DeviceLinear(weight=matrix(2 * middle, hidden)),
            down=DeviceLinear(weight=matrix(hidden, middle)),
        )
        for _ in range(config.num_layers)
    )
    return DeviceModel(
        config=config,
        dtype=torch.bfloat16,
        embedding=matrix(config.vocab_size, hidden),
        layers=layers,
        final_norm=norm(),
        lm_head=DeviceLinear(weight=matrix(config.vocab_size, hidden)),
        rope=RopeTable(config, num_positions).halves().to(device),
    )


def num_matmul_parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied by, the head left out."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query + 2 * kv)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def pool_layout(config: ModelConfig, num_blocks: int, dtype: KvDtype = "bfloat16") -> KvLayout:
    return config.kv_layout(num_blocks, dtype, BLOCK)


def fill(pool: DevicePool) -> None:
    """Random keys and values everywhere."""
    for layer in range(pool.num_layers):
        pool.layer(layer).normal_()


class RandomEngine:
    """A runner over pools of its own, on the current stream."""

    def __init__(
        self,
        lab: Lab,
        model: DeviceModel,
        num_blocks: int,
        *,
        graph_batch_sizes: tuple[int, ...] = (),
        max_model_len: int = 8_192,
    ) -> None:
        layout = pool_layout(model.config, num_blocks)
        self.pool = DevicePool(layout, lab.device)
        # Not touched before something leaves: most engines here keep all they have on the device.
        self.host = KvPool(np.zeros(layout.pool_bytes, np.uint8).data, layout)
        upload = StepUpload(lab.device)
        self.parts = make_parts(
            model,
            self.pool,
            upload,
            flashinfer=lab.flashinfer,
            graph_batch_sizes=graph_batch_sizes if lab.flashinfer is not None else (),
            max_model_len=max_model_len,
        )
        self.streams = streams_of(lab.device)
        self.runner = DeviceRunner(
            model,
            self.pool,
            self.host,
            upload=upload,
            parts=self.parts,
            streams=self.streams,
            max_num_seqs=256,
        )
        self._vocab_size = model.config.vocab_size

    def run(
        self,
        rows: Sequence[StepRow],
        *,
        leaving: Int32Array = NO_BLOCKS,
        arriving: Int32Array = NO_BLOCKS,
    ) -> StepResult:
        plan = StepPlan(
            step=1,
            rows=tuple(rows),
            leaf_block_ids=leaving,
            zero_tails=np.empty((0, 2), np.int32),
            arrived_block_ids=arriving,
        )
        return self.runner.run(plan, NoMark())

    def decodes(self, batch: int, context: int) -> list[StepRow]:
        """Rows of one token, each in blocks of its own, from block 0 on, in no order."""
        per_row = -(-context // BLOCK)
        tables = np.random.default_rng(2).permutation(batch * per_row).reshape(batch, per_row)
        return [
            row(slot, context - 1, np.array([7 + slot], np.int32), tables[slot])
            for slot in range(batch)
        ]

    def prefill(
        self, num_tokens: int, *, start: int = 0, first_block: int = 0, slot: int = 255
    ) -> StepRow:
        """Tokens [start, start + num_tokens) of a prompt that lies in blocks from `first_block` on."""
        ids = np.random.default_rng(3).integers(0, self._vocab_size, num_tokens).astype(np.int32)
        num_blocks = -(-(start + num_tokens) // BLOCK)
        return row(slot, start, ids, np.arange(first_block, first_block + num_blocks))


def row(slot: int, start: int, token_ids: Int32Array, blocks: np.ndarray) -> StepRow:
    return StepRow(
        slot=slot,
        start=start,
        num_tokens=len(token_ids),
        token_ids=token_ids,
        block_tables=(blocks.astype(np.int32),),
        sample=GREEDY,
    )
