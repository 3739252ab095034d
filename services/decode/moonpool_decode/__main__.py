"""`python -m moonpool_decode --config FILE`: one decode worker (service and engine process)."""

from __future__ import annotations

import sys

from moonpool.config.process import WorkerConfig
from moonpool.service.main import main
from moonpool_decode.app import build

if __name__ == "__main__":
    sys.exit(main(build, WorkerConfig, program="moonpool_decode", about=__doc__))
