"""`python -m moonpool_kvstore --config FILE`: one store node, a single process."""

from __future__ import annotations

import argparse
import sys

from moonpool.config.process import KvStoreConfig, read_document
from moonpool.errors import ConfigError
from moonpool.service.life import StopPolicy
from moonpool.service.runner import EXIT_CONFIG, run
from moonpool_kvstore.app import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_kvstore", description=__doc__)
    parser.add_argument("--config", required=True, help="the process's document, or - for stdin")
    arguments = parser.parse_args()
    try:
        config = read_document(arguments.config, KvStoreConfig)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_CONFIG
    return run(
        build,
        config,
        name=config.store_id,
        telemetry=config.common.telemetry,
        policy=StopPolicy(drain_timeout_s=config.store.drain_timeout_s),
    )


if __name__ == "__main__":
    sys.exit(main())
