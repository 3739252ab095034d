"""Sampler: from logits to one token per row.

1. A row whose logits are not all finite yields no token.
2. Greedy rows take the highest logit, the lowest token id among equals.
3. Other rows: probabilities of logits / temperature in float64; keep the `top_k` likeliest, of those
   the smallest set that reaches `top_p` of their mass (ties go to the lower id); then the inverse
   of the cumulative distribution, in token-id order, at one uniform number (inference/rng.py).

In the order of ids, not of probabilities, a small change of logits moves the boundaries a little but
never swaps two tokens, so that two engines draw the same token unless the number lies at a boundary.
Sums are running sums, so a row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.core.step import SampleSpec
from moonpool.inference.rng import uniforms

#: Candidates looked at first for top-p; the whole vocabulary is sorted only if they do not suffice.
_NUM_CANDIDATES = 1024


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """One token per row of `logits` float[rows, vocab], None where a row is not finite."""
    is_finite = logits.sum(dim=-1, dtype=torch.float64).isfinite()
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, spec in enumerate(specs) if not spec.sampling.is_greedy]
    if drawn:
        rows = torch.tensor(drawn) if len(drawn) < len(specs) else None
        chosen = logits if rows is None else logits.index_select(0, rows)
        # A row that is not finite is dropped below; zeros keep its arithmetic quiet.
        ok = is_finite if rows is None else is_finite.index_select(0, rows)
        chosen = torch.where(ok[:, None], chosen.to(torch.float64), 0.0)
        tokens[drawn] = _draw(chosen, [specs[row] for row in drawn])
    return [
        token if ok else None for token, ok in zip(tokens.tolist(), is_finite.tolist(), strict=True)
    ]


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    params = [spec.sampling for spec in specs]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    top = logits.amax(dim=-1, keepdim=True)
    weights = ((logits - top) / temperatures[:, None]).exp_()
    if any(p.top_k or p.top_p < 1.0 for p in params):
        _filter_(weights, [p.top_k for p in params], [p.top_p for p in params])
    return draw_from_(weights, specs)


def draw_from_(weights: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """int64[rows]: the token of each row that its one uniform number falls on.

    `weights` float64[rows, vocab], not negative, need not sum to one; they are overwritten. On any
    device: the same numbers everywhere, so that a replay may cross devices.
    """
    numbers = uniforms(
        [s.sampling.seed for s in specs], [s.choice for s in specs], [s.position for s in specs]
    )
    cumulative = weights.cumsum_(dim=-1)
    targets = torch.from_numpy(numbers).to(weights.device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative weight exceeds the target: never one of weight zero.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def _filter_(weights: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> None:
    """Zeroes the weights that top-k and top-p leave out."""
    for row, (top_k, top_p) in enumerate(zip(top_ks, top_ps, strict=True)):
        if top_k or top_p < 1.0:
            _filter_row_(weights[row], top_k, top_p)


def _filter_row_(weights: Tensor, top_k: int, top_p: float) -> None:
    vocab_size = len(weights)
    limit = min(top_k or vocab_size, vocab_size)
    num_candidates = min(limit, _NUM_CANDIDATES)
    total = None if top_k else float(weights.cumsum(0)[-1])
    while True:
        candidates = weights.topk(num_candidates).values
        running = candidates.cumsum(0)
        mass = float(running[-1]) if num_candidates == limit else total
        if mass is not None and (num_candidates == limit or float(running[-1]) >= top_p * mass):
            break
        num_candidates = limit
    num_kept = num_candidates
    if top_p < 1.0:
        reached = int(torch.searchsorted(running, top_p * mass))
        num_kept = min(reached + 1, num_candidates)
    threshold = candidates[num_kept - 1]
    is_kept = weights > threshold
    num_ties = num_kept - int(is_kept.sum())
    ties = (weights == threshold).nonzero()[:num_ties, 0]
    is_kept[ties] = True
    weights.masked_fill_(~is_kept, 0.0)
