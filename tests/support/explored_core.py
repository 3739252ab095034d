"""The product's core as an explored world takes it: one turn of the engine's loop is one move.

    idle    -> schedule, frame                                       -> running, if there is a plan
    running -> result, commands that came meanwhile, schedule, frame

Tokens are their positions plus FIRST_TOKEN. Block ids are left out of the key, since no command
carries one; with `has_block_ids` they are in it, and then a core can say who holds a block.
"""

from __future__ import annotations

from dataclasses import replace

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Command, Prefill, Release
from moonpool.core.step import StepPlan, StepResult
from moonpool.ids import AttemptId, BlockId, RequestId
from moonpool.inference.request import InferenceRequest
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
        *,
        has_block_ids: bool = False,
    ) -> None:
        self._config = config
        self._has_block_ids = has_block_ids
        self._core = core if core is not None else Core(config, tenant_seed)
        #: The plan that runs, and the commands that came since it began.
        self._plan = plan
        self._late = late

    def key(self) -> tuple[object, ...]:
        block_ids = self._block_ids() if self._has_block_ids else ()
        return (self._core.key(), self._plan is not None, self._late, block_ids)

    def _block_ids(self) -> tuple[object, ...]:
        """Who holds which blocks, and which come next."""
        scheduler, cache = self._core._scheduler, self._core._cache
        return (
            tuple((state.attempt_id, *state.block_ids) for state in scheduler.states()),
            scheduler.reservations.quarantined,
            tuple(scheduler.prefix_locks.block_ids()),
            tuple(block_id for _, block_id in cache.contents()),
            tuple(cache._pool._free),
        )

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
        scheduler = self._core._scheduler
        holders = [(state.attempt_id, state.block_ids) for state in scheduler.states()]
        holders += [(e.attempt_id, list(e.block_ids)) for e in scheduler.reservations.quarantined]
        return next((attempt for attempt, block_ids in holders if block_id in block_ids), None)

    def is_locked(self, block_id: BlockId) -> bool:
        """A reader elsewhere holds this block."""
        return block_id in self._core._scheduler.prefix_locks.block_ids()

    def handle(self, command: Command) -> list[Turn]:
        if self._plan is not None:
            after = self._with(self._core, self._plan, (*self._late, command))
            return [Turn(label="", core=after)]
        core = self._core.fork()
        core.handle(command, 0.0)
        return [Turn(label="", core=self._with(core))]

    def _with(
        self, core: Core, plan: StepPlan | None = None, late: tuple[Command, ...] = ()
    ) -> ExploredCore:
        return ExploredCore(self._config, core, plan, late, has_block_ids=self._has_block_ids)

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
        return [Turn(label="step", core=self._with(core, plan), frames=frames)]


def warm_core(config: CoreConfig, request: InferenceRequest) -> Core:
    """A core that holds the full blocks of a request's prompt in its cache, and nothing else."""
    core = Core(config, tenant_seed)
    request = replace(request, request_id=RequestId("warm"))
    core.handle(Prefill(request=request, attempt=1), 0.0)
    while (plan := core.schedule(0.0)) is not None:
        tokens = tuple((FIRST_TOKEN,) for row in plan.rows if row.sample is not None)
        core.update(StepResult(step=plan.step, tokens=tokens), 0.0)
    core.handle(Release(attempt_id=AttemptId(request.request_id, 1)), 0.0)
    core.take_frame()
    # Long after: what was seen then is forgotten.
    core.schedule(1000.0)
    return core
