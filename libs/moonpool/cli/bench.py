"""`moonpool bench`: runs the load generator, which stands above this package and is not imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

_MODULE = "moonpool_loadtest.bench"


def run_bench(arguments: Sequence[str]) -> int:
    """Run it with the command line's remaining arguments; returns its exit code."""
    with subprocess.Popen([sys.executable, "-P", "-m", _MODULE, *arguments]) as process:
        while True:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                # The terminal has sent it to the child as well, which ends and says so.
                continue
            return status if status >= 0 else 128 - status
