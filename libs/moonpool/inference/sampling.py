"""Sampling parameters: what changes which token is drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Values are in range here.

    A client's are checked by `resolve_sampling` (inference/generation.py), a router's by the worker that
    reads them (wire/request.py).
    """

    #: 0 means greedy: the highest logit, the lowest token id among equals.
    temperature: float = 1.0
    #: Keep the smallest set of tokens whose probability reaches this. 1 keeps all.
    top_p: float = 1.0
    #: Keep the k likeliest tokens. 0 keeps all.
    top_k: int = 0
    #: 64 bits. A request without one gets one at admission, so that a replay draws the same tokens.
    seed: int = 0
    #: Upper bound of new tokens, those of earlier attempts (`emitted`) included.
    max_tokens: int = 16
    #: Do not stop at the model's end-of-sequence tokens.
    ignore_eos: bool = False
    #: Token ids that end the answer, beside the model's own; the stop token is not part of the text.
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
