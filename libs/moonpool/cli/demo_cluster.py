"""What every demo needs: a configuration, a screen that shows a cluster come and go, whole traces."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moonpool.cli.terminal import Glyphs, make_console, print_json
from moonpool.cli.up_view import short_detail
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.cluster.part import PartEvent, PartState
from moonpool.cluster.process import ChildProcess, living_group_members
from moonpool.config.load import load_cluster_config
from moonpool.config.schema import ClusterConfig
from moonpool.errors import NotFoundError
from moonpool.rpc.admin import fetch_trace
from moonpool.telemetry import names
from moonpool.wire.spans import Span

_TRACE_TIMEOUT_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """What is served, and how KV is read: flags of every demo."""

    model: str
    dtype: str
    transports: str | None = None
    data_dir: Path | None = None


def demo_config(served: DemoModel, flags: Mapping[str, object]) -> ClusterConfig:
    """Free ports, and what `flags` say. The environment is not asked: a demo is always the same.

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
            "data_dir": served.data_dir,
            "model": served.model,
            "dtype": served.dtype,
            "router.http_port": 0,
            "router.grpc_port": 0,
            "worker.transports": served.transports,
            **flags,
        },
    ).config


async def whole_trace(address: str, request_id: str) -> tuple[Span, ...]:
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


class DemoScreen:
    """What the user sees of a demo's cluster; nothing if the answer is to be JSON."""

    def __init__(self, *, is_json: bool, console: Console | None = None) -> None:
        self.console = console or make_console()
        self.glyphs = Glyphs.of(self.console)
        self.is_json = is_json
        self._started = time.monotonic()
        self._is_serving = False
        #: Process groups of each part, those of earlier lives too.
        self._groups: dict[str, set[int]] = {}

    def on_part(self, event: PartEvent) -> None:
        """A part of the cluster has changed its state."""
        if self._is_serving:
            return
        if event.state is PartState.READY:
            self.say(f"  {self.glyphs.ok} {event.part}")
        elif event.state in (PartState.CRASHED, PartState.FAILED):
            self.say(f"  {self.glyphs.bad} {event.part}: {short_detail(event)}")

    def on_ready(self, cluster: LocalCluster) -> None:
        """It serves; what runs is noted, to see that it ends."""
        self._is_serving = True
        self.note_processes(cluster)
        self.say(f"Ready in {time.monotonic() - self._started:.1f} s.\n")

    def note_processes(self, cluster: LocalCluster) -> None:
        """What runs now, beside what ran before."""
        for name, process in _processes(cluster).items():
            self._groups.setdefault(name, set()).add(process.pid)

    def on_stopped(self) -> None:
        """It has ended, and what is left of it."""
        groups = set().union(*self._groups.values())
        num_left = sum(len(living_group_members(group)) for group in groups)
        left = "nothing is left running" if not num_left else f"{num_left} processes are LEFT"
        self.say(
            f"\nStopped all {len(self._groups)} parts, {left}. "
            f"The whole demo took {time.monotonic() - self._started:.1f} s."
        )
        self.say("Next: moonpool up, then moonpool chat", style="dim")

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line of text."""
        if self.is_json:
            return
        self.console.print(text, style=style, soft_wrap=True, markup=False)
        self.console.file.flush()

    def result(self, document: Mapping[str, Any]) -> None:  # Any: JSON
        """The whole answer, for programs only."""
        if self.is_json:
            print_json(document)


def _processes(cluster: LocalCluster) -> dict[str, ChildProcess]:
    """By part; each is the leader of a process group of its own, its engine in it."""
    names = ("router", *cluster.node_ids)
    processes = {name: cluster.part(name).process for name in names}
    processes["nats"] = cluster.nats_process
    return {name: process for name, process in processes.items() if process is not None}
