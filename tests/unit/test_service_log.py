"""Log lines: JSON, the process on each, no client text, no local variables."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from moonpool.config.schema import TelemetrySettings
from moonpool.service.log import setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging(TelemetrySettings(log_format="json"), process_name="decode-0", stream=stream)
    yield stream
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_have_process_and_bound_values(stream: io.StringIO) -> None:
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("request.placed", worker_id="w")
    log.debug("not.shown")
    (line,) = lines(stream)
    line.pop("timestamp")
    assert line == {
        "event": "request.placed",
        "level": "info",
        "process": "decode-0",
        "request_id": "r1",
        "worker_id": "w",
    }


def test_client_text_is_replaced_by_its_size(stream: io.StringIO) -> None:
    structlog.get_logger().warning("x", prompt="my secret", token_ids=[1, 2, 3], api_key="k")
    text = stream.getvalue()
    assert "my secret" not in text
    (line,) = lines(stream)
    assert (line["prompt"], line["token_ids"]) == ("(hidden, size 9)", "(hidden, size 3)")


def test_a_traceback_has_no_values_of_local_variables(stream: io.StringIO) -> None:
    def fail(prompt: str) -> None:
        raise ValueError(len(prompt))

    try:
        fail("my secret")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "my secret" not in stream.getvalue()
    assert lines(stream)[0]["exception"]


def test_libraries_speak_the_same_format_and_only_when_something_is_wrong(
    stream: io.StringIO,
) -> None:
    logging.getLogger("lib").info("chatter")
    logging.getLogger("lib").warning("wrong: %s", "x")
    (line,) = lines(stream)
    assert (line["event"], line["process"]) == ("wrong: x", "decode-0")
