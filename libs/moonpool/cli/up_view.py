"""What `moonpool up` shows while a cluster starts, serves and stops.

A board that is redrawn on a terminal, lines elsewhere, JSON lines for programs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moonpool.cli.failure import without_log_lines
from moonpool.cli.terminal import Glyphs, is_live, make_console, print_json
from moonpool.cluster.local_cluster import NATS, ROUTER, Endpoints
from moonpool.cluster.part import PartEvent, PartState
from moonpool.config.schema import ClusterConfig
from moonpool.config.values import without_credentials

_STYLE_BY_STATE = {
    PartState.READY: "green",
    PartState.STARTING: "yellow",
    PartState.CRASHED: "red",
    PartState.FAILED: "red",
    PartState.STOPPED: "dim",
}
_REFRESH_PER_S = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What is said of a cluster when it serves."""

    config: ClusterConfig
    #: The model's name at the door.
    model: str
    endpoints: Endpoints
    run_dir: str


class UpView(Protocol):
    """Calls return at once."""

    def on_part(self, event: PartEvent) -> None: ...

    def on_ready(self, facts: ClusterFacts) -> None: ...

    def on_draining(self) -> None: ...

    def on_forced(self) -> None: ...

    def on_stopped(self) -> None: ...


def make_view(config: ClusterConfig, *, is_json: bool) -> UpView:
    """The form that fits stdout."""
    if is_json:
        return JsonView()
    console = make_console()
    return BoardView(console, config) if is_live(console) else LineView(console)


def headline(config: ClusterConfig) -> str:
    """`smollm2-135m, bfloat16: 1 prefill + 1 decode`."""
    counts: dict[str, int] = {}
    for group in config.workers:
        counts[group.role] = counts.get(group.role, 0) + group.count
    if config.stores:
        num_stores = sum(group.count for group in config.stores)
        counts["store" if num_stores == 1 else "stores"] = num_stores
    workers = " + ".join(f"{count} {role}" for role, count in counts.items())
    return f"{config.model}, {config.dtype}: {workers}"


def how_to_talk(facts: ClusterFacts) -> list[tuple[str, str]]:
    """(what, command or address) of everything that a user can do now."""
    url = facts.endpoints.http_url
    rows = [("chat", "moonpool chat"), ("status", "moonpool status")]
    if url:
        has_keys = facts.config.router.has_keys
        body = json.dumps(
            {
                "model": facts.model,
                "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            }
        )
        authorization = " -H 'authorization: Bearer YOUR_KEY'" if has_keys else ""
        rows += [
            (
                "curl",
                f"curl -s {url}/v1/chat/completions -H 'content-type: application/json'"
                f"{authorization} -d '{body}'",
            ),
            ("OpenAI", f"base_url={url}/v1"),
            ("metrics", f"{url}/metrics"),
        ]
    rows += [("gRPC", facts.endpoints.grpc_address), ("logs", facts.run_dir)]
    return rows


class LineView:
    """One line per change, for files and pipes."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started = clock()

    def on_part(self, event: PartEvent) -> None:
        detail = short_detail(event)
        self._line(f"{event.part}: {event.state}{f' ({detail})' if detail else ''}")

    def on_ready(self, facts: ClusterFacts) -> None:
        self._line(f"ready: {headline(facts.config)}")
        for what, how in how_to_talk(facts):
            self._line(f"  {what:8} {how}")
        self._line("Ctrl-C drains, a second one forces.")

    def on_draining(self) -> None:
        self._line("draining: running requests end, new ones are refused; Ctrl-C again forces")

    def on_forced(self) -> None:
        self._line("forced: killing what is left")

    def on_stopped(self) -> None:
        self._line(f"stopped after {self._clock() - self._started:.1f} s: nothing is left running")

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)
        self._console.file.flush()


class JsonView:
    """One JSON object per change."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()

    def on_part(self, event: PartEvent) -> None:
        warning = {"warning": event.warning} if event.warning else {}
        self._say("part", part=event.part, state=event.state.value, detail=event.detail, **warning)

    def on_ready(self, facts: ClusterFacts) -> None:
        self._say(
            "ready",
            name=facts.config.name,
            model=facts.model,
            grpc_address=facts.endpoints.grpc_address,
            http_url=facts.endpoints.http_url,
            nats_url=without_credentials(facts.endpoints.nats_url),
            run_dir=facts.run_dir,
        )

    def on_draining(self) -> None:
        self._say("draining")

    def on_forced(self) -> None:
        self._say("forced")

    def on_stopped(self) -> None:
        self._say("stopped")

    def _say(self, event: str, **details: str) -> None:
        print_json(
            {"event": event, "elapsed_s": round(self._clock() - self._started, 3), **details}
        )


@dataclass(slots=True, kw_only=True)
class _Row:
    state: PartState
    detail: str
    since: float


class Board:
    """The parts of a cluster and where each stands. Not a thread's own: the caller sees to that."""

    def __init__(self, config: ClusterConfig, *, now: float) -> None:
        self._title = headline(config)
        self._started = now
        names = [NATS] if config.nats.is_embedded else []
        names.append(ROUTER)
        names += [
            f"{group.name or group.role}-{index}"
            for group in config.workers
            for index in range(group.count)
        ]
        names += [
            f"{group.name}-{index}" for group in config.stores for index in range(group.count)
        ]
        self._rows = {name: _Row(state=PartState.STOPPED, detail="", since=now) for name in names}
        self.phase = "starting"

    def change(self, event: PartEvent, *, now: float) -> None:
        row = self._rows.setdefault(event.part, _Row(state=event.state, detail="", since=now))
        if row.state is not event.state:
            row.since = now
        row.state = event.state
        row.detail = short_detail(event)

    def all_ready(self, endpoints: Endpoints, *, now: float) -> None:
        """The router serves and every worker has joined it."""
        detail = f"grpc_address={endpoints.grpc_address} http_url={endpoints.http_url}"
        self.change(PartEvent(part=ROUTER, state=PartState.READY, detail=detail), now=now)

    def render(self, glyphs: Glyphs, *, now: float) -> RenderableType:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for name, row in self._rows.items():
            mark = {
                PartState.READY: glyphs.ok,
                PartState.FAILED: glyphs.bad,
                PartState.CRASHED: glyphs.bad,
            }.get(row.state, glyphs.dot)
            is_waiting = row.state is PartState.STARTING
            text = f"{now - row.since:.1f} s  {row.detail}" if is_waiting else row.detail
            table.add_row(
                Text(mark, style=_STYLE_BY_STATE[row.state]),
                Text(name),
                Text(row.state.value, style=_STYLE_BY_STATE[row.state]),
                Text(text.rstrip(), style="dim"),
            )
        title = Text.assemble(
            ("moonpool ", "bold"),
            self._title,
            (f"  {self.phase} {now - self._started:.0f} s", "dim"),
        )
        return Group(title, table)


class BoardView:
    """A board that is redrawn in place until the cluster serves; lines from there on.

    It does not stay on the screen's bottom while requests run: nothing else moves there, and a
    terminal that is left alone can be scrolled and copied from.
    """

    def __init__(
        self,
        console: Console,
        config: ClusterConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._glyphs = Glyphs.of(console)
        self._board = Board(config, now=clock())
        self._live: Live | None = Live(
            get_renderable=self._render, console=console, refresh_per_second=_REFRESH_PER_S
        )
        self._live.start()
        self._lines = LineView(console, clock=clock)

    def on_part(self, event: PartEvent) -> None:
        self._board.change(event, now=self._clock())
        if self._live is None:
            self._lines.on_part(event)

    def on_ready(self, facts: ClusterFacts) -> None:
        self._board.phase = "ready in"
        self._board.all_ready(facts.endpoints, now=self._clock())
        self._freeze()
        self._console.print()
        for what, how in how_to_talk(facts):
            # Not wrapped by us: a command must survive being copied.
            self._console.print(Text.assemble((f"  {what:8} ", "bold"), how), soft_wrap=True)
        self._console.print("\nCtrl-C drains, a second one forces.", style="dim")

    def on_draining(self) -> None:
        self._freeze()
        self._lines.on_draining()

    def on_forced(self) -> None:
        self._lines.on_forced()

    def on_stopped(self) -> None:
        self._freeze()
        self._lines.on_stopped()

    def _freeze(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        return self._board.render(self._glyphs, now=self._clock())


def short_detail(event: PartEvent) -> str:
    """A line about a part: where it listens, or what it complained of."""
    text = without_log_lines(event.detail).partition("\n")[0]
    facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
    shown = [facts[key] for key in ("grpc_address", "http_url") if key in facts]
    shown += [f"{key} {facts[key]}" for key in ("memory", "ssd") if key in facts]
    return "; ".join(filter(None, (", ".join(shown) or text, event.warning)))
