"""The open loop: each request leaves at its time, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from moonpool.errors import (
    DeadlineExceededError,
    MoonpoolError,
    OverloadedError,
    UnavailableError,
)
from moonpool_loadtest.bench.driver import AnswerEnded, Driver
from moonpool_loadtest.bench.records import Outcome, RequestRecord, ServerTold
from moonpool_loadtest.bench.workload import BenchRequest

#: Between the decision to start and the first arrival.
_LEAD_S = 0.05
#: An event loop wakes up to a millisecond late: it is woken this much early and then turns over
#: without sleeping.
_EARLY_S = 0.0015


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records, by index, and what the client spent on them."""

    records: tuple[RequestRecord, ...]
    wall_s: float
    #: CPU time of this process, all threads.
    cpu_s: float

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


async def run_schedule(
    requests: Sequence[BenchRequest], driver: Driver, *, timeout_s: float
) -> Run:
    """Send every request at its scheduled time and wait for all of them.

    Args:
        requests: In order of their schedule.
        timeout_s: For each request, from its schedule.
    """
    loop = asyncio.get_running_loop()
    started = loop.time() + _LEAD_S
    cpu_before_s = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        sending = []
        for request in requests:
            await _sleep_until(loop, started + request.scheduled_s)
            sending.append(
                tasks.create_task(_send(request, driver, started=started, timeout_s=timeout_s))
            )
    records = tuple(task.result() for task in sending)
    return Run(
        records=records,
        wall_s=loop.time() - started,
        cpu_s=time.process_time() - cpu_before_s,
    )


async def run_one_by_one(
    requests: Sequence[BenchRequest], driver: Driver, *, timeout_s: float
) -> tuple[RequestRecord, ...]:
    """Each after the one before it, whatever their schedule: for warm-up."""
    loop = asyncio.get_running_loop()
    return tuple(
        [
            await _send(
                request, driver, started=loop.time() - request.scheduled_s, timeout_s=timeout_s
            )
            for request in requests
        ]
    )


async def _sleep_until(loop: asyncio.AbstractEventLoop, moment: float) -> None:
    if (remaining_s := moment - loop.time()) > _EARLY_S:
        await asyncio.sleep(remaining_s - _EARLY_S)
    while loop.time() < moment:  # noqa: ASYNC110 - it is a moment that is waited for, no event
        await asyncio.sleep(0)


async def _send(
    request: BenchRequest, driver: Driver, *, started: float, timeout_s: float
) -> RequestRecord:
    loop = asyncio.get_running_loop()
    sent_s = loop.time() - started
    token_times_s: list[float] = []
    token_ids: list[int] = []
    told = ServerTold()
    outcome, code, message = Outcome.OK, "", ""
    try:
        async with (
            asyncio.timeout_at(started + request.scheduled_s + timeout_s),
            aclosing(driver.stream(request)) as events,
        ):
            async for event in events:
                now_s = loop.time() - started
                if isinstance(event, AnswerEnded):
                    told = event.told
                else:
                    token_times_s += [now_s] * event.num_tokens
                    token_ids += event.token_ids
    except TimeoutError:
        outcome, code, message = Outcome.TIMEOUT, "timeout", f"no end after {timeout_s:g} s"
    except MoonpoolError as error:
        outcome = _outcome_of(error, has_begun=bool(token_times_s))
        code, message = error.code, error.message
    return RequestRecord(
        index=request.index,
        scheduled_s=request.scheduled_s,
        sent_s=sent_s,
        ended_s=loop.time() - started,
        outcome=outcome,
        token_times_s=tuple(token_times_s),
        token_ids=tuple(token_ids),
        told=told,
        error_code=code,
        error=message,
    )


def _outcome_of(error: MoonpoolError, *, has_begun: bool) -> Outcome:
    if isinstance(error, DeadlineExceededError):
        return Outcome.TIMEOUT
    if isinstance(error, OverloadedError | UnavailableError) and not has_begun:
        return Outcome.REFUSED
    return Outcome.FAILED
