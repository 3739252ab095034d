"""Where the time of a step goes: `python tests/bench/bench_profile.py [--rounds 5]`.

One prefill and one decode step of each shape, on one core and one thread, through the core, the runner and
the layer marks as in a worker's engine (peer_arms.py's `moonpool`). The functions that a step is made of are
timed where they are called; nothing else changes.

    products       QKV, attention's output, gate and up, down, of all layers
    vocabulary     lm_head, for the tokens that are drawn
    attention      over the paged pool, with its plan
    element-wise   RMSNorm, rope, SiLU x up
    KV             what is written into the pool, and the digests and marks by which others may read it
    sampler        drawing
    around         core, batch arrays
    rest           what Python and torch do between these

The floor beside it: products, vocabulary and attention at this core's best rate of a large product, or their
weights and KV at the rate at which it reads memory, whichever takes longer. Medians; prints a table, then
JSON. With --cpu-time in CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peer_arms import (
    MoonpoolArm,
    Seconds,
    Settings,
    clock_of,
    measure_floor,
    random_tokens,
)

from moonpool.core.core import Core
from moonpool.engine import model, runner
from moonpool.engine.attention import TorchPagedAttention
from moonpool.engine.kv_pool import KvPool
from moonpool.engine.linear import Linear
from moonpool.engine.native_attention import NativePagedAttention
from moonpool.engine.native_sampler import Sampler
from moonpool.engine.row_math import RowMath
from moonpool.hub import resolve
from moonpool.hub.model_config import ModelConfig
from moonpool.worker.layer_mark import LayerMarker

#: Owner, attribute, part of a step.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (Linear, "__call__", "products"),
    (Linear, "surveyed", "vocabulary"),
    (NativePagedAttention, "plan", "attention"),
    (NativePagedAttention, "run", "attention"),
    (TorchPagedAttention, "plan", "attention"),
    (TorchPagedAttention, "run", "attention"),
    (RowMath, "rms_norm", "element-wise"),
    (RowMath, "silu_mul", "element-wise"),
    (model, "rotate_", "element-wise"),
    (KvPool, "token_index", "KV"),
    (KvPool, "write", "KV"),
    (LayerMarker, "layer_done", "KV"),
    (Sampler, "sample", "sampler"),
    (runner, "build_batch", "around"),
    (Core, "handle", "around"),
    (Core, "schedule", "around"),
    (Core, "update", "around"),
    (Core, "take_frame", "around"),
)
PARTS = (*dict.fromkeys(part for _, _, part in TIMED), "rest")
BYTES_PER_VALUE = 2


@contextmanager
def timed_parts(seconds: Seconds) -> Iterator[dict[str, float]]:
    """Seconds by part, of what is called inside."""
    spent: dict[str, float] = defaultdict(float)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = seconds()
            result = function(*args, **kwargs)
            spent[part] += seconds() - started
            return result

        return call

    with ExitStack() as stack:
        for owner, name, part in TIMED:
            plain = getattr(owner, name)
            stack.callback(setattr, owner, name, plain)
            setattr(owner, name, timed(plain, part))
        yield spent


class ProfiledArm(MoonpoolArm):
    """Tells of each step what its parts took."""

    def __init__(self, settings: Settings, spent: dict[str, float]) -> None:
        super().__init__(settings)
        self._spent = spent
        self.steps: list[dict[str, float]] = []

    def _step(self) -> int:
        self._spent.clear()
        num_tokens = super()._step()
        self.steps.append(dict(self._spent))
        return num_tokens


def medians(totals: Sequence[float], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Milliseconds by part, of steps and what each took in all."""
    found: dict[str, list[float]] = defaultdict(list)
    for total, parts in zip(totals, steps, strict=True):
        for part in PARTS[:-1]:
            found[part].append(parts.get(part, 0.0))
        found["rest"].append(total - sum(parts.values()))
        found["all"].append(total)
    return {part: statistics.median(values) * 1e3 for part, values in found.items()}


def floors(
    config: ModelConfig, rates: Mapping[str, float], *, num_tokens: int, context: int, batch: int
) -> dict[str, float]:
    """Milliseconds at least, for `num_tokens` tokens of each of `batch` rows that end at `context`."""
    flops_s = max(rate for name, rate in rates.items() if name.startswith("gemm")) * 1e9
    bytes_s = rates["read GB/s"] * 1e9
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = (heads + config.num_heads) * config.head_dim * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = {
        "products": (config.num_layers * layer, batch * num_tokens),
        "vocabulary": (config.vocab_size * config.hidden_size, batch),
    }
    least = {
        part: max(2 * count * rows / flops_s, BYTES_PER_VALUE * count / bytes_s)
        for part, (count, rows) in weights.items()
    }
    pairs = batch * (num_tokens * context - num_tokens * (num_tokens - 1) / 2)
    kv_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * BYTES_PER_VALUE
    attention = 4 * pairs * config.num_heads * config.head_dim
    least["attention"] = config.num_layers * max(attention / flops_s, kv_bytes / bytes_s)
    return {part: value * 1e3 for part, value in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--prefills", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    directory = resolve(args.model, can_pull=True)
    most = max([args.context, *args.prefills]) + 64
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="moonpool-profile-") as scratch:
        settings = {
            "model": str(directory.path),
            "scratch": scratch,
            "max_tokens": most,
            "num_kv_tokens": max([most, *(n * (args.context + 64) for n in args.batches)]),
            "is_cpu_time": args.cpu_time,
        }
        seconds = clock_of(settings)
        config = directory.config
        rates = measure_floor(seconds)
        with timed_parts(seconds) as spent:
            arm = ProfiledArm(settings, spent)
            for size in args.prefills:
                prompts = [
                    # None begins as another does: it would be found in the pool.
                    random_tokens(size, config.vocab_size, size * 1_000 + number)
                    for number in range(args.rounds + 1)
                ]
                arm.steps.clear()
                totals = [arm.prefill(prompt)[0] for prompt in prompts]
                figures[f"prefill {size}"] = {
                    "ms": medians(totals[1:], arm.steps[1:]),
                    "floor_ms": floors(config, rates, num_tokens=size, context=size, batch=1),
                }
            for batch in args.batches:
                arm.steps.clear()
                totals = arm.decode(batch, args.context, 4 * args.rounds, 1)
                figures[f"decode {batch} x {args.context}"] = {
                    "ms": medians(totals, arm.steps[1:]),
                    "floor_ms": floors(
                        config, rates, num_tokens=1, context=args.context, batch=batch
                    ),
                }
    report(figures)
    print(json.dumps({"rates": rates, "figures": figures}, indent=2))


def report(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    for shape, found in figures.items():
        times, least = found["ms"], found["floor_ms"]
        print(f"{shape}: {times['all']:.1f} ms, floor {sum(least.values()):.1f}")
        for part in PARTS:
            share = times[part] / times["all"]
            floor = f"   floor {least[part]:.2f}" if part in least else ""
            print(f"    {part:13} {times[part]:9.2f} ms {share:6.1%}{floor}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
