"""Builders of requests with defaults: a test names only what matters to it."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.ids import RequestId
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams


def make_request(
    request_id: str = "r1",
    *,
    prompt: Iterable[int] | int = 6,
    emitted: Iterable[int] = (),
    max_tokens: int = 4,
    arrival: float = 0.0,
    seed: int = 0,
    temperature: float = 0.0,
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    tenant: str = "default",
) -> InferenceRequest:
    """A request; an int as prompt gives that many tokens, which differ between request ids."""
    if isinstance(prompt, int):
        base = sum(request_id.encode()) * 7
        prompt = [(base + 3 * i) % 997 for i in range(prompt)]
    return InferenceRequest(
        request_id=RequestId(request_id),
        model="fake",
        prompt_token_ids=tuple(prompt),
        emitted_token_ids=tuple(emitted),
        arrival_unix_s=arrival,
        tenant=tenant,
        sampling=SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        ),
    )
