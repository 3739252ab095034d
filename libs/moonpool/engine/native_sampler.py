"""Sampler: draws as engine/sampler.py says, in C (native/src/sample.c) where it can, else by torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moonpool.core.step import SampleSpec
from moonpool.engine.sampler import sample
from moonpool.inference.rng import uniforms
from moonpool.native import DRAW_DTYPE, Kernels


class Sampler:
    """For one thread. A row's token does not depend on what else is in the batch."""

    __slots__ = ("_native",)

    def __init__(self, kernels: Kernels) -> None:
        """`kernels` draw from float32; logits of another dtype are torch's."""
        self._native = kernels.sample_kernel()

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], largest: Tensor | None = None
    ) -> list[int | None]:
        """One token per row of `logits` float[rows, vocab], None where a row is not finite.

        `largest` is what Linear.surveyed says beside the logits: with it hardly a logit is read again.
        """
        if self._native is None or logits.dtype is not torch.float32:
            return sample(logits, specs)
        if logits.ndim != 2 or len(logits) != len(specs):
            raise ValueError(f"logits of {list(logits.shape)} for {len(specs)} rows")
        draws = np.zeros(len(specs), DRAW_DTYPE)
        drawn = [row for row, spec in enumerate(specs) if not spec.sampling.is_greedy]
        if drawn:
            params = [specs[row].sampling for row in drawn]
            draws["temperature"][drawn] = [p.temperature for p in params]
            draws["top_p"][drawn] = [p.top_p for p in params]
            draws["top_k"][drawn] = [p.top_k for p in params]
            draws["number"][drawn] = uniforms(
                [p.seed for p in params],
                [specs[row].choice for row in drawn],
                [specs[row].position for row in drawn],
            )
        logits = logits.contiguous()
        tokens: list[int] = self._native.sample(
            logits.data_ptr(), logits.shape[1], draws, 0 if largest is None else largest.data_ptr()
        ).tolist()
        return [token if token >= 0 else None for token in tokens]
