"""Part: one service process of a local cluster, started again when it crashes.

Life

    STOPPED -> STARTING -> READY -> CRASHED -> STARTING ...      (a pause in between, doubling)
                        -> FAILED                 (its first start failed, or restarts are off)
    any -> STOPPED                                (asked for)

A part that ends on its own has crashed whatever its exit status: services end only when told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moonpool.cluster.process import ChildProcess
from moonpool.config.process import ProcessConfig, RouterConfig, write_document
from moonpool.errors import UnavailableError
from moonpool.service.ready import WARNING_FACT, ReadyPipe, ReadyReport


class PartState(enum.StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEvent:
    """Something to show to whoever started the cluster."""

    part: str
    state: PartState
    detail: str = ""
    #: READY: what is not as it was asked for, one sentence; empty if nothing.
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a crashed part is started again."""

    is_enabled: bool = True
    min_pause_s: float = 0.2
    max_pause_s: float = 10.0
    #: A part that lived this long begins with the shortest pause again.
    healthy_after_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """How to start one part."""

    name: str
    #: Python module, run as `python -m`.
    module: str
    document: ProcessConfig
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Part:
    """Supervises one process. `run` is its one task; the other methods may be called beside it."""

    def __init__(
        self,
        spec: PartSpec,
        *,
        run_dir: Path,
        restart: RestartPolicy,
        ready_timeout_s: float,
        on_event: Callable[[PartEvent], None],
    ) -> None:
        self.spec = spec
        self._run_dir = run_dir
        self._restart = restart
        self._ready_timeout_s = ready_timeout_s
        self._on_event = on_event
        self._state = PartState.STOPPED
        self._process: ChildProcess | None = None
        self._report: ReadyReport | None = None
        #: No other life is wanted.
        self._stopped = asyncio.Event()
        #: Not set: no other life begins yet.
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._changed = asyncio.Condition()
        self._detail = ""
        #: Of the lives to come.
        self._next_failpoints: deque[str] = deque()
        self.num_starts = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> PartState:
        return self._state

    @property
    def log_path(self) -> Path:
        return self._run_dir / f"{self.name}.log"

    @property
    def process(self) -> ChildProcess | None:
        """The latest one, running or ended."""
        return self._process

    def arm(self, *failpoints: str) -> None:
        """Break on purpose in the next lives, one text for each, and only in those.

        moonpool.failpoints has the grammar; an empty text is a life without any.
        """
        self._next_failpoints = deque(failpoints)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it no other life begins, however the present one ends."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def fact(self, key: str) -> str | int:
        """What the running process said of itself when it was ready (`grpc_address`, `http_port`).

        Raises:
            UnavailableError: It is not ready.
        """
        if self._state is not PartState.READY or self._report is None:
            raise UnavailableError(f"{self.name} is {self._state}.")
        return self._report.facts[key]

    async def run(self) -> None:
        """Start it, watch it, start it again; returns when it is stopped or has failed."""
        pause_s = self._restart.min_pause_s
        loop = asyncio.get_running_loop()
        while not self._stopped.is_set():
            started = loop.time()
            error = await self._live_once()
            if self._stopped.is_set():
                break
            never_listened = self.num_starts == 1 and self._report is None
            if never_listened or not self._restart.is_enabled:
                await self._set(PartState.FAILED, error)
                return
            await self._set(PartState.CRASHED, error)
            if loop.time() - started >= self._restart.healthy_after_s:
                pause_s = self._restart.min_pause_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopped.wait()
            await self._may_start.wait()
            pause_s = min(pause_s * 2, self._restart.max_pause_s)
        await self._set(PartState.STOPPED, "")

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Raises UnavailableError if it has failed, or is not READY in time."""
        ended = (PartState.READY, PartState.FAILED)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._state in ended)
        except TimeoutError:
            pass
        if self._state is not PartState.READY:
            raise UnavailableError(f"{self.name} is {self._state}: {self._detail}")

    async def wait_starts(self, num_starts: int, *, timeout_s: float) -> None:
        """Return when it is READY in its `num_starts`th life or a later one.

        Raises:
            UnavailableError: Not in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self.num_starts >= num_starts and self._state is PartState.READY
                )
        except TimeoutError:
            raise UnavailableError(
                f"{self.name} is {self._state} after {self.num_starts} starts: {self._detail}"
            ) from None

    async def stop(self, *, timeout_s: float) -> None:
        """SIGTERM, wait for the drain, SIGKILL after `timeout_s`. Idempotent."""
        self._stopped.set()
        self._may_start.set()
        if self._process is not None:
            await self._process.stop(timeout_s=timeout_s)

    async def kill(self) -> None:
        """SIGKILL now; whether it comes back is the restart policy's to say."""
        if self._process is not None:
            await self._process.kill()

    def force(self) -> None:
        """SIGKILL without waiting, and no other life."""
        self._stopped.set()
        self._may_start.set()
        if self._process is not None:
            self._process.kill_now()

    async def _live_once(self) -> str:
        """One life of the process; returns why it ended."""
        self.num_starts += 1
        self._report = None
        await self._set(PartState.STARTING, "")
        pipe = ReadyPipe()
        try:
            self._process = await self._spawn(pipe)
            if self._stopped.is_set():
                await self._process.kill()
                return "stopped while it started"
            try:
                self._report = await pipe.wait(deadline_s=self._ready_timeout_s)
            except UnavailableError as error:
                if not self._stopped.is_set():
                    await self._process.kill()
                return f"{error.message} {self._log_tail()}"
        finally:
            pipe.close()
        self.spec = replace(self.spec, document=_on_same_ports(self.spec.document, self._report))
        facts = self._report.facts
        await self._set(
            PartState.READY,
            " ".join(f"{key}={fact}" for key, fact in facts.items() if key != WARNING_FACT),
            warning=str(facts.get(WARNING_FACT, "")),
        )
        status = await self._process.wait()
        # Its engine dies with it; nothing of this life may meet the next.
        await self._process.kill()
        return f"ended with status {status}"

    async def _spawn(self, pipe: ReadyPipe) -> ChildProcess:
        document_path = self._run_dir / f"{self.name}.json"
        write_document(self._document(), document_path)
        return await ChildProcess.start(
            self.name,
            [sys.executable, "-P", "-m", self.spec.module, "--config", str(document_path)],
            log_path=self.log_path,
            environment={**os.environ, **self.spec.environment, **pipe.environment},
            cores=self.spec.cores,
            pass_fds=(pipe.child_fd,),
        )

    def _document(self) -> ProcessConfig:
        failpoints = self._next_failpoints.popleft() if self._next_failpoints else ""
        document = self.spec.document
        if not failpoints:
            return document
        common = document.common.model_copy(
            update={"failpoints": failpoints, "unsafe_failpoints": True}
        )
        return document.model_copy(update={"common": common})

    async def _set(self, state: PartState, detail: str, *, warning: str = "") -> None:
        async with self._changed:
            self._state = state
            self._detail = detail
            self._changed.notify_all()
        self._on_event(PartEvent(part=self.name, state=state, detail=detail, warning=warning))

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else "(never started)"


def _on_same_ports(document: ProcessConfig, report: ReadyReport) -> ProcessConfig:
    """A router that starts again listens where its clients know it.

    Workers and stores choose anew: whoever looks for one learns its address from the bus.
    """
    if not isinstance(document, RouterConfig):
        return document
    ports = {key: report.facts[key] for key in ("grpc_port", "http_port") if key in report.facts}
    return document.model_copy(update={"router": document.router.model_copy(update=ports)})
