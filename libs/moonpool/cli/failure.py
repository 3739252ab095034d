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
    """The error's text. JSON log lines in it (a child's last words) become what they say."""
    lines = error.message.splitlines() or [error.code]
    told = [_said_by_log(line) for line in lines]
    if all(said is None for said in told):
        return "\n".join(lines)
    plain = [line for line, said in zip(lines, told, strict=True) if said is None]
    said_last = [said for said in told if said]
    # The first plain line begins with the text and may end with the first log line.
    return ": ".join([*(line.rstrip(" :") for line in plain[:1]), *said_last[-1:]])


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


def _said_by_log(line: str) -> str | None:
    """What a JSON log line says: empty for one that is no complaint, None if it is no log line."""
    start = line.find('{"')
    if start < 0 or not line.rstrip().endswith("}"):
        return None
    try:
        event: Any = json.loads(line[start:])  # Any: another process's line
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    if event.get("level") not in ("error", "critical"):
        return ""
    exceptions = event.get("exception")
    if isinstance(exceptions, list) and exceptions and isinstance(exceptions[0], dict):
        return f"{exceptions[0].get('exc_type')}: {exceptions[0].get('exc_value')}"
    return str(event.get("message") or event["event"])
