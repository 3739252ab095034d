"""run(): a process from its configuration to its exit code.

SIGTERM or SIGINT drains; a second one cancels everything and ends the process within
FORCE_TIMEOUT_S; a third ends it at once. So does a stop whose last step is late.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from typing import TypeVar

import structlog
import uvloop

from moonpool.config.schema import TelemetrySettings
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.service.life import Life, ReadyFacts, Service, StopPolicy, serve
from moonpool.service.log import setup_logging
from moonpool.service.ready import notify_ready

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FORCED = 130

FORCE_TIMEOUT_S = 2.0

log = structlog.get_logger("moonpool.service")

ConfigT = TypeVar("ConfigT")


def run(
    build: Callable[[ConfigT], Service],
    config: ConfigT,
    *,
    name: str,
    telemetry: TelemetrySettings,
    policy: StopPolicy | None = None,
) -> int:
    """Build the service and live its life. Returns the exit code; the caller passes it to sys.exit.

    Args:
        build: The composition root. Runs inside the event loop's thread before the loop.
        name: Of this process (`router`, `prefill-0`), on every log line.
    """
    setup_logging(telemetry, process_name=name)
    try:
        service = build(config)
    except ConfigError as error:
        log.error("service.invalid_config", message=error.message)
        return EXIT_CONFIG
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(service, policy or StopPolicy()))


async def _live(service: Service, policy: StopPolicy) -> int:
    signals = _Signals()
    signals.install()
    try:
        await serve(
            service,
            policy=policy,
            on_life=signals.watch,
            on_ready=lambda facts: _on_ready(service.name, facts),
            # Not by an exception: what hangs would be waited for.
            on_late=lambda: os._exit(EXIT_FAILED),
        )
    except asyncio.CancelledError:
        if not signals.is_forced:
            raise
        log.warning("service.forced")
        return EXIT_FORCED
    except Exception as error:  # noqa: BLE001 - the process's boundary: what failed is logged once, here
        _log_failure(error)
        return EXIT_CONFIG if _is_config(error) else EXIT_FAILED
    return EXIT_OK


def _on_ready(name: str, facts: ReadyFacts) -> None:
    # What is loaded stays: a collection that walks through it would hold up the loop.
    gc.collect()
    gc.freeze()
    notify_ready(name, facts)


class _Signals:
    """First: drain. Second: cancel. Third: exit."""

    def __init__(self) -> None:
        self._life: Life | None = None
        self._main = asyncio.current_task()
        self._num_received = 0

    @property
    def is_forced(self) -> bool:
        return self._num_received > 1

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def watch(self, life: Life) -> None:
        self._life = life

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_received += 1
        log.info("service.signal", signal=signal.Signals(number).name, count=self._num_received)
        if self._num_received == 1 and self._life is not None:
            self._life.request_stop()
        elif self._num_received <= 2:
            self._num_received = 2
            asyncio.get_running_loop().call_later(FORCE_TIMEOUT_S, os._exit, EXIT_FORCED)
            assert self._main is not None
            self._main.cancel()
        else:
            os._exit(EXIT_FORCED)


def _log_failure(error: BaseException) -> None:
    for leaf in _leaves(error):
        if isinstance(leaf, MoonpoolError):
            log.error("service.failed", code=leaf.code, message=leaf.message)
        else:
            log.error("service.failed", exc_info=leaf)


def _is_config(error: BaseException) -> bool:
    return all(isinstance(leaf, ConfigError) for leaf in _leaves(error))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
