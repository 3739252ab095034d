"""What long prompts do to running decodes: `python -m moonpool_loadtest.experiments.isolation`.

Eight requests decode steadily on D, whose engine has a core to itself; D's service, P, router, broker
and client share the other core. Gaps are counted per step of D's engine: from one step's tokens drawn
to the next one's, by the engine's own clock readings.

idle         nothing else
burst        prompts of 4k tokens, one after the other, prefilled on P and read by D; each asks for two
             tokens
control      the same prompts on a worker of another cluster, whose engine has P's core: D does not
             hear of them. What differs from idle here is the machine's, not ours
aggregated   one worker decodes and prefills, in chunks of 512, on D's core

The arms take turns, several times; each begins with eight new requests of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from moonpool.errors import InternalError
from moonpool_loadtest.experiments.lab import (
    STEADY_TOKENS,
    Answer,
    Asker,
    Setting,
    WorkerPlan,
    cluster_config,
    open_asker,
    progress,
    run,
    steady_decodes,
    taking_turns,
)
from moonpool_loadtest.experiments.numbers import Distribution
from moonpool_loadtest.experiments.report import Finding, publish

IDLE, BURST, CONTROL, AGGREGATED = "idle", "burst", "control", "aggregated"
ARMS = (IDLE, BURST, CONTROL, AGGREGATED)
DECODE = "decode-0"

#: More than a window can take.
_STEADY_MAX_TOKENS = 3_000
_PROMPT_TOKENS_ASKED = 2
#: Of a window that is measured by time only: two gaps at least.
_FEWEST_STEPS = 4
#: A window that has not seen its steps ends when it is so many times as long as planned.
_LONGEST = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the experiment is."""

    num_decodes: int = 8
    prompt_tokens: int = 4_096
    window_s: float = 30.0
    num_alternations: int = 5
    #: Steps of D per arm, over all alternations; windows last longer until they have their share.
    min_steps: int = 2_000
    chunk_tokens: int = 2_048
    aggregated_chunk_tokens: int = 512

    @property
    def steps_per_window(self) -> int:
        return math.ceil(self.min_steps / self.num_alternations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One arm, once."""

    #: Between steps of D's engine, and between the chunks that the clients of the decodes saw.
    step_gaps_ms: tuple[float, ...]
    client_gaps_ms: tuple[float, ...]
    duration_s: float
    #: Prompts that ended within it, and the time to the first token of each.
    prompt_ttft_ms: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class Prompts:
    """Long prompts, one after the other, until cancelled."""

    asker: Asker
    num_tokens: int
    ended: list[Answer] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            self.ended.append(await self.asker.ask(self.num_tokens, _PROMPT_TOKENS_ASKED))


async def run_window(
    asker: Asker, scale: Scale, *, bursts_on: Asker | None, needs_steps: bool
) -> Window:
    """Eight fresh decodes on `asker`'s cluster and, if given, prompts on another or the same one.

    Args:
        needs_steps: The window lasts until it has its share of steps.
    """
    cluster = asker.cluster
    prompts = Prompts(asker=bursts_on or asker, num_tokens=scale.prompt_tokens)
    async with steady_decodes(
        asker,
        scale.num_decodes,
        max_tokens=_STEADY_MAX_TOKENS,
        beside=prompts.run if bursts_on is not None else None,
    ) as answers:
        start_ns = time.time_ns()
        num_before = [len(answer.token_unix_ns) for answer in answers]
        last_step = (await cluster.steps(DECODE))[-1].step
        wanted = scale.steps_per_window if needs_steps else _FEWEST_STEPS
        await asyncio.sleep(scale.window_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((_LONGEST - 1.0) * scale.window_s):
                for answer, num_tokens in zip(answers, num_before, strict=True):
                    await answer.wait_for_tokens(num_tokens + wanted)
        end_ns = time.time_ns()
        steps = await cluster.steps(DECODE, after_step=last_step)
    await cluster.wait_quiet(timeout_s=60.0)
    if bursts_on is not None:
        await bursts_on.cluster.wait_quiet(timeout_s=60.0)
    gaps_ms = tuple(
        (later.computed_unix_ns - earlier.computed_unix_ns) / 1e6
        for earlier, later in itertools.pairwise(steps)
        if later.step == earlier.step + 1
        and start_ns <= earlier.computed_unix_ns
        and later.computed_unix_ns <= end_ns
    )
    if not gaps_ms:
        raise InternalError(f"No two steps in {(end_ns - start_ns) / 1e9:.0f} s.")
    return Window(
        step_gaps_ms=gaps_ms,
        client_gaps_ms=tuple(
            gap for answer in answers for gap in answer.gaps_ms(start_ns=start_ns, end_ns=end_ns)
        ),
        duration_s=(end_ns - start_ns) / 1e9,
        prompt_ttft_ms=tuple(answer.ttft_ms for answer in prompts.ended),
    )


async def measure(setting: Setting, scale: Scale) -> dict[str, list[Window]]:
    """Start the three clusters and let the arms take turns; one short turn each to warm up."""
    cores = setting.cores
    decodes = scale.num_decodes * (STEADY_TOKENS + _STEADY_MAX_TOKENS)
    prompt = scale.prompt_tokens + 64

    def worker(role: str, core: int, chunk_tokens: int, pool_tokens: int) -> WorkerPlan:
        return WorkerPlan(
            role="prefill" if role == "prefill" else "decode",
            engine_core=core,
            chunk_tokens=chunk_tokens,
            pool_tokens=pool_tokens,
        )

    configs = {
        IDLE: cluster_config(
            setting,
            "isolation",
            [
                worker("prefill", cores.others, scale.chunk_tokens, 2 * prompt),
                worker("decode", cores.engine, scale.chunk_tokens, decodes + 2 * prompt),
            ],
        ),
        CONTROL: cluster_config(
            setting,
            "isolation-control",
            [worker("decode", cores.others, scale.chunk_tokens, 2 * prompt)],
        ),
        AGGREGATED: cluster_config(
            setting,
            "isolation-aggregated",
            [worker("decode", cores.engine, scale.aggregated_chunk_tokens, decodes + 2 * prompt)],
        ),
    }
    windows: dict[str, list[Window]] = {arm: [] for arm in ARMS}
    async with AsyncExitStack() as stack:
        askers = {
            name: await stack.enter_async_context(open_asker(config, seed=index))
            for index, (name, config) in enumerate(configs.items())
        }
        watched = {arm: askers[AGGREGATED if arm == AGGREGATED else IDLE] for arm in ARMS}
        bursts_on = {
            IDLE: None,
            BURST: askers[IDLE],
            CONTROL: askers[CONTROL],
            AGGREGATED: askers[AGGREGATED],
        }
        for asker in askers.values():
            await asker.ask(scale.prompt_tokens, _PROMPT_TOKENS_ASKED)
        for turn, arm in taking_turns(ARMS, scale.num_alternations):
            window = await run_window(
                watched[arm], scale, bursts_on=bursts_on[arm], needs_steps=arm != AGGREGATED
            )
            windows[arm].append(window)
            progress(
                f"turn {turn + 1} of {scale.num_alternations}, {arm}: {window.duration_s:.0f} s, "
                f"{len(window.step_gaps_ms)} steps, {len(window.prompt_ttft_ms)} prompts"
            )
    return windows


def pooled(windows: Sequence[Window]) -> Distribution:
    """All gaps between steps of an arm's windows."""
    return Distribution.of([gap for window in windows for gap in window.step_gaps_ms])


def findings_of(windows: dict[str, list[Window]], scale: Scale) -> list[Finding]:
    """Ratios of pooled p99 gaps; how far single alternations lie apart is told beside them."""
    by_arm = {arm: pooled(windows[arm]) for arm in ARMS}
    idle = by_arm[IDLE].p99
    found = []
    for arm, bar, aim in (
        (BURST, 1.3, 1.05),
        (CONTROL, None, None),
        (AGGREGATED, None, None),
    ):
        turns = [
            Distribution.of(window.step_gaps_ms).p99 / Distribution.of(base.step_gaps_ms).p99
            for window, base in zip(windows[arm], windows[IDLE], strict=True)
        ]
        found.append(
            Finding(
                what=f"{arm}: p99 gap over idle",
                value=by_arm[arm].p99 / idle,
                bar=bar,
                aim=aim,
                is_upper=True,
                detail=(
                    f"turn by turn {statistics.median(turns):.3f} "
                    f"[{min(turns):.3f} .. {max(turns):.3f}]"
                ),
            )
        )
    for arm, gaps in by_arm.items():
        ttfts = [ttft for window in windows[arm] for ttft in window.prompt_ttft_ms]
        duration_s = sum(window.duration_s for window in windows[arm])
        client = Distribution.of([gap for w in windows[arm] for gap in w.client_gaps_ms])
        enough = "" if arm == AGGREGATED or gaps.num >= scale.min_steps else ", TOO FEW STEPS"
        found.append(
            Finding(
                what=f"{arm}: p99 gap",
                value=gaps.p99,
                unit="ms",
                detail=(
                    f"p50 {gaps.p50:.1f}, p99.9 {gaps.p999:.1f}, longest {gaps.longest:.1f}; "
                    f"{gaps.num} gaps in {duration_s:.0f} s{enough}; at the client p50 "
                    f"{client.p50:.1f}, p99 {client.p99:.1f}; {len(ttfts)} prompts"
                    + (f", TTFT {statistics.median(ttfts) / 1e3:.1f} s" if ttfts else "")
                ),
            )
        )
    return found


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    scale = Scale(
        prompt_tokens=options.prompt,
        window_s=options.seconds,
        num_alternations=options.alternations,
        min_steps=options.min_steps,
    )
    if setting.is_quick:
        scale = Scale(
            num_decodes=2,
            prompt_tokens=320,
            window_s=3.0,
            num_alternations=1,
            min_steps=5,
            aggregated_chunk_tokens=128,
        )
    windows = await measure(setting, scale)
    findings = findings_of(windows, scale)
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "num_decodes": scale.num_decodes,
            "prompt_tokens": scale.prompt_tokens,
            "window_s": scale.window_s,
            "num_alternations": scale.num_alternations,
            "chunk_tokens": {
                "prefill, control": scale.chunk_tokens,
                "aggregated": scale.aggregated_chunk_tokens,
            },
            "cores": "D's engine on one, everything else on the other",
        },
        findings=findings,
        samples={
            arm: {
                "step_gaps_ms": pooled(windows[arm]).as_json(),
                "turns": [
                    {
                        "step_gaps_ms": Distribution.of(window.step_gaps_ms).as_json(),
                        "client_gaps_ms": Distribution.of(window.client_gaps_ms).as_json(),
                        "duration_s": window.duration_s,
                        "prompt_ttft_ms": list(window.prompt_ttft_ms),
                    }
                    for window in windows[arm]
                ],
            }
            for arm in ARMS
        },
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.isolation")
    parser.add_argument("--prompt", type=int, default=4_096, help="tokens")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each arm, each time")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--min-steps", type=int, default=2_000, help="per arm, in all")
    return run("isolation", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
