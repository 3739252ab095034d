"""What a decode step costs beside the model: `python tests/bench/bench_step.py [--batches 8 64]`.

The engine's own loop (worker/engine_loop.py) over the real core, runner and link, in this process; frames
leave by a socket to another one, as a worker's do. Each batch decodes greedily, then with temperature,
top-k and top-p. Of the steps that decode the whole batch:

non-model    from one step's tokens to the next one's, less forward, logits and sampler
  receive    commands: none come
  schedule   who takes part, blocks, the plan
  frame      what is told of the step before, and the message out
  batch      the runner's arrays and page tables, and its bookkeeping after
  update     what the tokens mean
  other      layer mark, shape, the loop itself
sampler      greedy; drawn

Medians, and the 99th percentile of the whole. The caches are as cold as a step's weights leave them. With
--cpu-time in CPU seconds of the one thread: on a busy machine the wall clock counts the neighbours too.
Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool import native
from moonpool.clock import SystemClock
from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Command, CoreFrame, Decode
from moonpool.core.step import LayerMark, StepPlan, StepResult, StepTiming
from moonpool.engine.runner import ModelRunner, load_runner
from moonpool.failpoints import Failpoints
from moonpool.hub import ModelDir, resolve
from moonpool.ids import RequestId
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import NamespaceSeed
from moonpool.memory.heap import keep_freed_memory
from moonpool.memory.worker_memory import WorkerMemory
from moonpool.native import kernels
from moonpool.wire.engine_messages import TimedFrame
from moonpool.worker.engine_link import EngineLink, EngineLinkClosed
from moonpool.worker.engine_loop import run_engine_loop
from moonpool.worker.layer_mark import LayerMarker

T = TypeVar("T")
PROMPT_TOKENS = 24
BLOCK = 16
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}
BARS_MS = {
    ("non-model", 8): 0.5,
    ("non-model", 64): 2.0,
    ("greedy", 64): 0.5,
    ("drawn", 64): 4.0,
}


class Times:
    """Seconds by part of the running step, and of the steps that had the whole batch."""

    def __init__(self, batch: int, seconds: Callable[[], float]) -> None:
        self._batch = batch
        self._seconds = seconds
        self._now: dict[str, float] = defaultdict(float)
        self._ended = 0.0
        self.steps: list[dict[str, float]] = []
        self.was_whole = False

    def timed(self, part: str, work: Callable[[], T]) -> T:
        started = self._seconds()
        result = work()
        self._now[part] += self._seconds() - started
        return result

    def step(self, plan: StepPlan, timing: StepTiming) -> None:
        """The runner is done: the period from the step before ends here."""
        ended = self._seconds()
        is_whole = len(plan.rows) == plan.num_tokens == self._batch
        model_s = timing.forward_s + timing.logits_s
        if is_whole and self.was_whole:
            parts = dict(self._now)
            parts["batch"] = timing.other_s
            parts["sampler"] = timing.sample_s
            parts["model"] = model_s
            parts["non-model"] = ended - self._ended - model_s - timing.sample_s
            self.steps.append(parts)
        self.was_whole = is_whole
        self._now.clear()
        self._ended = ended


class TimedLink(EngineLink):
    """Ends the loop when nothing is left to run."""

    def __init__(self, sock: socket.socket, times: Times, commands: list[Command]) -> None:
        super().__init__(sock)
        self._times = times
        self._commands = commands

    def receive(self, *, wait: bool) -> tuple[Command, ...]:
        if self._commands:
            commands, self._commands = tuple(self._commands), []
            return commands
        if wait:
            raise EngineLinkClosed
        return self._times.timed("receive", lambda: super(TimedLink, self).receive(wait=False))

    def send(self, frame: TimedFrame) -> None:
        self._times.timed("frame", lambda: super(TimedLink, self).send(frame))


class TimedCore(Core):
    """A core whose moves are timed."""

    def __init__(self, config: CoreConfig, times: Times) -> None:
        super().__init__(config, lambda request: NamespaceSeed(bytes(32)))
        self._times = times

    def schedule(self, now: float) -> StepPlan | None:
        return self._times.timed("schedule", lambda: super(TimedCore, self).schedule(now))

    def update(self, result: StepResult, now: float) -> None:
        self._times.timed("update", lambda: super(TimedCore, self).update(result, now))

    def take_frame(self) -> CoreFrame:
        return self._times.timed("frame", super().take_frame)


class TimedRunner:
    """A runner that tells when a step is done."""

    def __init__(self, runner: ModelRunner, times: Times) -> None:
        self._runner = runner
        self._times = times

    def run(self, plan: StepPlan, mark: LayerMark) -> StepResult:
        result = self._runner.run(plan, mark)
        self._times.step(plan, result.timing)
        return result


class Engine:
    """One model and its pool, for batches one after another."""

    def __init__(
        self, directory: ModelDir, *, batch: int, num_steps: int, seconds: Callable[[], float]
    ) -> None:
        self._seconds = seconds
        self._num_steps = num_steps
        self._vocab_size = directory.config.vocab_size
        num_blocks = batch * -(-(PROMPT_TOKENS + num_steps + batch) // BLOCK) + batch
        layout = directory.config.kv_layout(num_blocks, "bfloat16")
        self._memory = WorkerMemory.create(layout)
        self._config = CoreConfig(
            num_blocks=num_blocks,
            max_num_seqs=batch,
            max_num_batched_tokens=2048,
            max_queued_steps=64,
        )
        self._runner = load_runner(
            directory,
            self._memory.pool.bytes.data,
            layout,
            dtype="bfloat16",
            max_num_seqs=batch,
            kernels=kernels(),
            seconds=seconds,
        )

    def run(self, batch: int, sampling: SamplingParams) -> Times:
        """Decode so many requests at once, each with a prompt of its own."""
        times = Times(batch, self._seconds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL), ours:
            theirs.close()
            failpoints = Failpoints.parse("", is_allowed=True)
            with torch.inference_mode():
                run_engine_loop(
                    link=TimedLink(ours, times, list(self._commands(batch, sampling))),
                    core=TimedCore(self._config, times),
                    runner=TimedRunner(self._runner, times),
                    mark=LayerMarker(
                        memory=self._memory, kernels=kernels(), layer_group=4, failpoints=failpoints
                    ),
                    clock=SystemClock(),
                    failpoints=failpoints,
                )
        return times

    def close(self) -> None:
        self._memory.close()

    def _commands(self, batch: int, sampling: SamplingParams) -> list[Command]:
        rng = np.random.default_rng(1)
        return [
            Decode(
                request=InferenceRequest(
                    request_id=RequestId(f"r{number}"),
                    model="bench",
                    prompt_token_ids=tuple(
                        rng.integers(3, self._vocab_size, PROMPT_TOKENS).tolist()
                    ),
                    sampling=replace(
                        sampling, seed=number, max_tokens=self._num_steps, ignore_eos=True
                    ),
                    arrival_unix_s=float(number),
                ),
                attempt=1,
                has_source=False,
            )
            for number in range(batch)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    engine = Engine(
        resolve(args.model, can_pull=True),
        batch=max(args.batches),
        num_steps=args.steps,
        seconds=time.thread_time if args.cpu_time else time.perf_counter,
    )
    figures = {
        batch: {kind: summary(engine.run(batch, sampling)) for kind, sampling in KINDS.items()}
        for batch in args.batches
    }
    engine.close()
    report(figures)


def summary(times: Times) -> dict[str, float]:
    """Medians in milliseconds by part."""
    steps = times.steps
    assert steps, "no step had the whole batch"
    parts = sorted({part for step in steps for part in step})
    medians = {
        part: statistics.median(step.get(part, 0.0) for step in steps) * 1e3 for part in parts
    }
    told = ("receive", "schedule", "frame", "batch", "update")
    medians["other"] = medians["non-model"] - sum(medians.get(part, 0.0) for part in told)
    medians["non-model p99"] = float(np.quantile([step["non-model"] for step in steps], 0.99)) * 1e3
    medians["steps"] = len(steps)
    return medians


def report(figures: dict[int, dict[str, dict[str, float]]]) -> None:
    parts = ("receive", "schedule", "frame", "batch", "update", "other")
    for batch, kinds in figures.items():
        greedy = kinds["greedy"]
        bar = BARS_MS.get(("non-model", batch))
        limit = "" if bar is None else f"   asked for: under {bar:g}"
        print(
            f"batch {batch}: non-model {greedy['non-model']:.2f} ms"
            f" (p99 {greedy['non-model p99']:.2f}, {greedy['steps']:.0f} steps){limit}"
        )
        print("  " + ", ".join(f"{part} {greedy.get(part, 0.0):.2f}" for part in parts))
        for kind, times in kinds.items():
            bar = BARS_MS.get((kind, batch))
            limit = "" if bar is None else f"   asked for: under {bar:g}"
            print(f"  sampler, {kind}: {times['sampler']:.2f} ms{limit}")
    details: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "native": native.status().message,
        "torch": torch.__version__.split("+")[0],
        "medians_ms": figures,
    }
    print(json.dumps(details, indent=2))


if __name__ == "__main__":
    main()
