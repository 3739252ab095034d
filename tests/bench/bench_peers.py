"""Our engine beside vLLM's CPU backend and llama.cpp on one core: `python tests/bench/bench_peers.py`.

The same weights (SmolLM2-135M), each engine a process of its own pinned to the same core, one thread; they
take turns within a round, in an order that changes from round to round, and nobody runs meanwhile.
tests/bench/peer_arms.py says how each is called. Prints a table, then JSON. Every ratio is of two sides in
the same round, told as the median over the rounds and their range.

moonpool          weights and KV in bfloat16; where the CPU multiplies no bfloat16, computed in float32
vllm bfloat16     its own precision for this; where the CPU multiplies no bfloat16, it is emulated, in
                  prefill six times as slow as float32: left out there unless --vllm names it
vllm float32      what such a CPU is better at; left out elsewhere
llama.cpp bf16    the same weights as a GGUF file in bfloat16, KV in float16 (its default)
llama.cpp f16     in float16

    prefill n       a new prompt of n tokens, its first token included
    decode b x c    a step of b requests around a context of c tokens
    floor           prefill: its products at this core's best rate; decode: weights (2 bytes each) and KV
                    at the rate at which it reads memory. Rates are measured in each round

llama.cpp is in the extra `peers-engine`; environments of their own are given with --vllm-python and
--llama-python. A side that cannot run is left out, and it is said why. On a busy machine --cpu-time counts
the time that each process had the core, not what its neighbours took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.engine.linear import has_native_bfloat16
from moonpool.hub import ModelDir, resolve
from moonpool.hub.model_config import ModelConfig
from support.llama_gguf import write_gguf

OURS = "moonpool"
BYTES_PER_WEIGHT = 2
#: Bars, by side and kind of shape: how many times as fast we are to be.
BARS = {
    ("vllm", "prefill"): 1.0,
    ("vllm", "decode 1"): 1.3,
    ("vllm", "decode"): 1.4,
    ("llama.cpp", "decode"): 1.1,
}


@dataclass(frozen=True, slots=True)
class Prefill:
    num_tokens: int

    def __str__(self) -> str:
        return f"prefill {self.num_tokens}"

    @property
    def kind(self) -> str:
        return "prefill"

    @property
    def num_made(self) -> int:
        """Tokens that the time is of."""
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Decode:
    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode {self.batch} x {self.context}"

    @property
    def kind(self) -> str:
        return "decode 1" if self.batch == 1 else "decode"

    @property
    def num_made(self) -> int:
        return self.batch


Shape = Prefill | Decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    prefills: tuple[int, ...] = (512, 1024, 2048, 4096)
    decodes: tuple[tuple[int, int], ...] = ((1, 512), (8, 512), (8, 2048), (16, 512), (32, 512))
    num_steps: int = 8
    num_rounds: int = 3

    @property
    def shapes(self) -> list[Shape]:
        shapes: list[Shape] = [Prefill(number) for number in self.prefills]
        return shapes + [Decode(batch, context) for batch, context in self.decodes]

    @property
    def max_tokens(self) -> int:
        """Of one prompt."""
        longest = [context + self.num_steps for _, context in self.decodes]
        return max([*self.prefills, *longest]) + 64

    @property
    def num_kv_tokens(self) -> int:
        each = [batch * (context + self.num_steps + 32) for batch, context in self.decodes]
        return max([self.max_tokens, *each])


QUICK = Scale(prefills=(32, 64), decodes=((1, 48), (4, 48)), num_steps=4, num_rounds=1)


class SkippedError(Exception):
    """A side that cannot run here, and why."""


class Side:
    """A process of peer_arms.py."""

    def __init__(self, python: str, arm: str, settings: dict[str, Any], log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [
                    python,
                    str(Path(__file__).with_name("peer_arms.py")),
                    arm,
                    json.dumps(settings),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.versions: dict[str, str] = self._answer()["ready"]

    def ask(self, **order: object) -> dict[str, Any]:
        """Have it do something; its answer. Raises SkippedError if it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        self.close()
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        raise SkippedError(f"{ended}: {lines[-1] if lines else 'it said nothing'}")


def sides_to_start(args: argparse.Namespace) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Name, interpreter, arm, and settings of its own."""
    yield OURS, sys.executable, "moonpool", {}
    for dtype in args.vllm:
        yield f"vllm {dtype}", args.vllm_python, "vllm", {"dtype": dtype}
    for precision in args.llama:
        yield f"llama.cpp {precision}", args.llama_python, "llama.cpp", {"precision": precision}


def start_sides(
    args: argparse.Namespace, scale: Scale, directory: ModelDir, folder: Path, stack: ExitStack
) -> tuple[dict[str, Side], dict[str, str]]:
    """Those that run, and why others do not."""
    sides: dict[str, Side] = {}
    skipped: dict[str, str] = {}
    common = {
        "core": args.core,
        "model": str(directory.path),
        "scratch": str(folder),
        "vocab_size": directory.config.vocab_size,
        "max_tokens": scale.max_tokens,
        "num_kv_tokens": scale.num_kv_tokens,
        "is_cpu_time": args.cpu_time,
    }
    for name, python, arm, own in sides_to_start(args):
        settings = common | own
        if arm == "llama.cpp":
            settings["gguf"] = str(folder / f"{own['precision']}.gguf")
            write_gguf(directory, Path(settings["gguf"]), precision=own["precision"])
        try:
            side = Side(python, arm, settings, folder / f"{name}.log")
        except SkippedError as reason:
            skipped[name] = str(reason)
            continue
        stack.callback(side.close)
        sides[name] = side
        print(f"{name}: {side.versions}", file=sys.stderr, flush=True)
    return sides, skipped


def measure(
    sides: dict[str, Side], scale: Scale, vocab_size: int
) -> tuple[dict[str, dict[str, list[float]]], list[dict[str, float]], dict[str, list[bool]]]:
    """Seconds by shape and side, a value for each round; rates; whose first tokens are as ours."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rates: list[dict[str, float]] = []
    is_equal: dict[str, list[bool]] = defaultdict(list)
    rng = np.random.default_rng(1)
    warm_up = rng.integers(3, vocab_size, 64).tolist()
    for side in sides.values():
        side.ask(do="prefill", prompt=warm_up)
        side.ask(do="decode", batch=1, context=32, steps=2, seed=0)
    for number in range(scale.num_rounds):
        rates.append(sides[OURS].ask(do="floor")["rates"])
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for shape in scale.shapes:
            tokens: dict[str, int] = {}
            prompt = rng.integers(3, vocab_size, getattr(shape, "num_tokens", 0)).tolist()
            for name in order:
                if isinstance(shape, Prefill):
                    answer = sides[name].ask(do="prefill", prompt=prompt)
                    tokens[name] = answer["token"]
                else:
                    answer = sides[name].ask(
                        do="decode",
                        batch=shape.batch,
                        context=shape.context,
                        steps=scale.num_steps,
                        seed=number + 1,
                    )
                seconds[str(shape)][name].append(statistics.median(answer["seconds"]))
            for name, token in tokens.items():
                is_equal[name].append(token == tokens[OURS])
            print(f"round {number + 1}: {shape}", file=sys.stderr, flush=True)
    return seconds, rates, is_equal


def floor_s(shape: Shape, config: ModelConfig, rates: Mapping[str, float]) -> float:
    """The least time that the measured rates allow."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = (heads + config.num_heads) * config.head_dim * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    num_weights = config.num_layers * layer + head
    if isinstance(shape, Prefill):
        tokens = shape.num_tokens
        products = 2.0 * tokens * config.num_layers * layer + 2.0 * head
        # Causal: each token asks half of them, on average, for keys and for values.
        width = config.num_layers * config.num_heads * config.head_dim
        attention = 2.0 * tokens * tokens * width
        best = max(rate for name, rate in rates.items() if name.startswith("gemm"))
        return (products + attention) / (best * 1e9)
    kv_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * BYTES_PER_WEIGHT
    num_bytes = num_weights * BYTES_PER_WEIGHT + shape.batch * shape.context * kv_bytes
    return num_bytes / (rates["read GB/s"] * 1e9)


def spread(values: Sequence[float], form: str = ".3g") -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} [{format(min(values), form)}, {format(max(values), form)}]"


def report(
    scale: Scale,
    config: ModelConfig,
    seconds: dict[str, dict[str, list[float]]],
    rates: list[dict[str, float]],
) -> dict[str, Any]:
    """Prints the table; the ratios by shape and side."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for name in rates[0]:
        print(f"{name}: {spread([rate[name] for rate in rates])}")
    for shape in scale.shapes:
        by_side = seconds[str(shape)]
        ours = by_side[OURS]
        speed = [shape.num_made / one for one in ours]
        floors = [floor_s(shape, config, rate) for rate in rates]
        over = [one / floor for one, floor in zip(ours, floors, strict=True)]
        print(
            f"{shape}: moonpool {spread([one * 1e3 for one in ours])} ms, "
            f"{spread(speed)} tokens/s, {spread(over)} times the floor"
        )
        ratios[str(shape)] = {"floor": over}
        for name, theirs in by_side.items():
            if name == OURS:
                continue
            times = [other / one for other, one in zip(theirs, ours, strict=True)]
            ratios[str(shape)][name] = times
            bar = BARS.get((name.split()[0], shape.kind))
            limit = ""
            if bar is not None:
                is_met = statistics.median(times) >= bar
                limit = f"   asked for: {bar:g}, {'met' if is_met else 'MISSED'}"
            print(
                f"    {name}: {spread([one * 1e3 for one in theirs])} ms;"
                f" moonpool is {spread(times, '.2f')} times as fast{limit}"
            )
    return ratios


def shape_of(text: str) -> tuple[int, int]:
    """BATCHxCONTEXT."""
    batch, context = text.split("x")
    return int(batch), int(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=Scale().num_rounds)
    parser.add_argument("--prefills", type=int, nargs="*", default=Scale().prefills)
    parser.add_argument("--decodes", type=shape_of, nargs="*", default=Scale().decodes)
    parser.add_argument("--cpu-time", action="store_true")
    faster = "bfloat16" if has_native_bfloat16() else "float32"
    parser.add_argument("--vllm", nargs="*", default=[faster])
    parser.add_argument("--llama", nargs="*", default=["bf16", "f16"])
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    scale = Scale(
        prefills=tuple(args.prefills), decodes=tuple(args.decodes), num_rounds=args.rounds
    )
    scale = QUICK if args.quick else scale
    directory = resolve(args.model, can_pull=True)
    with tempfile.TemporaryDirectory(prefix="moonpool-peers-") as name, ExitStack() as stack:
        sides, skipped = start_sides(args, scale, directory, Path(name), stack)
        if OURS not in sides:
            raise SystemExit(skipped[OURS])
        seconds, rates, is_equal = measure(sides, scale, directory.config.vocab_size)
    ratios = report(scale, directory.config, seconds, rates)
    for side, reason in skipped.items():
        print(f"{side}: left out: {reason}")
    for side, equal in is_equal.items():
        if side != OURS:
            print(f"{side}: {sum(equal)} of {len(equal)} first tokens as ours")
    details = {
        "cpu": platform.processor() or platform.machine(),
        "native": native.status().message,
        "versions": {side: sides[side].versions for side in sides},
        "load_average": os.getloadavg(),
        "seconds": seconds,
        "rates": rates,
        "ratios": ratios,
        "skipped": skipped,
        "first_tokens_as_ours": is_equal,
    }
    print(json.dumps(details, indent=2))


if __name__ == "__main__":
    main()
