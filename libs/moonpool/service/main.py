"""main(): what each service's `python -m` does: its document in, its exit code out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from moonpool.config.process import DocumentT, read_document
from moonpool.errors import ConfigError
from moonpool.service.life import Service, StopPolicy
from moonpool.service.runner import EXIT_CONFIG, run


def main(
    build: Callable[[DocumentT], Service],
    document_type: type[DocumentT],
    *,
    program: str,
    about: str | None,
) -> int:
    """Run the service that `--config` describes. Returns the exit code; the caller passes it to sys.exit.

    Args:
        build: The composition root.
        program, about: For `--help`.
    """
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--config", required=True, help="the process's document, or - for stdin")
    arguments = parser.parse_args()
    try:
        config = read_document(arguments.config, document_type)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_CONFIG
    return run(
        build,
        config,
        name=config.process_name,
        telemetry=config.common.telemetry,
        policy=StopPolicy(drain_timeout_s=config.drain_timeout_s),
    )
