"""The product's core as an explored world takes it: one turn of the engine's loop is one move.

    idle    -> schedule, frame                                       -> running, if there is a plan
    running -> result, commands that came meanwhile, schedule, frame

Tokens are their positions plus FIRST_TOKEN. Block ids are left out of the key, since no command
carries one, so which block belongs to whom is checked by the core's own tests, not here.
"""

from __future__ import annotations

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Command
from moonpool.core.step import StepPlan, StepResult
from moonpool.ids import AttemptId, BlockId
from support.core_cluster import tenant_seed
from support.honest_core import FIRST_TOKEN, Turn


class ExploredCore:
    """Immutable: every command and every move works on a copy."""

    def __init__(
        self,
        config: CoreConfig,
        core: Core | None = None,
        plan: StepPlan | None = None,
        late: tuple[Command, ...] = (),
    ) -> None:
        self._config = config
        self._core = core if core is not None else Core(config, tenant_seed)
        #: The plan that runs, and the commands that came since it began.
        self._plan = plan
        self._late = late

    def key(self) -> tuple[object, ...]:
        return (self._core.key(), self._plan is not None, self._late)

    @property
    def is_quiet(self) -> bool:
        """It holds nothing and works on nothing."""
        return self._core.ledger().is_quiet and self.is_settled

    @property
    def is_settled(self) -> bool:
        """No plan runs, and no command waits for its end."""
        return self._plan is None and not self._late

    def validate(self) -> None:
        self._core.validate()

    def holder(self, block_id: BlockId) -> AttemptId | None:
        raise NotImplementedError

    def handle(self, command: Command) -> list[Turn]:
        if self._plan is not None:
            late = (*self._late, command)
            return [Turn(label="", core=ExploredCore(self._config, self._core, self._plan, late))]
        core = self._core.fork()
        core.handle(command, 0.0)
        return [Turn(label="", core=ExploredCore(self._config, core))]

    def moves(self) -> list[Turn]:
        core = self._core.fork()
        if self._plan is not None:
            positions = [row.sample.position for row in self._plan.rows if row.sample is not None]
            tokens = tuple((FIRST_TOKEN + position,) for position in positions)
            core.update(StepResult(step=self._plan.step, tokens=tokens), 0.0)
            for command in self._late:
                core.handle(command, 0.0)
        plan = core.schedule(0.0)
        frame = core.take_frame()
        if self._plan is None and plan is None and not frame.replies:
            return []
        frames = ((1, frame.replies),) if frame.replies else ()
        after = ExploredCore(self._config, core, plan)
        return [Turn(label="step", core=after, frames=frames)]
