"""`moonpool demo`: one prefill and one decode worker continue a long conversation.

Life
  1. The model is pulled if it is not here.
  2. NATS, a router, a prefill and a decode worker start on free ports of 127.0.0.1.
  3. A conversation of over 1,000 tokens gets one more question; the answer streams to stdout.
  4. The request's trace is fetched from the router, and what happened is shown.
  5. Everything stops; nothing is left running.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from moonpool.cli.ask import Reply, ask
from moonpool.cli.demo_text import QUESTION, TITLE, TURNS, demo_messages
from moonpool.cli.failure import EXIT_OK
from moonpool.cli.journey import Journey, make_journey
from moonpool.cli.journey_view import journey_json, journey_lines
from moonpool.cli.pull import resolve_shown
from moonpool.cli.terminal import Glyphs, make_console, print_json
from moonpool.cli.up_view import short_detail
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.cluster.part import PartEvent, PartState
from moonpool.cluster.process import living_group_members
from moonpool.config.load import load_cluster_config
from moonpool.config.schema import ClusterConfig
from moonpool.errors import NotFoundError
from moonpool.inference.generation import SamplingOptions
from moonpool.rpc.admin import fetch_trace
from moonpool.telemetry import names
from moonpool.wire.spans import Span

_TRACE_TIMEOUT_S = 5.0
_POLL_S = 0.02
#: Room for the text and the answer, several times over; less memory to fault in than the default.
_POOL_BYTES = 192 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says."""

    model: str
    dtype: str
    max_tokens: int
    transports: str | None = None
    data_dir: Path | None = None


def run_demo(options: DemoOptions, *, is_json: bool) -> int:
    """Live through the five steps.

    Raises:
        MoonpoolError: A step failed; nothing is left running.
    """
    config = demo_config(options)
    resolve_shown(config.model, config.data_dir, is_json=is_json)
    screen = _Screen(make_console(), is_json=is_json)
    asyncio.run(_demo(config, options, screen))
    return EXIT_OK


def demo_config(options: DemoOptions) -> ClusterConfig:
    """One prefill, one decode, free ports. The environment is not asked: a demo is always the same.

    Raises:
        ConfigError: A flag's value is wrong.
    """
    environ = {key: value for key, value in os.environ.items() if key == "MOONPOOL_HOME"}
    environ |= {key: value for key, value in os.environ.items() if key == "XDG_DATA_HOME"}
    return load_cluster_config(
        None,
        environ=environ,
        flags={
            "name": "demo",
            "data_dir": options.data_dir,
            "model": options.model,
            "dtype": options.dtype,
            "router.http_port": 0,
            "router.grpc_port": 0,
            "worker.transports": options.transports,
            "worker.kv_cache_memory_bytes": _POOL_BYTES,
        },
    ).config


async def _demo(config: ClusterConfig, options: DemoOptions, screen: _Screen) -> None:
    started = time.monotonic()
    cluster = LocalCluster(config, on_event=screen.on_part)
    groups: list[int] = []
    async with cluster:
        groups = _process_groups(cluster)
        screen.on_ready(time.monotonic() - started)
        reply = await ask(
            demo_messages(),
            SamplingOptions(temperature=0.0, max_tokens=options.max_tokens),
            address=cluster.endpoints.grpc_address,
            api_key=None,
            on_text=screen.on_text,
        )
        spans = await _whole_trace(cluster.endpoints.grpc_address, reply.done.request_id)
        screen.on_answer(reply, make_journey(reply.done, spans, token_times_s=reply.token_times_s))
    screen.on_stopped(
        num_parts=len(groups),
        num_left=sum(len(living_group_members(group)) for group in groups),
        took_s=time.monotonic() - started,
    )


async def _whole_trace(address: str, request_id: str) -> tuple[Span, ...]:
    """The spans, once the decode worker's last frame has brought its own; what there is if it is late.

    The root span ends a moment after the client has its answer.
    """
    deadline = time.monotonic() + _TRACE_TIMEOUT_S
    while True:
        spans: tuple[Span, ...] = ()
        try:
            spans = await fetch_trace(address, request_id, key=None, deadline_s=_TRACE_TIMEOUT_S)
        except NotFoundError:
            if time.monotonic() >= deadline:
                raise
        is_whole = any(span.name == names.SPAN_DECODE for span in spans) and any(
            not span.parent_span_id for span in spans
        )
        if is_whole or time.monotonic() >= deadline:
            return spans
        await asyncio.sleep(_POLL_S)


def _process_groups(cluster: LocalCluster) -> list[int]:
    """Each part is the leader of a process group of its own, its engine in it."""
    parts = [cluster.part("router"), *map(cluster.part, cluster.worker_ids)]
    processes = [part.process for part in parts] + [cluster.nats_process]
    return [process.pid for process in processes if process is not None]


class _Screen:
    """What the user sees, or one JSON object at the end."""

    def __init__(self, console: Console, *, is_json: bool) -> None:
        self._console = console
        self._is_json = is_json
        self._glyphs = Glyphs.of(console)
        self._is_serving = False

    def on_part(self, event: PartEvent) -> None:
        if self._is_json or self._is_serving:
            return
        if event.state is PartState.READY:
            self._say(f"  {self._glyphs.ok} {event.part}")
        elif event.state in (PartState.CRASHED, PartState.FAILED):
            self._say(f"  {self._glyphs.bad} {event.part}: {short_detail(event)}")

    def on_ready(self, took_s: float) -> None:
        self._is_serving = True
        if self._is_json:
            return
        self._say(f"Ready in {took_s:.1f} s.\n")
        self._say(
            f"The prompt: {TITLE}, {len(TURNS)} questions with answers, and then:", style="dim"
        )
        self._say(f"> {QUESTION}\n", style="bold")

    def on_text(self, text: str) -> None:
        if not self._is_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def on_answer(self, reply: Reply, journey: Journey) -> None:
        if self._is_json:
            print_json(
                {"question": QUESTION, "answer": reply.text, "journey": journey_json(journey)}
            )
            return
        self._say("\n")
        self._say("What happened", style="bold")
        for line in journey_lines(journey, self._glyphs):
            self._say(line)

    def on_stopped(self, *, num_parts: int, num_left: int, took_s: float) -> None:
        if self._is_json:
            return
        left = "nothing is left running" if not num_left else f"{num_left} processes are LEFT"
        self._say(f"\nStopped all {num_parts} parts, {left}. The whole demo took {took_s:.1f} s.")
        self._say("Next: moonpool up, then moonpool chat", style="dim")

    def _say(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=True, markup=False)
        self._console.file.flush()
