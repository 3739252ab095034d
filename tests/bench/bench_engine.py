"""How fast the engine is on one core: `python tests/bench/bench_engine.py [--dtype bfloat16]`.

Prefill of 512 and 2,048 tokens, decode at batch 1 and 8 at a context of 256, and the part of a step
that is not model or sampler. Beside it the same engine without the C library's arithmetic (oneDNN and torch
alone), and transformers (from the `oracle` extra) with its SDPA attention, all with the same weights. Arms alternate within one run and each reports its best round, in CPU seconds of
the one thread: on a shared machine the wall clock counts the neighbours too. Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.core.step import SampleSpec, StepPlan, StepRow, StepTiming
from moonpool.engine.linear import has_native_bfloat16
from moonpool.engine.runner import ModelRunner
from moonpool.hub import ModelDir, resolve
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.layout import KvDtype
from moonpool.native.fallback import FallbackKernels
from support.engine import NoMark, make_runner

BLOCK = 16
MAX_TOKENS = 2304
GREEDY = SampleSpec(sampling=SamplingParams(temperature=0.0), position=0)
NO_TOKENS = np.empty(0, np.int32)
PROMPT = np.random.Generator(np.random.PCG64(1)).integers(100, 40_000, 2048).astype(np.int32)

Arm = Callable[[], float]


class Ours:
    """Plans by hand: what is measured is the runner, not the scheduler."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.timing = StepTiming()

    def prefill(self, num_tokens: int) -> float:
        return self._run(self._row(0, 0, PROMPT[:num_tokens]))

    def decode(self, batch: int, context: int) -> float:
        return self._run(*(self._row(slot, context - 1, NO_TOKENS) for slot in range(batch)))

    def _row(self, slot: int, start: int, token_ids: np.ndarray) -> StepRow:
        num_tokens = len(token_ids) or 1
        first = slot * MAX_TOKENS // BLOCK
        table = np.arange(first, first - (-(start + num_tokens) // BLOCK), dtype=np.int32)
        return StepRow(
            slot=slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=token_ids,
            block_tables=(table,),
            sample=GREEDY,
        )

    def _run(self, *rows: StepRow) -> float:
        plan = StepPlan(
            step=1, rows=rows, leaf_block_ids=NO_TOKENS, zero_tails=np.empty((0, 2), np.int32)
        )
        started = time.thread_time()
        self.timing = self._runner.run(plan, NoMark()).timing
        return time.thread_time() - started


class Theirs:
    """transformers, called as its own generate() calls it."""

    def __init__(self, directory: ModelDir, dtype: KvDtype) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._cache_type = transformers.DynamicCache

    def prefill(self, num_tokens: int) -> float:
        return self._call(torch.from_numpy(PROMPT[:num_tokens].astype(np.int64))[None], None)

    def decode(self, batch: int, context: int) -> float:
        cache = self._cache_type(config=self._model.config)
        config = self._model.config
        shape = (batch, config.num_key_value_heads, context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape, dtype=self._model.dtype) for _ in range(2)), layer)
        return self._call(torch.full((batch, 1), 100), cache)

    @torch.inference_mode()
    def _call(self, inputs: torch.Tensor, cache: object) -> float:
        started = time.thread_time()
        out = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.thread_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    torch.set_num_threads(1)

    directory = resolve("smollm2-135m", can_pull=True)
    num_blocks = 8 * MAX_TOKENS // BLOCK
    ours = Ours(make_runner(directory, dtype=args.dtype, num_blocks=num_blocks))
    by_torch = make_runner(
        directory, dtype=args.dtype, num_blocks=num_blocks, form=FallbackKernels()
    )
    sides: dict[str, Ours | Theirs] = {"moonpool": ours, "torch alone": Ours(by_torch)}
    if importlib.util.find_spec("transformers") and not args.no_transformers:
        sides["transformers"] = Theirs(directory, args.dtype)
    best: dict[str, float] = {}
    other_s = 0.0
    for _ in range(args.rounds):
        for name, side in sides.items():
            for num_tokens in args.prefill:
                keep_best(best, f"{name} prefill {num_tokens}", side.prefill(num_tokens))
            for batch in (1, 8):
                for _ in range(3):
                    keep_best(best, f"{name} decode batch {batch}", side.decode(batch, 256))
        other_s = ours.timing.other_s
    report(args.dtype, args.prefill, best, other_s)


def keep_best(best: dict[str, float], name: str, seconds: float) -> None:
    best[name] = min(seconds, best.get(name, seconds))


def report(dtype: str, prefills: list[int], best: dict[str, float], other_s: float) -> None:
    names = [f"prefill {n}" for n in prefills] + ["decode batch 1", "decode batch 8"]
    ratios = {}
    for name in names:
        ours = best[f"moonpool {name}"]
        line = f"{name:16} moonpool {ours * 1e3:9.1f} ms"
        for side in ("torch alone", "transformers"):
            theirs = best.get(f"{side} {name}")
            if theirs is not None:
                ratios[f"{name} over {side}"] = theirs / ours
                line += f"   {side} {theirs * 1e3:9.1f} ms ({theirs / ours:5.2f} times as fast)"
        print(line)
    ratios["rate of batch 8 over batch 1"] = (
        8 * best["moonpool decode batch 1"] / best["moonpool decode batch 8"]
    )
    print(f"batch 8 over batch 1: {ratios['rate of batch 8 over batch 1']:.2f} times the tokens")
    print(f"step at batch 8 outside model and sampler: {other_s * 1e3:.2f} ms (wall)")
    details = {
        "dtype": dtype,
        "native_bfloat16": has_native_bfloat16(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__.split("+")[0],
        "best_cpu_s": best,
        "ratios": ratios,
        "other_s": other_s,
    }
    print(json.dumps(details, indent=2))


if __name__ == "__main__":
    main()
