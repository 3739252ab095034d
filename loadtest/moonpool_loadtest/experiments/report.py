"""What an experiment prints: findings against their bars, then everything as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure of the table. Without a bar it is told for its own sake."""

    what: str
    value: float
    #: Appended to the value; empty for a ratio.
    unit: str = ""
    #: Lowest (or highest, if `is_upper`) value that passes, and the value that is aimed at.
    bar: float | None = None
    aim: float | None = None
    is_upper: bool = False
    #: Spread, counts: whatever helps to believe the value.
    detail: str = ""

    @property
    def is_met(self) -> bool | None:
        """None without a bar."""
        return None if self.bar is None else self._reaches(self.bar)

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        if not self._reaches(self.bar):
            return "MISSED"
        return "met" if self.aim is None or self._reaches(self.aim) else "met, aim missed"

    @property
    def limits(self) -> str:
        sign = "<=" if self.is_upper else ">="
        words = [] if self.bar is None else [f"{sign} {self.bar:g}"]
        words += [] if self.aim is None else [f"aim {self.aim:g}"]
        return ", ".join(words)

    def _reaches(self, limit: float) -> bool:
        return self.value <= limit if self.is_upper else self.value >= limit


def _print_table(findings: Sequence[Finding]) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        value = f"{finding.value:.4g}{' ' + finding.unit if finding.unit else ''}"
        line = f"{finding.what:<{width}}  {value:>12}  {finding.limits:<18} {finding.verdict:<16}"
        print(f"{line} {finding.detail}".rstrip())


def publish(
    *,
    scale: Mapping[str, object],
    findings: Sequence[Finding],
    samples: Mapping[str, object],
    is_quick: bool,
) -> None:
    """Print the table, then command, machine, commit, scale and figures as JSON."""
    _print_table(findings)
    document = {
        "command": _command(),
        "commit": _commit(),
        "machine": _machine(),
        "is_quick": is_quick,
        "scale": dict(scale),
        "findings": [
            {
                "what": finding.what,
                "value": finding.value,
                "unit": finding.unit,
                "bar": finding.bar,
                "aim": finding.aim,
                "is_met": finding.is_met,
            }
            for finding in findings
        ],
        "samples": dict(samples),
    }
    print(json.dumps(document, indent=2))


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec is not None else sys.argv[0]
    return " ".join([program, *sys.argv[1:]])


def _commit() -> str:
    """Of the source that runs; `+` if it differs from it."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"
    return described.stdout.strip()


def _machine() -> dict[str, object]:
    return {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch").split("+")[0],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
