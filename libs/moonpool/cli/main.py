"""The entry point: runs a command and turns what went wrong into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from typing import Any

from typer import Abort, Exit

from moonpool.cli.app import app
from moonpool.cli.failure import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    as_json,
    describe,
    exit_code_of,
    expected_failure,
    flatten,
)

#: Set it to see the traceback of an expected failure too.
DEBUG_ENV = "MOONPOOL_DEBUG"


def main() -> None:
    """The `moonpool` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str], *, commands: Callable[..., Any] = app) -> int:  # Any: of any command
    """Run one command line; returns the exit code. Failures are told on stderr.

    With `--json` they are told on stdout as well, as an object with the key `error`. A bug of ours
    raises.

    Args:
        commands: All of them, called as typer calls its own.
    """
    is_json = "--json" in arguments
    try:
        result = commands(arguments, prog_name="moonpool", standalone_mode=False)
    except (KeyboardInterrupt, Abort):
        sys.stderr.write("\nmoonpool: interrupted\n")
        return EXIT_INTERRUPTED
    except Exit as exit_:
        return exit_.exit_code
    except Exception as error:
        if all(isinstance(leaf, BrokenPipeError) for leaf in flatten(error)):
            # Whoever read our output has seen enough; nothing is left to say to them.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        if os.environ.get(DEBUG_ENV):
            raise
        if hasattr(error, "format_message"):
            return _tell(_usage(error), code="usage", exit_code=EXIT_USAGE, is_json=is_json)
        failure = expected_failure(error)
        if failure is None:
            raise
        return _tell(
            describe(failure), code=failure.code, exit_code=exit_code_of(failure), is_json=is_json
        )
    return result if isinstance(result, int) else EXIT_OK


def _tell(message: str, *, code: str, exit_code: int, is_json: bool) -> int:
    if is_json:
        sys.stdout.write(as_json(code, message) + "\n")
        sys.stdout.flush()
    sys.stderr.write(f"moonpool: {message}\n")
    return exit_code


def _usage(error: Any) -> str:  # Any: typer's own exceptions, which it does not export
    """The text for a wrong command line, with what was probably meant."""
    context: Any = getattr(error, "ctx", None)
    where = getattr(context, "command_path", "moonpool")
    option = getattr(error, "option_name", None)
    text = str(error.format_message()).rstrip(".")
    if option and text.startswith("No such option"):
        flags = [flag for parameter in context.command.params for flag in parameter.opts]
        close = difflib.get_close_matches(option, flags, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else "."
        return f"unknown flag {option}{hint} All flags: {where} --help"
    return f"{text[:1].lower()}{text[1:]}. Help: {where} --help".replace("?.", "?")


if __name__ == "__main__":
    main()
