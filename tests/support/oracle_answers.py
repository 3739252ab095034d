"""What a model answers in this process, one core over the real engine: to judge clusters by."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moonpool.ids import RequestId
from moonpool.inference.generation import SamplingDefaults, resolve_sampling
from moonpool.inference.request import InferenceRequest
from moonpool_loadtest.faults.workload import Case
from support.engine import generate, make_core, make_runner, open_tiny

_NUM_BLOCKS = 1_024
_MAX_NUM_SEQS = 16


def answers_in_process(model: Path, cases: Iterable[Case]) -> dict[str, list[int]]:
    """Tokens by case. In float32, whatever the batch.

    Args:
        model: Directory of a small model.
    """
    model_dir = open_tiny(model)
    runner = make_runner(model_dir, num_blocks=_NUM_BLOCKS, max_num_seqs=_MAX_NUM_SEQS)
    core = make_core(_NUM_BLOCKS, max_num_seqs=_MAX_NUM_SEQS, is_checked=False)
    requests = {case.name: _request(case, model_dir.config.vocab_size) for case in cases}
    answers = generate(core, runner, list(requests.values()))
    return dict(zip(requests, answers, strict=True))


def _request(case: Case, vocab_size: int) -> InferenceRequest:
    return InferenceRequest(
        request_id=RequestId(case.name),
        model="test",
        prompt_token_ids=case.prompt,
        sampling=resolve_sampling(
            case.request(deadline_s=1.0).options,
            defaults=SamplingDefaults(),
            num_prompt_tokens=len(case.prompt),
            max_model_len=len(case.prompt) + case.max_tokens,
            vocab_size=vocab_size,
            minted_seed=0,
        ),
        arrival_unix_s=0.0,
    )
