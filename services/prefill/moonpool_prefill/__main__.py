"""`python -m moonpool_prefill --config FILE`: one prefill worker (service and engine process)."""

from __future__ import annotations

import argparse
import sys

from moonpool.config.process import WorkerConfig, read_document
from moonpool.errors import ConfigError
from moonpool.service.life import StopPolicy
from moonpool.service.runner import EXIT_CONFIG, run
from moonpool_prefill.app import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_prefill", description=__doc__)
    parser.add_argument("--config", required=True, help="the process's document, or - for stdin")
    arguments = parser.parse_args()
    try:
        config = read_document(arguments.config, WorkerConfig)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_CONFIG
    return run(
        build,
        config,
        name=config.worker_id,
        telemetry=config.common.telemetry,
        policy=StopPolicy(drain_timeout_s=config.worker.drain_timeout_s),
    )


if __name__ == "__main__":
    sys.exit(main())
