"""mypy over the whole tree, in a process beside the tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeCheck:
    """One run, under way or ended."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @classmethod
    def start(cls) -> TypeCheck:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        process = subprocess.Popen(
            [sys.executable, "-m", "mypy"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        return cls(process=process, output=output)

    def wait(self) -> tuple[int, str]:
        """Its exit status, and what it printed."""
        status = self.process.wait()
        self.output.seek(0)
        return status, self.output.read().decode()

    def stop(self) -> None:
        """End it if the run was over first. May be called twice."""
        self.process.kill()
        self.process.wait()
        self.output.close()


#: Where a run of the tests keeps it.
TYPE_CHECK = pytest.StashKey[TypeCheck]()
