"""transformers as a process of its own, for `experiments.engine`: a line of JSON in, a line out.

    python -m moonpool_loadtest.experiments.transformers_process MODEL DTYPE CORE

    {"op": "prefill", "prompt": [...]}                             -> {"seconds": [one]}
    {"op": "decode", "batch": 8, "context": 240, "num_steps": 32}  -> {"seconds": [one for each step]}

Called as its own generate() calls it: SDPA attention, a DynamicCache, logits of the last position
only, greedy. A step's time is that of the forward call and of drawing the tokens. The only file here that
imports torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Any: an optional dependency, with few types, which change from version to version.
transformers: Any = importlib.import_module("transformers")


class Model:
    """One model on one thread."""

    def __init__(self, path: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> list[float]:
        cache = transformers.DynamicCache(config=self._model.config)
        seconds, _ = self._step(torch.tensor([prompt]), cache)
        return [seconds]

    @torch.inference_mode()
    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        config = self._model.config
        cache = transformers.DynamicCache(config=config)
        # What keys and values say costs no time: they need no prefill.
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape, dtype=self._model.dtype) for _ in range(2)), layer)
        tokens = torch.full((batch, 1), 100)
        all_seconds = []
        for _ in range(num_steps):
            seconds, tokens = self._step(tokens, cache)
            all_seconds.append(seconds)
        return all_seconds

    def _step(self, inputs: Tensor, cache: object) -> tuple[float, Tensor]:
        started = time.perf_counter()
        out = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.tolist()
        return time.perf_counter() - started, tokens


def main() -> None:
    path, dtype, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    model = Model(path, dtype)
    _reply({"ready": transformers.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "prefill":
            _reply({"seconds": model.prefill(request["prompt"])})
        else:
            seconds = model.decode(request["batch"], request["context"], request["num_steps"])
            _reply({"seconds": seconds})


def _reply(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
