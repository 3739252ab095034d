"""Logging: structlog events to stderr, as text on a terminal and as JSON lines elsewhere.

Every line has the process's name, and what was bound with `bind_contextvars(request_id=...)`. Values of
keys that could hold a client's text are replaced by their size, whoever logs them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from moonpool.config.schema import TelemetrySettings

#: Keys whose values never reach a log.
HIDDEN_KEYS = frozenset(
    {
        "api_key",
        "authorization",
        "content",
        "emitted_token_ids",
        "messages",
        "prompt",
        "prompt_token_ids",
        "secret",
        "text",
        "token_ids",
    }
)

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

Event = MutableMapping[str, Any]


def setup_logging(
    settings: TelemetrySettings, *, process_name: str, stream: TextIO | None = None
) -> None:
    """Configure structlog and the standard library's logging for this process.

    Args:
        process_name: On every line as `process`.
        stream: stderr if None.
    """
    stream = stream or sys.stderr
    is_text = settings.log_format == "console" or (
        settings.log_format == "auto" and stream.isatty()
    )
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _adder(process_name),
        hide_client_text,
    ]
    # Tracebacks without the values of local variables: those hold prompts and keys.
    renderer: list[structlog.types.Processor]
    if is_text:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    else:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        renderer = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    level = _LEVELS[settings.log_level]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak up when something is wrong; their daily chatter is not ours.
    root.setLevel(max(level, logging.WARNING))


def hide_client_text(_logger: object, _method: str, event: Event) -> Event:
    """Replace values of HIDDEN_KEYS by their size."""
    for key in HIDDEN_KEYS & event.keys():
        value = event[key]
        size = len(value) if hasattr(value, "__len__") else 1
        event[key] = f"(hidden, size {size})"
    return event


def _adder(process_name: str) -> structlog.types.Processor:
    def add(_logger: object, _method: str, event: Event) -> Event:
        event.setdefault("process", process_name)
        return event

    return add
