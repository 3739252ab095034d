"""One tenant's KV in a real model's pool, poisoned: the other tenant's tokens do not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moonpool.hub.model_dir import ModelDir
from moonpool.inference.sampling import SamplingParams
from support.engine import generate, make_core, make_requests, make_runner, open_tiny
from support.tiny_llama import TinyLlama, write_tiny_llama

NUM_BLOCKS = 24
SAMPLING = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
#: Two equal blocks, then chains part; the last blocks are partly filled.
PROMPTS = ([*range(5, 42), 7], [*range(5, 37), 50, 51, 52], [*range(60, 64)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    path: Path = tmp_path_factory.mktemp("tenants") / "tiny"
    return open_tiny(write_tiny_llama(path, TinyLlama()))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30], ids=str)
def test_poisoned_blocks_of_one_tenant_change_no_token_of_another(
    model_dir: ModelDir, poison: float
) -> None:
    expected = generate(
        make_core(NUM_BLOCKS),
        make_runner(model_dir, num_blocks=NUM_BLOCKS),
        make_requests(PROMPTS, SAMPLING, tenant="b"),
    )
    layout = model_dir.config.kv_layout(NUM_BLOCKS, "float32")
    buffer = bytearray(layout.pool_bytes)
    core = make_core(NUM_BLOCKS)
    runner = make_runner(model_dir, layout=layout, buffer=buffer)
    assert generate(core, runner, make_requests(PROMPTS, SAMPLING, tenant="a")) == expected
    assert core.ledger().num_cached > 0
    np.frombuffer(buffer, np.float32)[:] = poison
    requests = make_requests(PROMPTS, SAMPLING, first=len(PROMPTS), tenant="b")
    assert generate(core, runner, requests) == expected
    # What it has cached by now it may find again.
    again = make_requests(PROMPTS, SAMPLING, first=2 * len(PROMPTS), tenant="b")
    assert generate(core, runner, again) == expected
