"""EngineProcess: whom it waits for, and what it is told when a model cannot be loaded."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from typing import Any

import pytest

from moonpool.errors import ModelError
from moonpool.wire.engine_messages import EngineFailed
from moonpool.worker.engine_channel import EngineChannel
from moonpool.worker.engine_main import load_failure
from moonpool.worker.engine_process import EngineProcess


@pytest.fixture
def ended() -> subprocess.Popen[bytes]:
    """A process that was waited for, and whose number is another one's by now."""
    child = subprocess.Popen(["true"])
    child.wait()
    child.pid = os.getpid()
    return child


async def test_stop_waits_for_no_stranger_that_got_the_engines_number(
    ended: subprocess.Popen[bytes],
) -> None:
    ours, theirs = socket.socketpair()
    unused: Any = None
    engine = EngineProcess(
        process=ended,
        channel=EngineChannel(ours, lambda _frame: None),
        memory=unused,
        options=unused,
    )
    with theirs:
        async with asyncio.timeout(2.0):
            await engine.stop()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelError("no weights"), EngineFailed(code="invalid_model", message="no weights")),
        (
            ValueError("the layout is not this model's"),
            EngineFailed(
                code="engine_load_failed",
                message="The engine could not load /m: the layout is not this model's",
            ),
        ),
        (
            MemoryError(),
            EngineFailed(
                code="engine_load_failed",
                message="The engine could not load /m: there is not enough memory",
            ),
        ),
        (
            RuntimeError(),
            EngineFailed(
                code="engine_load_failed",
                message="The engine could not load /m: RuntimeError",
            ),
        ),
    ],
)
def test_the_service_is_told_why_a_model_cannot_be_loaded(
    error: Exception, expected: EngineFailed
) -> None:
    assert load_failure("/m", error) == expected
