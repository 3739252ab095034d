"""The engine on one core against transformers: `python -m moonpool_loadtest.experiments.engine`.

Ours is a whole worker behind a router: what is timed is the engine process's own loop (commands in,
plan, frame out, model, tokens), by the records that a worker keeps of its last steps. transformers runs
in a process of its own on the same core (the `oracle` extra), in bfloat16 and in float32, with the same
weights. They take turns; nobody runs while another does.

prefill n    one step of n new tokens, its first token included
decode b     from one step's tokens drawn to the next one's, b requests at a context of about 256
non-model    of such a step at batch 8: all but forward, logits and sampler
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from moonpool.errors import ConfigError, InternalError
from moonpool.wire.steps import StepRecord
from moonpool_loadtest.experiments.lab import (
    END_TOKEN_ID,
    FIRST_TOKEN_ID,
    Asker,
    Setting,
    WorkerPlan,
    cluster_config,
    open_asker,
    progress,
    run,
)
from moonpool_loadtest.experiments.numbers import Sample, quantile
from moonpool_loadtest.experiments.report import Finding, publish

OURS = "moonpool"
BATCHES = (1, 8)
_WORKER = "decode-0"
_CHILD = "moonpool_loadtest.experiments.transformers_process"
_CHILD_START_S = 120.0
_CHILD_STEP_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    prefills: tuple[int, ...] = (512, 2_048)
    #: Middle of the decode steps' contexts, and their number.
    context: int = 256
    num_steps: int = 32
    num_rounds: int = 3


class Side(Protocol):
    """Whoever runs the model."""

    async def prefill(self, num_tokens: int) -> float:
        """Seconds of a prefill of a new prompt."""
        ...

    async def decode(self, batch: int, scale: Scale) -> list[float]:
        """Seconds of each of `num_steps` decode steps around the context."""
        ...


@dataclass(slots=True, kw_only=True)
class Ours:
    """A worker of ours."""

    asker: Asker
    #: Of steps at the largest batch: period minus forward, logits and sampler, in seconds.
    non_model_s: list[float] = field(default_factory=list)

    async def prefill(self, num_tokens: int) -> float:
        steps = await self._steps_of(num_requests=1, num_tokens=num_tokens, max_tokens=1)
        if [step.num_tokens for step in steps] != [num_tokens]:
            raise InternalError(f"Not one step of {num_tokens} tokens: {steps}")
        return (steps[0].computed_unix_ns - steps[0].planned_unix_ns) / 1e9

    async def decode(self, batch: int, scale: Scale) -> list[float]:
        # The first token comes with the prefill; requests may join one step after another.
        max_tokens = 1 + scale.num_steps + batch
        steps = await self._steps_of(
            num_requests=batch,
            num_tokens=scale.context - max_tokens // 2,
            max_tokens=max_tokens,
        )
        pairs = list(_pairs_of_batch(steps, batch))
        if len(pairs) < scale.num_steps // 2:
            raise InternalError(f"Only {len(pairs)} steps had {batch} requests.")
        periods = [(now.computed_unix_ns - before.computed_unix_ns) / 1e9 for before, now in pairs]
        if batch == max(BATCHES):
            self.non_model_s += [
                period - now.forward_s - now.logits_s - now.sample_s
                for period, (_, now) in zip(periods, pairs, strict=True)
            ]
        return periods

    async def _steps_of(
        self, *, num_requests: int, num_tokens: int, max_tokens: int
    ) -> tuple[StepRecord, ...]:
        cluster = self.asker.cluster
        before = await cluster.steps(_WORKER)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_requests):
                tasks.create_task(self.asker.ask(num_tokens, max_tokens))
        await cluster.wait_quiet()
        return await cluster.steps(_WORKER, after_step=before[-1].step if before else 0)


def _pairs_of_batch(
    steps: Sequence[StepRecord], batch: int
) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Each step of exactly `batch` decodes that follows another one, with that one."""
    for before, now in itertools.pairwise(steps):
        if before.num_tokens == now.num_tokens == batch and now.step == before.step + 1:
            yield before, now


class Theirs:
    """transformers in a child process. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._rng = random.Random(1)
        self.version = ""

    @classmethod
    async def start(cls, setting: Setting, dtype: str, stack: AsyncExitStack) -> Theirs:
        """A child on the engine's core; it ends with `stack`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _CHILD),
            *(str(setting.model.path), dtype, str(setting.cores.engine)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**24,
        )
        theirs = cls(process)
        stack.push_async_callback(theirs._stop)
        theirs.version = str((await theirs._read(_CHILD_START_S))["ready"])
        return theirs

    async def prefill(self, num_tokens: int) -> float:
        prompt = [self._rng.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(num_tokens)]
        (seconds,) = await self._ask({"op": "prefill", "prompt": prompt})
        return seconds

    async def decode(self, batch: int, scale: Scale) -> list[float]:
        context = scale.context - scale.num_steps // 2
        return await self._ask(
            {"op": "decode", "batch": batch, "context": context, "num_steps": scale.num_steps}
        )

    async def _ask(self, request: Mapping[str, object]) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        seconds = (await self._read(_CHILD_STEP_S))["seconds"]
        assert isinstance(seconds, list), seconds
        return seconds

    async def _read(self, timeout_s: float) -> dict[str, object]:
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            raise InternalError("transformers' process has ended; its error is above.")
        message = json.loads(line)
        assert isinstance(message, dict), message
        return message

    async def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds by side and arm (`prefill 512`, `decode 8`): one value for each round."""

    seconds: dict[str, dict[str, list[float]]]
    non_model_s: list[float]
    version: str

    def sample(self, side: str, arm: str) -> Sample:
        return Sample(values=tuple(self.seconds[side][arm]))

    def speed_ratio(self, side: str, arm: str) -> Sample:
        """How many times as fast we are, round by round."""
        pairs = zip(self.seconds[OURS][arm], self.seconds[side][arm], strict=True)
        return Sample(values=tuple(theirs / ours for ours, theirs in pairs))


async def measure(setting: Setting, scale: Scale) -> Measured:
    """Start all sides and let them take turns; one short turn each to warm up."""
    core = setting.cores.engine
    batch = max(BATCHES)
    plan = WorkerPlan(
        role="decode",
        engine_core=core,
        chunk_tokens=max(*scale.prefills, 2_048),
        pool_tokens=2 * max(*scale.prefills, batch * (scale.context + scale.num_steps + batch)),
    )
    async with AsyncExitStack() as stack:
        config = cluster_config(setting, "engine", [plan])
        ours = Ours(asker=await stack.enter_async_context(open_asker(config, seed=1)))
        theirs = {
            f"transformers {dtype}": await Theirs.start(setting, dtype, stack)
            for dtype in ("bfloat16", "float32")
        }
        sides: dict[str, Side] = {OURS: ours, **theirs}
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for side in sides.values():
            await side.prefill(min(scale.prefills))
        for round_number in range(scale.num_rounds):
            for num_tokens in scale.prefills:
                for name, side in sides.items():
                    seconds[name][f"prefill {num_tokens}"].append(await side.prefill(num_tokens))
            for batch in BATCHES:
                for name, side in sides.items():
                    periods = await side.decode(batch, scale)
                    seconds[name][f"decode {batch}"].append(quantile(periods, 0.5))
            progress(f"round {round_number + 1} of {scale.num_rounds}")
        return Measured(
            seconds={name: dict(arms) for name, arms in seconds.items()},
            non_model_s=ours.non_model_s,
            version=next(iter(theirs.values())).version,
        )


def findings_of(measured: Measured, scale: Scale) -> list[Finding]:
    """Bars are those of the dtype that we are asked for: bfloat16."""
    found = []
    arms = [f"prefill {num_tokens}" for num_tokens in scale.prefills]
    arms += [f"decode {batch}" for batch in BATCHES]
    for arm in arms:
        for side in measured.seconds:
            sample = measured.sample(side, arm)
            found.append(
                Finding(
                    what=f"{arm}: {side}",
                    value=sample.median * 1e3,
                    unit="ms",
                    detail=str(Sample(values=tuple(value * 1e3 for value in sample.values))),
                )
            )
        for side in measured.seconds:
            if side == OURS:
                continue
            ratio = measured.speed_ratio(side, arm)
            has_bar = side.endswith("bfloat16") and arm != f"decode {max(BATCHES)}"
            found.append(
                Finding(
                    what=f"{arm}: times as fast as {side}",
                    value=ratio.median,
                    bar=1.0 if has_bar else None,
                    detail=str(ratio),
                )
            )
    few, many = (measured.seconds[OURS][f"decode {batch}"] for batch in BATCHES)
    rates = Sample(
        values=tuple(
            BATCHES[1] * alone / together for alone, together in zip(few, many, strict=True)
        )
    )
    non_model_ms = [value * 1e3 for value in measured.non_model_s]
    found += [
        Finding(
            what="rate at batch 8 over batch 1",
            value=rates.median,
            bar=3.0,
            detail=str(rates),
        ),
        Finding(
            what="non-model part of a step at batch 8, median",
            value=quantile(non_model_ms, 0.5),
            unit="ms",
            bar=0.5,
            is_upper=True,
            detail=f"p99 {quantile(non_model_ms, 0.99):.2f}, of {len(non_model_ms)} steps",
        ),
    ]
    return found


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed: pip install 'moonpool[oracle]'")
    scale = Scale(num_rounds=options.rounds)
    if setting.is_quick:
        scale = Scale(prefills=(64, 128), context=64, num_steps=8, num_rounds=1)
    measured = await measure(setting, scale)
    findings = findings_of(measured, scale)
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "transformers": measured.version,
            "prefill_tokens": list(scale.prefills),
            "context": scale.context,
            "num_steps": scale.num_steps,
            "num_rounds": scale.num_rounds,
            "cores": "the engine or transformers on one, everything else on the other",
        },
        findings=findings,
        samples={"seconds": measured.seconds, "non_model_s": measured.non_model_s},
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.engine")
    parser.add_argument("--rounds", type=int, default=3)
    return run("engine", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
