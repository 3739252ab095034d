"""FlashInfer's signatures as its wheel has them, and that a call which does not fit them fails."""

from __future__ import annotations

import pytest
import torch

from support.flashinfer_stand_in import SIGNATURES, make_flashinfer, signature


def test_signatures_are_those_of_the_version_that_was_tried() -> None:
    assert SIGNATURES["version"] == "0.7.4"
    plan = signature(SIGNATURES["classes"]["BatchDecodeWithPagedKVCacheWrapper"]["plan"])
    assert list(plan.parameters)[:7] == [
        "indptr",
        "indices",
        "last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "page_size",
    ]
    # Whoever names no dtype gets float16.
    assert plan.parameters["q_data_type"].default == "'float16'"


def test_a_call_that_does_not_fit_fails() -> None:
    flashinfer = make_flashinfer()
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match="epsilon"):
        flashinfer.rmsnorm(x, torch.ones(4), epsilon=1e-5)
    with pytest.raises(TypeError, match="residual"):
        flashinfer.fused_add_rmsnorm(x)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(128, dtype=torch.uint8), kv_layout="HND"
    )
    with pytest.raises(TypeError, match="heads"):
        wrapper.plan(x, x, x, x, heads=3)
