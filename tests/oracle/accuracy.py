"""What rounding costs: next-token distributions beside float32's, on SmolLM2-135M:

    python tests/oracle/accuracy.py [--tokens 512]

Every weighting sees the same texts (the oracle's prompts of up to so many tokens, then what the model
itself answered), one pass each, and its distribution at every position is compared with that of float32
weights: how often the likeliest token is the same, the mean Kullback-Leibler divergence in nats, and the
perplexity of the text. Exit status 1 if int8 misses its bars.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle import cases

from moonpool.core.config import Quantization
from moonpool.engine.attention import TorchPagedAttention
from moonpool.engine.batch import PageTables
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.loader import load_model
from moonpool.engine.model import LlamaModel
from moonpool.hub import resolve
from moonpool.hub.model_dir import ModelDir
from moonpool.kv.layout import KvDtype
from moonpool.native import kernels
from support.engine import NoMark

_BLOCK_SIZE = 16
#: int8 beside float32. What bfloat16 reaches is printed with it.
_MIN_SAME_TOP = 0.93
_MAX_DIVERGENCE = 0.03
_MAX_PERPLEXITY_RATIO = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    dtype: KvDtype
    quantization: Quantization = "none"


WEIGHTINGS = {
    "bfloat16": Weighting(dtype="bfloat16"),
    "int8 of float32": Weighting(dtype="float32", quantization="int8"),
    "int8 of bfloat16": Weighting(dtype="bfloat16", quantization="int8"),
}


def log_probabilities(directory: ModelDir, weighting: Weighting, texts: list[list[int]]) -> Tensor:
    """float32[positions of all texts, vocab]."""
    model = load_model(
        directory, weighting.dtype, quantization=weighting.quantization, kernels=kernels()
    )
    return torch.cat([_of_text(model, weighting.dtype, text) for text in texts])


def _of_text(model: LlamaModel, dtype: KvDtype, text: list[int]) -> Tensor:
    num_blocks = -(-len(text) // _BLOCK_SIZE)
    layout = model.config.kv_layout(num_blocks, dtype)
    pool = KvPool(bytearray(layout.pool_bytes), layout)
    attention = TorchPagedAttention(pool, model.config.num_heads, model.dtype)
    attention.plan(
        PageTables(
            num_decode_rows=0,
            qo_indptr=np.array([0, len(text)], np.int32),
            kv_indptr=np.array([0, num_blocks], np.int32),
            kv_indices=np.arange(num_blocks, dtype=np.int32),
            kv_last_page_len=np.array([(len(text) - 1) % _BLOCK_SIZE + 1], np.int32),
            block_size=_BLOCK_SIZE,
        )
    )
    positions = np.arange(len(text))
    hidden = model.forward(
        token_ids=torch.tensor(text),
        positions=torch.from_numpy(positions),
        token_index=pool.token_index(positions // _BLOCK_SIZE, positions % _BLOCK_SIZE),
        zero_index=None,
        # All of them, and so the last layer attends for all: hence no attention that may leave some out.
        sample_tokens=torch.from_numpy(positions),
        pool=pool,
        attention=_AllTokens(attention),
        mark=NoMark(),
    )
    assert hidden is not None
    return model.lm_head(hidden).float().log_softmax(1)


class _AllTokens:
    """An attention whose last layer answers for every token."""

    def __init__(self, attention: TorchPagedAttention) -> None:
        self._attention = attention

    def plan(self, pages: PageTables) -> None:
        self._attention.plan(pages)

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        return self._attention.run(layer, query, kv)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    max_tokens: int = parser.parse_args().tokens
    torch.set_num_threads(1)
    directory = resolve("smollm2-135m", can_pull=True)
    oracle = cases.read_oracle(cases.SMOLLM2_FILE).models["smollm2-135m"]
    texts = [
        case.prompt + case.tokens for case in oracle.cases if 2 <= len(case.prompt) <= max_tokens
    ]
    exact = log_probabilities(directory, Weighting(dtype="float32"), texts)
    # At each text's last position nothing is known to follow.
    following = torch.tensor([token for text in texts for token in (*text[1:], -1)])
    is_known = following >= 0
    top = exact.argmax(1)

    def perplexity(found: Tensor) -> float:
        picked = found[is_known].gather(1, following[is_known, None])
        return float((-picked.mean()).exp())

    sys.stdout.write(
        f"{len(texts)} texts, {len(exact)} positions; perplexity {perplexity(exact):.3f}\n"
    )
    is_good = True
    for name, weighting in WEIGHTINGS.items():
        found = log_probabilities(directory, weighting, texts)
        same_top = float((found.argmax(1) == top).float().mean())
        divergence = float((exact.exp() * (exact - found)).sum(1).mean())
        ratio = perplexity(found) / perplexity(exact)
        sys.stdout.write(
            f"{name:18} likeliest token the same {same_top:.4f}  divergence {divergence:.5f} nats  "
            f"perplexity {ratio:.4f} of float32's\n"
        )
        if weighting.quantization == "int8":
            is_good &= (
                same_top >= _MIN_SAME_TOP
                and divergence <= _MAX_DIVERGENCE
                and ratio <= _MAX_PERPLEXITY_RATIO
            )
    return 0 if is_good else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
