"""A small core that keeps the core's promises and leaves open what the protocol leaves open.

It stands in for moonpool.core in explorations: the same commands and replies, whole blocks, no cache
and no cost, but every choice that a real core makes by load is a branch here: refuse or take, repair
or hand back, which attempt moves next. Tokens are their own positions plus FIRST_TOKEN, so that a
lost, doubled or foreign token shows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlocksArrived,
    ChunkPlanned,
    Command,
    Decode,
    HandBackReason,
    HandedBack,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
)
from moonpool.ids import AttemptId, BlockId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest

FIRST_TOKEN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HonestConfig:
    num_blocks: int
    block_size: int = 4
    num_layers: int = 1
    #: Tokens of a prefill that one step computes; a multiple of the block size.
    chunk_tokens: int = 1_000
    #: Tokens that every request finds cached, on the prefill and on the decode side.
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    #: Show each layer of each step on the control page; else readers hear of layers at the end only.
    has_page: bool = False
    #: Refuse with room, as a branch of each new attempt.
    refuses_at_will: bool = False
    #: Repair a missing rest; else hand it back.
    repairs: bool = False
    #: Give a prefill up, as a branch of its start.
    fails_prefills: bool = False
    #: A reservation may be revoked for any request, not only an older one's: a broken core.
    may_revoke_for_younger: bool = False
    #: Free a reservation at its end, not when its reads have ended: a broken core.
    frees_before_reads_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt in one role, or what is left of it."""

    attempt_id: AttemptId
    #: p_queued p_running p_held | d_queued d_reserved d_gone d_running
    status: str
    request: InferenceRequest
    block_ids: tuple[BlockId, ...] = ()
    #: Prefill: tokens computed; decode: the position of the next token.
    progress: int = 0
    #: Prefill: layers done of the chunk that runs; -1 if none runs.
    num_layers: int = -1
    step: int = 0
    is_first_run: bool = True

    @property
    def sort_key(self) -> tuple[AttemptId, str]:
        return (self.attempt_id, self.status)

    def key(self) -> tuple[object, ...]:
        return (
            self.attempt_id,
            self.status,
            self.block_ids,
            self.progress,
            self.num_layers,
            self.step,
            self.is_first_run,
            self.request.emitted_token_ids,
        )


class WorldCore(Protocol):
    """What a world needs of a core: a value that commands and moves turn into others."""

    @property
    def is_quiet(self) -> bool:
        """It holds nothing and works on nothing."""
        ...

    @property
    def is_settled(self) -> bool:
        """It has acted on every command, and nothing that it began before is under way."""
        ...

    def key(self) -> Hashable: ...

    def validate(self) -> None: ...

    def holder(self, block_id: BlockId) -> AttemptId | None:
        """The attempt that holds a block."""
        ...

    def is_locked(self, block_id: BlockId) -> bool:
        """A reader of a prefix holds a block."""
        ...

    def handle(self, command: Command) -> list[Turn]:
        """Every way in which it may take this command."""
        ...

    def moves(self) -> list[Turn]:
        """Every step that it may make now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One thing that a core may do: what it is then, what it says, what its control page shows."""

    label: str
    core: WorldCore
    #: Frames, each (step, replies).
    frames: tuple[tuple[int, tuple[Reply, ...]], ...] = ()
    page: tuple[int, int] | None = None


class HonestCore:
    """Immutable: every command and every move gives new cores."""

    def __init__(self, config: HonestConfig, jobs: tuple[Job, ...] = (), step: int = 0) -> None:
        self.config = config
        self.jobs = jobs
        self.step = step

    def key(self) -> tuple[object, ...]:
        return (tuple(job.key() for job in self.jobs), self.step)

    @property
    def is_quiet(self) -> bool:
        """It holds nothing and works on nothing."""
        return not self.jobs

    @property
    def is_settled(self) -> bool:
        """It acts on commands at once."""
        return True

    @property
    def num_free(self) -> int:
        return self.config.num_blocks - sum(len(job.block_ids) for job in self.jobs)

    def validate(self) -> None:
        held = [block_id for job in self.jobs for block_id in job.block_ids]
        assert len(held) == len(set(held)), held
        assert all(0 <= block_id < self.config.num_blocks for block_id in held), held
        assert len({(j.attempt_id, j.status[0]) for j in self.jobs}) == len(self.jobs), self.jobs

    def holder(self, block_id: BlockId) -> AttemptId | None:
        """The attempt that holds a block."""
        return next((job.attempt_id for job in self.jobs if block_id in job.block_ids), None)

    def is_locked(self, block_id: BlockId) -> bool:
        """It has no cache, so no reader of a prefix either."""
        return False

    # -- commands --

    def handle(self, command: Command) -> list[Turn]:
        """Every way in which it may take this command."""
        match command:
            case Prefill():
                return self._on_prefill(command)
            case Decode():
                return self._on_decode(command)
            case BlocksArrived(attempt_id=attempt_id):
                job = self._find(attempt_id, "d_reserved")
                assert job is None or command.num_tokens <= job.request.num_tokens, command
                return [Turn(label="", core=self)]
            case Arrived():
                return self._on_arrived(command)
            case ReadEnded(attempt_id=attempt_id):
                job = self._find(attempt_id, "d_gone")
                return [Turn(label="", core=self._without(job))]
            case Release(attempt_id=attempt_id):
                job = self._find(attempt_id, "p_held")
                return [Turn(label="", core=self._without(job))]
            case Abort(attempt_id=attempt_id):
                return [Turn(label="", core=self._end_up_to(attempt_id))]
            case _:
                raise AssertionError(command)

    def _on_prefill(self, command: Prefill) -> list[Turn]:
        attempt_id = command.attempt_id
        core = self._end_up_to(AttemptId(attempt_id.request_id, attempt_id.attempt - 1))
        job = Job(attempt_id=attempt_id, status="p_queued", request=command.request)
        turns = [Turn(label="", core=core._with(job))]
        if self.config.refuses_at_will:
            refused = Refused(attempt_id=attempt_id, reason=RefuseReason.QUEUE_FULL)
            turns.append(Turn(label="p refuses", core=core, frames=((1, (refused,)),)))
        return turns

    def _on_decode(self, command: Decode) -> list[Turn]:
        attempt_id, request = command.attempt_id, command.request
        core = self._end_up_to(AttemptId(attempt_id.request_id, attempt_id.attempt - 1))
        position = len(request.emitted_token_ids)
        refused = Refused(attempt_id=attempt_id, reason=RefuseReason.NO_BLOCKS)
        turns = []
        if self.config.refuses_at_will:
            turns.append(Turn(label="d refuses", core=core, frames=((1, (refused,)),)))
        if not command.has_source:
            job = Job(attempt_id=attempt_id, status="d_queued", request=request, progress=position)
            accepted = Accepted(attempt_id=attempt_id)
            turns.append(Turn(label="", core=core._with(job), frames=((1, (accepted,)),)))
            return turns
        block_ids = core._allocate(core._num_blocks(request))
        if block_ids is None:
            core, revoked = core._revoke_for(request)
            frame = (1, (*revoked, refused))
            turns.append(Turn(label="d has no blocks", core=core, frames=(frame,)))
            return turns
        job = Job(
            attempt_id=attempt_id,
            status="d_reserved",
            request=request,
            block_ids=block_ids,
            progress=position,
        )
        reserved = Reserved(
            attempt_id=attempt_id,
            num_cached_tokens=self.config.decode_cached_tokens,
            block_ids=block_ids,
        )
        turns.append(Turn(label="", core=core._with(job), frames=((1, (reserved,)),)))
        return turns

    def _on_arrived(self, command: Arrived) -> list[Turn]:
        attempt_id = command.attempt_id
        job = self._find(attempt_id, "d_reserved")
        if job is None:
            return [Turn(label="", core=self._without(self._find(attempt_id, "d_gone")))]
        is_complete = command.num_tokens == job.request.num_tokens
        assert command.num_tokens <= job.request.num_tokens, command
        if not (is_complete and command.first_token is not None) and not self.config.repairs:
            back = HandedBack(attempt_id=attempt_id, reason=HandBackReason.SOURCE_LOST)
            return [Turn(label="", core=self._without(job), frames=((1, (back,)),))]
        running = replace(job, status="d_running")
        core = self._without(job)
        if command.first_token is None:
            return [Turn(label="", core=core._with(running))]
        return [core._draw(running, command.first_token, command.finish_reason)]

    # -- steps --

    def moves(self) -> list[Turn]:
        """Every step that it may make now."""
        turns = []
        for job in self.jobs:
            match job.status:
                case "p_queued":
                    turns += self._start_prefill(job)
                case "p_running":
                    turns.append(self._run_prefill(job))
                case "d_queued":
                    block_ids = self._allocate(self._num_blocks(job.request))
                    if block_ids is not None:
                        running = replace(job, status="d_running", block_ids=block_ids)
                        turns.append(self._without(job)._draw(running, None, None))
                    else:
                        turns += self._revoke_turn(job)
                case "d_running":
                    turns.append(self._without(job)._draw(job, None, None))
        return turns

    def _start_prefill(self, job: Job) -> list[Turn]:
        turns = []
        if self.config.fails_prefills:
            failed = PrefillFailed(attempt_id=job.attempt_id, reason=HandBackReason.REVOKED)
            frame = (1, (failed,))
            turns.append(Turn(label="prefill fails", core=self._without(job), frames=(frame,)))
        block_ids = self._allocate(self._num_blocks(job.request))
        if block_ids is None:
            return turns + self._revoke_turn(job)
        cached = self.config.prefill_cached_tokens
        started = PrefillStarted(
            attempt_id=job.attempt_id, num_cached_tokens=cached, block_ids=block_ids
        )
        running = replace(job, status="p_running", block_ids=block_ids, progress=cached)
        turn = self._plan_chunk(job, running, (started,))
        return [*turns, replace(turn, label="prefill starts")]

    def _plan_chunk(self, job: Job, running: Job, replies: tuple[Reply, ...]) -> Turn:
        step = self.step + 1 if self.config.has_page else 1
        end = min(running.progress + self.config.chunk_tokens, running.request.num_tokens)
        planned = ChunkPlanned(attempt_id=job.attempt_id, start=running.progress, end=end)
        core = self._without(job)._with(replace(running, num_layers=0, step=step))
        if self.config.has_page:
            core = HonestCore(self.config, core.jobs, step)
        return Turn(label="chunk", core=core, frames=((step, (*replies, planned)),))

    def _run_prefill(self, job: Job) -> Turn:
        """One more layer; after the last one the next chunk, or the token."""
        if self.config.has_page and job.num_layers < self.config.num_layers:
            layers = job.num_layers + 1
            core = self._without(job)._with(replace(job, num_layers=layers))
            return Turn(label=f"layer {layers}", core=core, page=(job.step, layers))
        end = min(job.progress + self.config.chunk_tokens, job.request.num_tokens)
        if end < job.request.num_tokens:
            return self._plan_chunk(job, replace(job, progress=end), ())
        position = len(job.request.emitted_token_ids)
        done = PrefillDone(
            attempt_id=job.attempt_id,
            num_cached_tokens=self.config.prefill_cached_tokens,
            first_token=FIRST_TOKEN + position,
            finish_reason=self._finish(job.request, position),
        )
        held = replace(job, status="p_held", progress=end, num_layers=-1, step=0)
        core = self._without(job)._with(held)
        return Turn(label="prefill done", core=core, frames=((1, (done,)),))

    def _draw(self, job: Job, token: int | None, finish_reason: FinishReason | None) -> Turn:
        """The next token of a running decode; `self` is the core without that job."""
        if token is None:
            token = FIRST_TOKEN + job.progress
        finish_reason = finish_reason or self._finish(job.request, job.progress)
        ready = TokensReady(
            attempt_id=job.attempt_id,
            run=TokenRun(
                first_position=job.progress, token_ids=(token,), finish_reason=finish_reason
            ),
            num_cached_tokens=job.request.num_tokens if job.is_first_run else None,
        )
        core = self
        if finish_reason is None:
            core = self._with(replace(job, progress=job.progress + 1, is_first_run=False))
        return Turn(label=f"draws {job.progress}", core=core, frames=((1, (ready,)),))

    def _finish(self, request: InferenceRequest, position: int) -> FinishReason | None:
        return FinishReason.LENGTH if position + 1 >= request.sampling.max_tokens else None

    # -- blocks --

    def _num_blocks(self, request: InferenceRequest) -> int:
        return -(-request.num_tokens // self.config.block_size)

    def _allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        held = {block_id for job in self.jobs for block_id in job.block_ids}
        free = [BlockId(i) for i in range(self.config.num_blocks) if i not in held]
        return tuple(free[:num_blocks]) if len(free) >= num_blocks else None

    def _revoke_turn(self, job: Job) -> list[Turn]:
        core, revoked = self._revoke_for(job.request)
        return [Turn(label="revokes", core=core, frames=((1, revoked),))] if revoked else []

    def _revoke_for(self, request: InferenceRequest) -> tuple[HonestCore, tuple[Reply, ...]]:
        """Take the youngest reservation back for an older request."""
        victims = [
            job
            for job in self.jobs
            if job.status == "d_reserved"
            and (self.config.may_revoke_for_younger or request.age < job.request.age)
        ]
        if not victims:
            return self, ()
        victim = max(victims, key=lambda job: job.request.age)
        return self._end_job(victim), (Revoked(attempt_id=victim.attempt_id),)

    def _end_up_to(self, attempt_id: AttemptId) -> HonestCore:
        core = self
        for job in self.jobs:
            is_ended = (
                job.attempt_id.request_id == attempt_id.request_id
                and job.attempt_id.attempt <= attempt_id.attempt
                and job.status != "d_gone"
            )
            if is_ended:
                core = core._end_job(job)
        return core

    def _end_job(self, job: Job) -> HonestCore:
        core = self._without(job)
        if job.status != "d_reserved" or self.config.frees_before_reads_end:
            return core
        return core._with(replace(job, status="d_gone", progress=0))

    def _find(self, attempt_id: AttemptId, status: str) -> Job | None:
        return next(
            (j for j in self.jobs if j.attempt_id == attempt_id and j.status == status), None
        )

    def _with(self, job: Job) -> HonestCore:
        jobs = tuple(sorted((*self.jobs, job), key=lambda job: job.sort_key))
        return HonestCore(self.config, jobs, self.step)

    def _without(self, gone: Job | None) -> HonestCore:
        if gone is None:
            return self
        jobs = tuple(job for job in self.jobs if job is not gone)
        return HonestCore(self.config, jobs, self.step)
