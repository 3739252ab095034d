"""What receiving KV costs running decodes: `python -m moonpool_loadtest.experiments.receiving`.

Eight requests decode steadily on D, whose engine has a core to itself; D's service, which receives and
verifies, shares the other core with P, router, broker and client. A few long prompts are asked for
again and again: P still holds their KV, D has evicted it and has room for fewer of them, so each time
all of it is read, and next to nothing is computed on P. What remains is the transport.

idle         nothing else
receiving    one prompt after the other, read by D over shm or over gRPC (a cluster of its own each)

Gaps are between steps of D's engine, by its own clock readings. They are counted for steps that compute
one token for each of the eight and nothing else; of the receiving arm, those within which bytes came.
The arms take turns, several times; each begins with eight new requests of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from moonpool.config.schema import TransportName
from moonpool.errors import InternalError
from moonpool.telemetry import names
from moonpool.wire.steps import StepRecord
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
)
from moonpool_loadtest.experiments.numbers import Distribution
from moonpool_loadtest.experiments.report import Finding, publish

TRANSPORTS: tuple[TransportName, ...] = ("shm", "nixl", "grpc")
IDLE, RECEIVING = "idle", "receiving"
DECODE = "decode-0"

#: More than a window can take. D's pool holds them, and what they have not used yet holds old prompts:
#: their sum is kept small, so that D forgets a prompt before it comes again.
_STEADY_MAX_TOKENS = 400
#: The second token is D's: without it nothing would have to be read.
_PROMPT_TOKENS_ASKED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the experiment is."""

    num_decodes: int = 8
    prompt_tokens: int = 2_048
    #: More than D has room for at any time.
    num_prompts: int = 5
    window_s: float = 12.0
    num_alternations: int = 3
    steady_max_tokens: int = _STEADY_MAX_TOKENS

    @property
    def decode_pool_tokens(self) -> int:
        """The steady requests, one prompt that is being read, and half of another."""
        steady = self.num_decodes * (STEADY_TOKENS + self.steady_max_tokens)
        return steady + self.prompt_tokens + self.prompt_tokens // 2

    @property
    def prefill_pool_tokens(self) -> int:
        return (self.num_prompts + 1) * (self.prompt_tokens + STEADY_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One read of D's, from its start until its bytes lay verified."""

    started_unix_ns: int
    ended_unix_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One arm, once."""

    #: Those that count: within which bytes came, or did not if the arm is idle.
    gaps_ms: tuple[float, ...]
    num_bytes: int
    #: While at least one read was under way, and in all.
    receiving_s: float
    duration_s: float


@dataclass(slots=True, kw_only=True)
class Rereads:
    """One prompt after the other until cancelled."""

    asker: Asker
    #: All of them again and again, from window to window: what was asked longest ago is next, which D has
    #: no room for.
    prompts: Iterator[tuple[int, ...]]
    ended: list[Answer] = field(default_factory=list)

    async def ask(self, prompt: tuple[int, ...]) -> None:
        answer = Answer(sent_unix_ns=time.time_ns())
        await self.asker.read_prompt(answer, prompt, _PROMPT_TOKENS_ASKED)
        self.ended.append(answer)

    async def run(self) -> None:
        for prompt in self.prompts:
            await self.ask(prompt)


def steady_gaps(
    steps: Sequence[StepRecord], *, num_tokens: int, start_ns: int, end_ns: int
) -> list[tuple[int, int]]:
    """(from, to) of neighbouring steps within the window that computed `num_tokens` each."""
    return [
        (earlier.computed_unix_ns, later.computed_unix_ns)
        for earlier, later in itertools.pairwise(steps)
        if later.step == earlier.step + 1
        and earlier.num_tokens == later.num_tokens == num_tokens
        and start_ns <= earlier.computed_unix_ns
        and later.computed_unix_ns <= end_ns
    ]


def split_by_arrivals(
    gaps: Iterable[tuple[int, int]], arrivals: Sequence[Arrival]
) -> tuple[list[float], list[float]]:
    """Lengths in ms of the gaps within which a read was under way, and of the others."""
    during: list[float] = []
    quiet: list[float] = []
    for start, end in gaps:
        is_during = any(
            arrival.started_unix_ns < end and start < arrival.ended_unix_ns for arrival in arrivals
        )
        (during if is_during else quiet).append((end - start) / 1e6)
    return during, quiet


def covered_s(arrivals: Sequence[Arrival]) -> float:
    """How long at least one read was under way."""
    total, until = 0, 0
    for arrival in sorted(arrivals, key=lambda arrival: arrival.started_unix_ns):
        total += max(0, arrival.ended_unix_ns - max(until, arrival.started_unix_ns))
        until = max(until, arrival.ended_unix_ns)
    return total / 1e9


async def fetch_arrivals(asker: Asker, answers: Sequence[Answer]) -> list[Arrival]:
    """The reads of requests that have ended, from their traces."""
    arrivals: list[Arrival] = []
    for answer in answers:
        spans = await asker.trace(answer, names.SPAN_KV_TRANSFER)
        arrivals += [
            Arrival(
                started_unix_ns=int(event.attributes["started_unix_ns"]),
                ended_unix_ns=event.unix_ns,
                num_bytes=int(event.attributes["num_bytes"]),
            )
            for span in spans
            if span.name == names.SPAN_KV_TRANSFER
            for event in span.events
            if event.name == names.EVENT_LAYERS_VERIFIED
        ]
    return arrivals


async def run_window(
    asker: Asker, scale: Scale, prompts: Iterator[tuple[int, ...]], *, is_receiving: bool
) -> Window:
    """Eight fresh decodes and, if wanted, the prompts in turn."""
    cluster = asker.cluster
    rereads = Rereads(asker=asker, prompts=prompts)
    async with steady_decodes(
        asker,
        scale.num_decodes,
        max_tokens=scale.steady_max_tokens,
        beside=rereads.run if is_receiving else None,
    ):
        start_ns = time.time_ns()
        last_step = (await cluster.steps(DECODE))[-1].step
        await asyncio.sleep(scale.window_s)
        end_ns = time.time_ns()
        steps = await cluster.steps(DECODE, after_step=last_step)
    await cluster.wait_quiet(timeout_s=60.0)
    arrivals = await fetch_arrivals(asker, rereads.ended)
    gaps = steady_gaps(steps, num_tokens=scale.num_decodes, start_ns=start_ns, end_ns=end_ns)
    during, quiet = split_by_arrivals(gaps, arrivals)
    if is_receiving and not during:
        raise InternalError(f"{len(arrivals)} reads met none of {len(gaps)} gaps.")
    return Window(
        gaps_ms=tuple(during if is_receiving else quiet),
        num_bytes=sum(arrival.num_bytes for arrival in arrivals),
        receiving_s=covered_s(arrivals),
        duration_s=(end_ns - start_ns) / 1e9,
    )


Windows = dict[TransportName, dict[str, list[Window]]]


async def measure(setting: Setting, scale: Scale) -> Windows:
    """Start a cluster for each transport, let its P compute the prompts, let the arms take turns."""
    cores = setting.cores
    windows: Windows = {transport: {IDLE: [], RECEIVING: []} for transport in TRANSPORTS}
    async with AsyncExitStack() as stack:
        askers: dict[TransportName, Asker] = {}
        prompts: dict[TransportName, Iterator[tuple[int, ...]]] = {}
        for seed, transport in enumerate(TRANSPORTS):
            workers = [
                WorkerPlan(
                    role="prefill",
                    engine_core=cores.others,
                    chunk_tokens=scale.prompt_tokens,
                    pool_tokens=scale.prefill_pool_tokens,
                    transport=transport,
                ),
                WorkerPlan(
                    role="decode",
                    engine_core=cores.engine,
                    chunk_tokens=scale.prompt_tokens,
                    pool_tokens=scale.decode_pool_tokens,
                    transport=transport,
                ),
            ]
            config = cluster_config(setting, f"receiving-{transport}", workers)
            asker = await stack.enter_async_context(open_asker(config, seed=seed))
            askers[transport] = asker
            prompts[transport] = itertools.cycle(
                [asker.new_prompt(scale.prompt_tokens) for _ in range(scale.num_prompts)]
            )
            warm_up = Rereads(asker=asker, prompts=prompts[transport])
            for _ in range(scale.num_prompts):
                await warm_up.ask(next(prompts[transport]))
            progress(f"{transport}: {scale.num_prompts} prompts are on P")
        for turn in range(scale.num_alternations):
            for transport, asker in askers.items():
                for arm in (IDLE, RECEIVING) if turn % 2 == 0 else (RECEIVING, IDLE):
                    window = await run_window(
                        asker, scale, prompts[transport], is_receiving=arm == RECEIVING
                    )
                    windows[transport][arm].append(window)
                    progress(
                        f"turn {turn + 1} of {scale.num_alternations}, {transport}, {arm}: "
                        f"{len(window.gaps_ms)} gaps, {window.num_bytes / 1e6:.0f} MB"
                    )
    return windows


def pooled(windows: Sequence[Window]) -> Distribution:
    """All gaps that count of an arm's windows."""
    return Distribution.of([gap for window in windows for gap in window.gaps_ms])


def findings_of(windows: Windows) -> list[Finding]:
    """Gaps while receiving over idle ones, and how much was received."""
    found = []
    for transport, arms in windows.items():
        idle, receiving = pooled(arms[IDLE]), pooled(arms[RECEIVING])
        for name in ("p50", "p99"):
            turns = [
                getattr(pooled([window]), name) / getattr(pooled([base]), name)
                for window, base in zip(arms[RECEIVING], arms[IDLE], strict=True)
            ]
            found.append(
                Finding(
                    what=f"{transport}: {name} gap while receiving over idle",
                    value=getattr(receiving, name) / getattr(idle, name),
                    detail=(
                        f"{getattr(receiving, name):.1f} over {getattr(idle, name):.1f} ms; turn by "
                        f"turn {statistics.median(turns):.3f} [{min(turns):.3f} .. {max(turns):.3f}]; "
                        f"{receiving.num} gaps over {idle.num}"
                    ),
                )
            )
        num_bytes = sum(window.num_bytes for window in arms[RECEIVING])
        receiving_s = sum(window.receiving_s for window in arms[RECEIVING])
        duration_s = sum(window.duration_s for window in arms[RECEIVING])
        found.append(
            Finding(
                what=f"{transport}: received while a read was under way",
                value=num_bytes / 1e6 / receiving_s,
                unit="MB/s",
                detail=f"{num_bytes / 1e6:.0f} MB; {receiving_s / duration_s:.0%} of the time",
            )
        )
    return found


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    scale = Scale(
        prompt_tokens=options.prompt,
        window_s=options.seconds,
        num_alternations=options.alternations,
    )
    if setting.is_quick:
        scale = Scale(
            num_decodes=2,
            prompt_tokens=512,
            num_prompts=3,
            window_s=4.0,
            num_alternations=1,
            steady_max_tokens=160,
        )
    windows = await measure(setting, scale)
    findings = findings_of(windows)
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "num_decodes": scale.num_decodes,
            "prompt_tokens": scale.prompt_tokens,
            "num_prompts": scale.num_prompts,
            "window_s": scale.window_s,
            "num_alternations": scale.num_alternations,
            "cores": "D's engine on one, everything else on the other",
        },
        findings=findings,
        samples={
            f"{transport}, {arm}": {
                "step_gaps_ms": pooled(turns).as_json(),
                "num_bytes": [window.num_bytes for window in turns],
                "receiving_s": [window.receiving_s for window in turns],
                "turns": [pooled([window]).as_json() for window in turns],
            }
            for transport, arms in windows.items()
            for arm, turns in arms.items()
        },
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.receiving")
    parser.add_argument("--prompt", type=int, default=2_048, help="tokens")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each arm, each time")
    parser.add_argument("--alternations", type=int, default=3)
    return run("receiving", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
