"""The sampler's draw, on the device: the same number, the same order of tokens as sampler.py.

What may differ from a CPU is rounding: of logits, since the model is computed in bfloat16, and of who
stands last in top-k and top-p, which kernels decide in float32 (among equals by their own lights).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.core.step import SampleSpec
from moonpool.engine.device.kernels import DeviceKernels
from moonpool.engine.sampler import draw_from_

#: In place of a token: the row's logits were not finite.
NOT_FINITE = -1


def sample_on_device(logits: Tensor, specs: Sequence[SampleSpec], kernels: DeviceKernels) -> Tensor:
    """int64[rows] on the device, not waited for: a token each, or NOT_FINITE."""
    logits = logits.float()
    is_finite = logits.sum(dim=-1, dtype=torch.float64).isfinite()
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, spec in enumerate(specs) if not spec.sampling.is_greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        # A row that is not finite is dropped below; zeros keep its arithmetic quiet.
        chosen = torch.where(is_finite[rows, None], logits[rows], 0.0)
        tokens[rows] = _draw(chosen, [specs[row] for row in drawn], kernels)
    return torch.where(is_finite, tokens, NOT_FINITE)


def _draw(logits: Tensor, specs: Sequence[SampleSpec], kernels: DeviceKernels) -> Tensor:
    params = [spec.sampling for spec in specs]
    device, vocab_size = logits.device, logits.shape[-1]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    top = logits.amax(dim=-1, keepdim=True)
    weights = ((logits - top).double() / temperatures[:, None]).exp_()
    if any(p.top_k or p.top_p < 1.0 for p in params):
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        is_kept = kernels.keep_likeliest(
            (weights / weights.sum(dim=-1, keepdim=True)).float(),
            torch.tensor(top_k, dtype=torch.int32, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        )
        weights.masked_fill_(~is_kept, 0.0)
    return draw_from_(weights, specs)
