"""`python -m moonpool_prefill --config FILE`: one prefill worker (service and engine process)."""

from __future__ import annotations

import sys

from moonpool.config.process import WorkerConfig
from moonpool.service.main import main
from moonpool_prefill.app import build

if __name__ == "__main__":
    sys.exit(main(build, WorkerConfig, program="moonpool_prefill", about=__doc__))
