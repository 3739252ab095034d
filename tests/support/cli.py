"""Running the command line: in this process, or as a user does."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.cli.app import app
from moonpool.cli.main import run

COMMAND = (sys.executable, "-P", "-m", "moonpool.cli.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # Any: JSON
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


def cli(*arguments: str, commands: Callable[..., Any] = app) -> Ran:
    """One command line inside this process. Neither stream is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(list(arguments), commands=commands)
    return Ran(code=code, out=out.getvalue(), err=err.getvalue())


def environment(data_dir: Path) -> dict[str, str]:
    """For a process of its own: this one's, without what a developer has set for Moonpool."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MOONPOOL_")}
    return {**kept, "MOONPOOL_HOME": str(data_dir)}


def run_cli(*arguments: str, data_dir: Path, timeout_s: float = 60.0) -> Ran:
    """One command line as a process."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(data_dir),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)
