"""Start, serve, stop: the order in which every Moonpool process lives.

1. `start(life)`: the service enters its adapters on `life.stack` in the order of their use, spawns its
   tasks, listens, and returns what its supervisor wants to know (its real ports). Whatever is not there
   yet (the broker, workers) is not waited for. A stop request now cancels the start.
2. It serves until a stop is requested or a task fails. A task that fails stops the process at once:
   no drain, the error leaves `serve`.
3. Stop: `announce_drain` (health NOT_SERVING, DRAINING on the bus), `drain_grace_s` in which peers see
   it, `drain` (accept nothing, wait for what runs) for at most `drain_timeout_s`, `abort` (end the rest
   with UNAVAILABLE) for at most `abort_timeout_s`.
4. Tasks are cancelled, then the stack unwinds in reverse order; for at most `close_timeout_s`, also when a
   task has failed. What is late then may never come, such as the answer of a disk that hangs in a thread:
   `on_late` is told, which ends the process.

Each step has a deadline and a log line. A step that fails or is late is logged and the next one comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

log = structlog.get_logger("moonpool.service")

T = TypeVar("T")

#: What a service tells when it listens: `{"grpc_address": "127.0.0.1:40001", "http_port": 8000}`.
ReadyFacts = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """How long each step of a stop may take."""

    #: Between the announcement and the refusal of new work.
    drain_grace_s: float = 0.5
    drain_timeout_s: float = 30.0
    abort_timeout_s: float = 5.0
    #: Tasks and adapters. Enough for what a disk has taken and not yet written.
    close_timeout_s: float = 20.0

    @property
    def total_s(self) -> float:
        """The longest stop there is: each step takes its time, and then nothing is waited for any more."""
        steps_s = self.drain_grace_s + self.drain_timeout_s + self.close_timeout_s
        # Announcing has as long as aborting.
        return steps_s + 2 * self.abort_timeout_s


class Service(Protocol):
    """What a composition root builds."""

    @property
    def name(self) -> str:
        """`router`, `prefill-0`: on every log line."""
        ...

    async def start(self, life: Life) -> ReadyFacts: ...

    async def announce_drain(self) -> None:
        """Say that new work should go elsewhere; still accept it."""
        ...

    async def drain(self) -> None:
        """Refuse new work and return when nothing runs. May be cancelled by its deadline."""
        ...

    async def abort(self) -> None:
        """End what still runs so that its owner can retry elsewhere."""
        ...


class Phase(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class Life:
    """What a service gets to live in: a stack for its adapters and a group for its tasks."""

    def __init__(self, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        self.stack = stack
        self._group = tasks
        self._spawned: set[asyncio.Task[None]] = set()
        self._main = asyncio.current_task()
        self._stop = asyncio.Event()
        self._phase = Phase.STARTING
        self.is_start_interrupted = False

    @property
    def phase(self) -> Phase:
        return self._phase

    async def enter(self, adapter: AbstractAsyncContextManager[T]) -> T:
        """Enter an adapter; it is left after all tasks have ended, last in first out."""
        return await self.stack.enter_async_context(adapter)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """A task that lives as long as the process. If it raises, the process stops with an error."""
        task = self._group.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def request_stop(self) -> None:
        """Begin the drain (or give up the start). Idempotent."""
        if self._phase is Phase.STARTING and not self.is_start_interrupted:
            self.is_start_interrupted = True
            assert self._main is not None
            self._main.cancel()
        self._stop.set()

    def begin_serving(self) -> None:
        self._phase = Phase.SERVING

    async def wait_stop(self) -> None:
        await self._stop.wait()
        self._phase = Phase.STOPPING

    def cancel_tasks(self) -> None:
        for task in tuple(self._spawned):
            task.cancel()


async def serve(
    service: Service,
    *,
    policy: StopPolicy,
    on_life: Callable[[Life], None] = lambda _life: None,
    on_ready: Callable[[ReadyFacts], None] = lambda _facts: None,
    on_late: Callable[[], None] = lambda: None,
) -> None:
    """Live through steps 1 to 4. Returns after a stop that was asked for.

    Args:
        on_life: Called first, so that a signal handler can reach `request_stop`.
        on_ready: Called when `start` has returned.
        on_late: Called if the last step takes longer than it may.

    Raises:
        BaseExceptionGroup: A task failed, or `start` did.
    """
    life: Life | None = None
    late: asyncio.TimerHandle | None = None

    def on_close_late() -> None:
        log.error("service.stop_step_late", step="close", timeout_s=policy.close_timeout_s)
        on_late()

    try:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            life = Life(stack, tasks)
            try:
                on_life(life)
                facts = await service.start(life)
                life.begin_serving()
                log.info("service.ready", **facts)
                on_ready(facts)
                await life.wait_stop()
                await _stop(service, policy)
                life.cancel_tasks()
            finally:
                loop = asyncio.get_running_loop()
                late = loop.call_later(policy.close_timeout_s, on_close_late)
    except asyncio.CancelledError:
        if life is None or not life.is_start_interrupted:
            raise
        task = asyncio.current_task()
        assert task is not None
        if task.uncancel() > 0:
            raise
        log.info("service.start_interrupted")
    finally:
        if late is not None:
            late.cancel()
    log.info("service.stopped")


class Running:
    """A service that runs in the background of a test or of another service."""

    def __init__(self, life: Life, facts: ReadyFacts) -> None:
        self.life = life
        self.facts = facts

    def request_stop(self) -> None:
        self.life.request_stop()


@contextlib.asynccontextmanager
async def running(service: Service, *, policy: StopPolicy | None = None) -> AsyncIterator[Running]:
    """Run a service inside this event loop: ready on entry, drained and stopped on exit."""
    lives: list[Life] = []
    ready: asyncio.Future[ReadyFacts] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            serve(
                service,
                policy=policy or StopPolicy(drain_grace_s=0.0, drain_timeout_s=5.0),
                on_life=lives.append,
                on_ready=ready.set_result,
            )
        )
        task.add_done_callback(lambda _task: ready.done() or ready.cancel())
        facts = await ready
        try:
            yield Running(lives[0], facts)
        finally:
            lives[0].request_stop()


async def _stop(service: Service, policy: StopPolicy) -> None:
    log.info("service.draining")
    await _step("announce", service.announce_drain, policy.abort_timeout_s)
    await asyncio.sleep(policy.drain_grace_s)
    await _step("drain", service.drain, policy.drain_timeout_s)
    await _step("abort", service.abort, policy.abort_timeout_s)


async def _step(name: str, action: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    """A stop goes on whatever one of its steps does."""
    try:
        async with asyncio.timeout(timeout_s):
            await action()
    except TimeoutError:
        log.warning("service.stop_step_late", step=name, timeout_s=timeout_s)
    except Exception:  # the boundary of a step: the rest of the stop must still happen
        log.exception("service.stop_step_failed", step=name)
    else:
        log.debug("service.stop_step_done", step=name)
