"""DeviceKernels: what stands between a layer's products and its attention; here by plain torch.

Arithmetic is in float32 inside of a kernel, whatever the dtype of its rows, as in FlashInfer's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.tables import DeviceBatch


class DeviceKernels(Protocol):
    """Rows are [n, size], heads [n, heads, head_dim] with rows of any stride."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight."""
        ...

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum, perhaps in x's memory."""
        ...

    def rotate_(self, positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> None:
        """Rotates heads in place by `table` float32[positions, head_dim] (RopeTable.halves)."""
        ...

    def append(
        self, pool: DevicePool, layer: int, key: Tensor, value: Tensor, batch: DeviceBatch
    ) -> None:
        """Stores each token's heads where the batch's tables say, in the pool's dtype."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [n, size] for the two side by side, [n, 2 * size]."""
        ...

    def keep_likeliest(self, probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """bool[rows, vocab]: the `top_k` likeliest, of those the fewest that reach `top_p` of their mass.

        `probabilities` float32[rows, vocab]; `top_k` int32[rows] in [1, vocab]; `top_p` float32[rows]
        in (0, 1]. Who is kept among equals at the edge is up to the kernel.
        """
        ...


class TorchKernels:
    """DeviceKernels on any device."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def rotate_(self, positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> None:
        cos, sin = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        for heads in (query, key):
            first, second = heads.float().chunk(2, dim=-1)
            rotated = (first * cos - second * sin, second * cos + first * sin)
            heads.copy_(torch.cat(rotated, dim=-1))

    def append(
        self, pool: DevicePool, layer: int, key: Tensor, value: Tensor, batch: DeviceBatch
    ) -> None:
        rows, positions = batch.row_of_token, batch.positions
        blocks = batch.kv_indices[batch.kv_indptr[rows] + positions // pool.block_size]
        offsets = positions % pool.block_size
        pool.put(layer, blocks, offsets, torch.stack((key, value), dim=1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)

    def keep_likeliest(self, probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        # Stable: among equals the lower token id comes first, as on the CPU.
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        is_kept = (ranks < top_k[:, None]) & (ordered > 0)
        mass = torch.where(is_kept, ordered, 0.0).double()
        before = mass.cumsum(dim=-1) - mass
        is_needed = before < top_p[:, None] * mass.sum(dim=-1, keepdim=True)
        is_kept &= is_needed | (top_p[:, None] >= 1.0)
        return torch.zeros_like(is_kept).scatter_(-1, order, is_kept)
