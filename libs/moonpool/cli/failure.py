"""Exit codes, and failures as one line: what is wrong, why, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from moonpool.errors import (
    CancelledByClientError,
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

EXIT_OK = 0
#: It was tried and did not work; `doctor` found an error.
EXIT_FAILED = 1
#: A flag, a command or a configuration value is wrong.
EXIT_USAGE = 2
#: Nobody can serve it now: no cluster runs, or it is not ready.
EXIT_UNAVAILABLE = 3
#: The cluster refused the request: invalid, unknown, or without a valid key.
EXIT_REFUSED = 4
#: Ctrl-C before the end, or a second one.
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_UNAVAILABLE: "no cluster answers, or it is not ready",
    EXIT_REFUSED: "the cluster refused the request",
    EXIT_INTERRUPTED: "interrupted",
}

_EXIT_BY_ERROR: tuple[tuple[type[MoonpoolError], int], ...] = (
    (ConfigError, EXIT_USAGE),
    (UnavailableError, EXIT_UNAVAILABLE),
    (OverloadedError, EXIT_UNAVAILABLE),
    (DeadlineExceededError, EXIT_UNAVAILABLE),
    (InvalidRequestError, EXIT_REFUSED),
    (NotFoundError, EXIT_REFUSED),
    (UnauthenticatedError, EXIT_REFUSED),
    (PermissionDeniedError, EXIT_REFUSED),
    (FailedPreconditionError, EXIT_REFUSED),
    (CancelledByClientError, EXIT_INTERRUPTED),
)


def exit_code_of(error: MoonpoolError) -> int:
    """The exit code that tells a script what kind of failure it was."""
    for kind, code in _EXIT_BY_ERROR:
        if isinstance(error, kind):
            return code
    return EXIT_FAILED


def describe(error: MoonpoolError) -> str:
    """The error's text; what a child wrote to its log before it died becomes what it complained of."""
    return without_log_lines(error.message) or error.code


def without_log_lines(text: str) -> str:
    """`text` with the JSON log lines at its end replaced by the last complaint among them."""
    start = text.find('{"')
    if start < 0:
        return text
    complaints = [said for line in text[start:].splitlines() if (said := _complaint(line))]
    before = text[:start].rstrip(" \n.:")
    return ": ".join(part for part in (before, *complaints[-1:]) if part)


def as_json(code: str, message: str) -> str:
    """What a command prints on stdout instead of its result if it was asked for JSON."""
    return json.dumps({"error": {"code": code, "message": message}})


def flatten(error: BaseException) -> Iterable[BaseException]:
    """The exceptions of a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from flatten(inner)
    else:
        yield error


def expected_failure(error: BaseException) -> MoonpoolError | None:
    """The MoonpoolError behind `error`, if that is all there is to it."""
    leaves = list(flatten(error))
    found = [leaf for leaf in leaves if isinstance(leaf, MoonpoolError)]
    return found[0] if found and len(found) == len(leaves) else None


def _complaint(line: str) -> str:
    """What a JSON log line of level error says; empty for any other line."""
    try:
        event: Any = json.loads(line)  # Any: another process's line
    except ValueError:
        return ""
    if not isinstance(event, dict) or event.get("level") not in ("error", "critical"):
        return ""
    exceptions = event.get("exception")
    if isinstance(exceptions, list) and exceptions and isinstance(exceptions[0], dict):
        return f"{exceptions[0].get('exc_type')}: {exceptions[0].get('exc_value')}"
    return str(event.get("message") or event.get("event"))
