"""ruff and mypy strict over the whole tree: one way to run anything, and the test run is it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.type_check import ROOT, TYPE_CHECK


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command: list[str]) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    result = subprocess.run(
        [ruff, *command, "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(300)
def test_mypy_strict(pytestconfig: pytest.Config) -> None:
    status, output = pytestconfig.stash[TYPE_CHECK].wait()
    assert status == 0, output
