"""The engine's loop: commands in, one plan run, one frame out. The spine of a worker.

    0. the first frame tells the ledger
    1. take the commands that have come; sleep here if there was nothing to run
    2. core.handle(each)
    3. plan = core.schedule()
    4. send the frame: results of the step before, the plan of this one
    5. runner.run(plan, mark); layers are published while it runs
    6. core.update(result)

It knows neither torch nor processes: tests run it in a thread over a FakeRunner.
"""

from __future__ import annotations

from typing import Protocol

from moonpool.clock import Clock
from moonpool.core.core import Core
from moonpool.core.step import LayerMark, Runner, StepPlan
from moonpool.failpoints import Failpoints
from moonpool.latency.step_shape import StepShape
from moonpool.wire.engine_messages import TimedFrame
from moonpool.worker.engine_link import EngineLink, EngineLinkClosed
from moonpool.worker.step_fits import shape_of


class StepMark(LayerMark, Protocol):
    """A LayerMark that is told of each plan."""

    @property
    def last_layer_unix_ns(self) -> int:
        """Wall clock when all layers of the last plan could be read."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """The layers to come are those of `plan`."""
        ...

    def end(self) -> None:
        """The plan is computed."""
        ...


def run_engine_loop(
    *,
    link: EngineLink,
    core: Core,
    runner: Runner,
    mark: StepMark,
    clock: Clock,
    failpoints: Failpoints,
) -> None:
    """Run until the service closes the link. Anything else that ends it is a bug and raises."""
    try:
        link.send(TimedFrame(frame=core.take_frame()))
        is_idle = True
        computed_unix_ns = 0
        shape = StepShape()
        while True:
            for command in link.receive(wait=is_idle):
                core.handle(command, clock.now())
            plan = core.schedule(clock.now())
            failpoints.hit("engine.before_frame")
            link.send(
                TimedFrame(
                    frame=core.take_frame(),
                    planned_unix_ns=int(clock.unix() * 1e9),
                    last_layer_unix_ns=mark.last_layer_unix_ns if computed_unix_ns else 0,
                    computed_unix_ns=computed_unix_ns,
                    shape=shape,
                )
            )
            is_idle = plan is None
            computed_unix_ns = 0
            shape = StepShape()
            if plan is None:
                continue
            mark.begin(plan)
            result = runner.run(plan, mark)
            computed_unix_ns = int(clock.unix() * 1e9)
            mark.end()
            shape = shape_of(plan)
            core.update(result, clock.now())
            failpoints.hit("engine.after_step")
    except EngineLinkClosed:
        return
