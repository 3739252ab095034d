"""`moonpool pull`, and the progress that `up` and `demo` show when they have to pull."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moonpool.cli.failure import EXIT_OK
from moonpool.cli.target import data_dir_of
from moonpool.cli.terminal import format_bytes, is_live, make_console, print_json
from moonpool.errors import ConfigError
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.hub.progress import Progress as OnProgress
from moonpool.hub.pull import KNOWN_MODELS, is_pulled, model_path, pull

#: What a stage is about, for those who watch.
STAGE_TEXTS = {
    "download": "downloading",
    "verify": "verifying its SHA-256",
    "convert": "converting to safetensors",
}

_JSON_PERIOD_S = 0.5


def run_pull(name: str, *, data_dir: Path | None, is_json: bool) -> int:
    """Bring `name` here, or say that it is here.

    Raises:
        ConfigError: No such name.
        ModelError: The download failed or is not the expected file.
    """
    directory = data_dir_of(data_dir)
    if name not in KNOWN_MODELS:
        close = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown model {name!r}; {hint}known: {', '.join(KNOWN_MODELS)}")
    was_here = is_pulled(name, directory)
    if not was_here:
        with shown_progress(name, is_json=is_json) as progress:
            pull(name, directory, progress)
    path = model_path(name, directory)
    if is_json:
        print_json({"event": "pulled", "model": name, "path": str(path), "was_here": was_here})
    else:
        state = "is here already, complete" if was_here else "is ready"
        make_console().print(f"{name} {state}: {path}", soft_wrap=True)
    return EXIT_OK


def resolve_shown(model: str, data_dir: Path, *, is_json: bool) -> ModelDir:
    """The model's directory; pulled or converted first if needed, with progress on stderr.

    Raises:
        ModelError: It is not there and cannot be brought.
    """
    with shown_progress(model, is_json=is_json) as progress:
        return resolve(model, data_dir=data_dir, progress=progress, can_pull=True)


@contextmanager
def shown_progress(model: str, *, is_json: bool) -> Iterator[OnProgress]:
    """A bar on a terminal, a line per stage elsewhere, JSON lines for programs."""
    console = make_console(is_error=True)
    if is_json:
        yield _json_progress(model)
    elif is_live(console):
        with _bar(console) as bar:
            yield _BarProgress(bar, model)
    else:
        yield LineProgress(lambda line: console.print(line, soft_wrap=True), model)


class LineProgress:
    """A line when a stage begins, one when it is done. Silent for a stage that is over at once.

    Args:
        clock: Seconds; for the time that a stage took.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._model = model
        self._clock = clock
        self._started_by_stage: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = self._clock()
        is_new = stage not in self._started_by_stage
        if is_new:
            self._started_by_stage[stage] = now
            size = f" ({format_bytes(total)})" if total else ""
            self._write(f"{self._model}: {STAGE_TEXTS.get(stage, stage)}{size} ...")
        if total is not None and done >= total:
            took_s = now - self._started_by_stage.pop(stage)
            self._write(f"{self._model}: {stage} done, {format_bytes(total)} in {took_s:.1f} s")


class _BarProgress:
    def __init__(self, bar: Progress, model: str) -> None:
        self._bar = bar
        self._model = model
        self._task_by_stage: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._task_by_stage:
            text = f"{self._model}: {STAGE_TEXTS.get(stage, stage)}"
            self._task_by_stage[stage] = self._bar.add_task(text, total=total)
        self._bar.update(self._task_by_stage[stage], completed=done, total=total)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _json_progress(model: str) -> OnProgress:
    last = [0.0]

    def progress(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == total or now - last[0] >= _JSON_PERIOD_S:
            last[0] = now
            print_json(
                {"event": "pull", "model": model, "stage": stage, "done": done, "total": total}
            )

    return progress
