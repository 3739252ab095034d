"""Two or more cores with fake runners, and the least of a router and of a handoff between them.

Everything is a method call, so a test decides the order of all that happens. Reading is simulated by
copying pool values; a read that was given up may still write garbage until its ReadEnded. A prefix is
read from a peer in the same way: the reader's FetchReserved becomes the peer's LockPrefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlocksArrived,
    BlocksFetched,
    ChunkPlanned,
    Command,
    CoreFrame,
    Decode,
    FetchEnded,
    FetchReserved,
    HandedBack,
    LockPrefix,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    PrefixLocked,
    ReadEnded,
    Refused,
    Release,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, RequestId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import NamespaceSeed, hash_blocks
from support.fake_runner import FakeRunner, NoMark


def tenant_seed(request: InferenceRequest) -> NamespaceSeed:
    return NamespaceSeed(hashlib.sha256(request.tenant.encode()).digest())


class Worker:
    """A core and its runner, in role 'both'."""

    def __init__(self, config: CoreConfig, *, has_own_memory: bool = False) -> None:
        self.core = Core(config, tenant_seed)
        self.runner = FakeRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            has_own_memory=has_own_memory,
        )
        self.frames: list[CoreFrame] = []

    def step(self, *commands: Command, late: Sequence[Command] = (), now: float = 0.0) -> CoreFrame:
        """One turn of the engine's loop; what the step brought lies in the next frame.

        `late` commands are handled while the plan is under way.
        """
        for command in commands:
            self.core.handle(command, now)
        plan = self.core.schedule(now)
        frame = self.core.take_frame()
        self.frames.append(frame)
        if plan is None and not self.core.is_idle:
            assert self.core.fork().schedule(now) is None, "a row that waits for no command"
        result = None if plan is None else self.runner.run(plan, NoMark())
        for command in late:
            self.core.handle(command, now)
        if result is not None:
            self.core.update(result, now)
        return frame

    def run_until_idle(self, *commands: Command, now: float = 0.0) -> list[Reply]:
        """Step until nothing is to be done; all replies."""
        replies = list(self.step(*commands, now=now).replies)
        while True:
            frame = self.step(now=now)
            replies += frame.replies
            if not frame.step:
                return replies


@dataclass(kw_only=True)
class Handoff:
    """What the stream between two workers knows."""

    attempt_id: AttemptId
    source: int
    target: int
    #: Set when the source has started.
    source_blocks: tuple[int, ...] = ()
    num_ready: int = 0
    target_blocks: tuple[int, ...] = ()
    num_read: int = 0
    first_token: int | None = None
    finish_reason: FinishReason | None = None
    is_source_lost: bool = False
    is_reserved: bool = False


@dataclass(kw_only=True)
class Fetch:
    """What the stream knows on which a worker reads a prefix from its peer."""

    read_id: int
    reader: int
    peer: int
    reserved: FetchReserved
    num_read: int
    #: None: the peer has not answered.
    peer_blocks: tuple[int, ...] | None = None

    def unread(self, block_size: int) -> tuple[int, ...]:
        """The reader's blocks that may still be written."""
        return self.reserved.block_ids[self.num_read // block_size :]


@dataclass(kw_only=True)
class Tracked:
    """A request as its router sees it."""

    request: InferenceRequest
    attempt: int = 0
    answer: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_aborted: bool = False
    #: Not placed now: waits in the router.
    is_placed: bool = False
    #: Where the current attempt runs.
    target: int = 0
    has_source: bool = False
    handoff: Handoff | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.is_aborted


class CoreCluster:
    """Workers, requests and handoffs; time stands still."""

    def __init__(self, config: CoreConfig, num_workers: int) -> None:
        self._config = config
        # One on a GPU, the others on CPUs.
        self.workers = [Worker(config, has_own_memory=number == 0) for number in range(num_workers)]
        self.requests: dict[RequestId, Tracked] = {}
        #: Reads that were given up and have not ended: (worker, attempt, blocks not yet verified).
        self.stray_reads: list[tuple[int, AttemptId, tuple[int, ...]]] = []
        #: Reads from peers that are under way, by their number.
        self.fetches: dict[int, Fetch] = {}
        self._num_fetches = 0
        #: By the tests' own locks: (worker, read_id).
        self.locks: list[tuple[int, int]] = []
        self._inbox: list[list[Command]] = [[] for _ in self.workers]
        #: Frames of each worker that the service side has not seen.
        self._replies: list[list[Reply]] = [[] for _ in self.workers]

    # -- the router --

    def submit(self, request: InferenceRequest) -> None:
        self.requests[request.request_id] = Tracked(request=request)

    def place(
        self, tracked: Tracked, target: int, source: int | None, *, num_peer_tokens: int = 0
    ) -> None:
        """Send a request that waits in the router to its workers, as a new attempt.

        `num_peer_tokens`: what the next worker is believed to hold, told to the one that computes.
        """
        assert not tracked.is_placed
        assert not tracked.is_over
        tracked.attempt += 1
        tracked.is_placed = True
        tracked.target = target
        tracked.has_source = source is not None
        request = dataclasses.replace(tracked.request, emitted_token_ids=tuple(tracked.answer))
        attempt_id = AttemptId(request.request_id, tracked.attempt)
        tracked.handoff = None
        if source is not None:
            tracked.handoff = Handoff(attempt_id=attempt_id, source=source, target=target)
            self._inbox[source].append(
                Prefill(request=request, attempt=tracked.attempt, num_peer_tokens=num_peer_tokens)
            )
        self._inbox[target].append(
            Decode(
                request=request,
                attempt=tracked.attempt,
                has_source=source is not None,
                num_peer_tokens=num_peer_tokens,
            )
        )

    def abort(self, tracked: Tracked) -> None:
        """The client went away."""
        tracked.is_aborted = True
        self._unplace(tracked)

    def _unplace(self, tracked: Tracked) -> None:
        attempt_id = AttemptId(tracked.request.request_id, tracked.attempt)
        tracked.is_placed = False
        self._give_up_fetches(attempt_id)
        handoff, tracked.handoff = tracked.handoff, None
        if handoff is not None:
            block_size = self._config.block_size
            unread = handoff.target_blocks[handoff.num_read // block_size :]
            self.stray_reads.append((handoff.target, attempt_id, unread))
        for inbox in self._inbox:
            inbox.append(Abort(attempt_id=attempt_id))

    # -- the workers --

    def step(self, index: int, *, is_late: bool = False) -> bool:
        """One step of a worker; False if there was nothing to do.

        With `is_late` its commands come while the plan is under way.
        """
        worker = self.workers[index]
        commands, self._inbox[index] = self._inbox[index], []
        frame = worker.step(late=commands) if is_late else worker.step(*commands)
        self._replies[index] += frame.replies
        return bool(commands or frame.step or frame.replies)

    def deliver(self, index: int) -> bool:
        """The service and the router learn what a worker's frames say."""
        replies, self._replies[index] = self._replies[index], []
        for reply in replies:
            if isinstance(reply, PrefixLocked):
                self._on_locked(reply)
                continue
            tracked = self.requests[reply.attempt_id.request_id]
            if reply.attempt_id.attempt == tracked.attempt and tracked.is_placed:
                self._on_reply(index, tracked, reply)
            elif isinstance(reply, FetchReserved):
                # Nothing has been read for it, and nothing will be.
                self._inbox[index].append(ReadEnded(attempt_id=reply.attempt_id))
        return bool(replies)

    def _on_reply(self, index: int, tracked: Tracked, reply: Reply) -> None:
        handoff = tracked.handoff
        match reply:
            case Accepted():
                pass
            case Refused() if index == tracked.target:
                self._unplace(tracked)
            case FetchReserved():
                self._begin_fetch(index, reply)
            case Revoked() if index != tracked.target or not tracked.has_source:
                # Only its fetch; perhaps its end has been told already.
                self._give_up_fetches(reply.attempt_id, index)
            case Revoked() | HandedBack():
                self._unplace(tracked)
            case TokensReady():
                self._on_tokens(tracked, reply.run)
            case _ if handoff is None:
                # The prefill side of a handoff that was ended early.
                assert index != tracked.target, reply
            case Refused() | PrefillFailed():
                handoff.is_source_lost = True
            case Reserved():
                handoff.is_reserved = True
                handoff.target_blocks = reply.block_ids
                handoff.num_read = reply.num_cached_tokens
            case PrefillStarted():
                handoff.source_blocks = reply.block_ids
                handoff.num_ready = reply.num_cached_tokens
            case ChunkPlanned():
                assert handoff.num_ready <= reply.start < reply.end
                # Frames are delivered after their step has run.
                handoff.num_ready = reply.end
            case PrefillDone():
                handoff.first_token = reply.first_token
                handoff.finish_reason = reply.finish_reason

    def _on_tokens(self, tracked: Tracked, run: TokenRun) -> None:
        assert run.first_position == len(tracked.answer), (run, tracked.answer)
        tracked.answer += run.token_ids
        if run.finish_reason is not None:
            tracked.finish_reason = run.finish_reason
            self._unplace(tracked)

    # -- the handoff --

    def read(self, tracked: Tracked, num_tokens: int | None = None) -> bool:
        """Read what is ready (at most up to `num_tokens`), and admit when all is there."""
        handoff = tracked.handoff
        if handoff is None or not handoff.is_reserved:
            return False
        end = handoff.num_ready if num_tokens is None else min(num_tokens, handoff.num_ready)
        if end > handoff.num_read:
            self._copy(handoff, end)
            handoff.num_read = end
            self._inbox[handoff.target].append(
                BlocksArrived(attempt_id=handoff.attempt_id, num_tokens=end)
            )
            return True
        num_known = len(tracked.request.prompt_token_ids) + len(tracked.answer)
        if handoff.is_source_lost or (
            handoff.first_token is not None and handoff.num_read == num_known
        ):
            self.finish_reading(tracked)
            return True
        return False

    def finish_reading(self, tracked: Tracked) -> None:
        """End the handoff with what has been read; both sides are told."""
        handoff = tracked.handoff
        assert handoff is not None
        assert handoff.is_reserved
        tracked.handoff = None
        if handoff.first_token is None:
            self._give_up_fetches(handoff.attempt_id)
        self._inbox[handoff.target].append(
            Arrived(
                attempt_id=handoff.attempt_id,
                num_tokens=handoff.num_read,
                first_token=handoff.first_token,
                finish_reason=handoff.finish_reason,
            )
        )
        self._inbox[handoff.source].append(Release(attempt_id=handoff.attempt_id))
        if handoff.first_token is None:
            self._inbox[handoff.source].append(Abort(attempt_id=handoff.attempt_id))

    # -- reading from a peer --

    def _begin_fetch(self, index: int, reserved: FetchReserved) -> None:
        self._num_fetches += 1
        peer = (index + 1) % len(self.workers)
        fetch = Fetch(
            read_id=self._num_fetches,
            reader=index,
            peer=peer,
            reserved=reserved,
            num_read=reserved.num_cached_tokens,
        )
        self.fetches[fetch.read_id] = fetch
        self._inbox[peer].append(LockPrefix(read_id=fetch.read_id, hashes=reserved.hashes))

    def _on_locked(self, reply: PrefixLocked) -> None:
        fetch = self.fetches.get(reply.read_id)
        # Else the answer comes too late; the end of the stream has been told.
        if fetch is not None:
            fetch.peer_blocks = reply.block_ids

    def fetch(self, read_id: int, num_tokens: int | None = None) -> bool:
        """Read what the peer holds (at most up to `num_tokens`); at its end the fetch is over."""
        fetch = self.fetches[read_id]
        if fetch.peer_blocks is None:
            return False
        block_size = self._config.block_size
        end = min(fetch.reserved.num_tokens, len(fetch.peer_blocks) * block_size)
        if num_tokens is not None:
            end = min(end, num_tokens)
        if end <= fetch.num_read:
            self.end_fetch(read_id)
            return True
        source = self.workers[fetch.peer].runner
        target = self.workers[fetch.reader].runner
        for position in range(fetch.num_read, end):
            block, slot = divmod(position, block_size)
            value = source.pool[fetch.peer_blocks[block], slot]
            target.pool[fetch.reserved.block_ids[block], slot] = value
        fetch.num_read = end
        self._inbox[fetch.reader].append(
            BlocksFetched(attempt_id=fetch.reserved.attempt_id, num_tokens=end)
        )
        return True

    def end_fetch(self, read_id: int) -> None:
        """The fetch ends with what has been read; both sides are told."""
        fetch = self.fetches.pop(read_id)
        self._inbox[fetch.reader].append(
            FetchEnded(attempt_id=fetch.reserved.attempt_id, num_tokens=fetch.num_read)
        )
        self._unlock(fetch.peer, read_id)

    def _give_up_fetches(self, attempt_id: AttemptId, reader: int | None = None) -> None:
        """Whatever is read from a peer for this attempt is wanted no more."""
        given_up = [
            fetch
            for fetch in self.fetches.values()
            if fetch.reserved.attempt_id == attempt_id and reader in (None, fetch.reader)
        ]
        for fetch in given_up:
            del self.fetches[fetch.read_id]
            unread = fetch.unread(self._config.block_size)
            self.stray_reads.append((fetch.reader, attempt_id, unread))
            self._unlock(fetch.peer, fetch.read_id)

    def lock(self, index: int, request: InferenceRequest) -> None:
        """Somebody outside reads what a worker holds of a request's prompt."""
        self._num_fetches += 1
        hashes = hash_blocks(
            tenant_seed(request), request.prompt_token_ids, self._config.block_size
        )
        self.locks.append((index, self._num_fetches))
        self._inbox[index].append(LockPrefix(read_id=self._num_fetches, hashes=tuple(hashes)))

    def unlock(self, place: int) -> None:
        """One of those readers has gone."""
        self._unlock(*self.locks.pop(place))

    def _unlock(self, index: int, read_id: int) -> None:
        self._inbox[index].append(UnlockPrefix(read_id=read_id))

    def end_stray_read(self, index: int = 0) -> None:
        """A read that was given up writes garbage for the last time and has ended."""
        worker, attempt_id, block_ids = self.stray_reads.pop(index)
        self._scribble(worker, block_ids)
        self._inbox[worker].append(ReadEnded(attempt_id=attempt_id))

    def repeat(self, index: int, command: Command) -> None:
        """A command comes once more, or about an attempt that has ended."""
        self._inbox[index].append(command)

    def scribble(self) -> None:
        """Reads that were given up, and have not ended, write garbage where they were told to."""
        for worker, _, block_ids in self.stray_reads:
            self._scribble(worker, block_ids)

    def _scribble(self, worker: int, block_ids: Sequence[int]) -> None:
        self.workers[worker].runner.pool[list(block_ids)] = -7

    def _copy(self, handoff: Handoff, end: int) -> None:
        block_size = self._config.block_size
        source = self.workers[handoff.source].runner
        target = self.workers[handoff.target].runner
        for position in range(handoff.num_read, end):
            block, slot = divmod(position, block_size)
            value = source.pool[handoff.source_blocks[block], slot]
            target.pool[handoff.target_blocks[block], slot] = value

    # -- to the end --

    def settle(
        self, route: Callable[[Tracked], tuple[int, int | None]], *, num_rounds: int = 400
    ) -> None:
        """Be fair to everything until nothing is left to do; places oldest first by `route`."""
        for _ in range(num_rounds):
            waiting = [t for t in self.requests.values() if not t.is_placed and not t.is_over]
            for tracked in sorted(waiting, key=lambda t: t.request.age):
                self.place(tracked, *route(tracked))
            has_moved = bool(waiting)
            for index in range(len(self.workers)):
                has_moved |= self.step(index)
                has_moved |= self.deliver(index)
            for tracked in list(self.requests.values()):
                has_moved |= self.read(tracked)
            for read_id in list(self.fetches):
                has_moved |= self.fetch(read_id)
            while self.locks:
                self.unlock(0)
                has_moved = True
            while self.stray_reads:
                self.end_stray_read()
                has_moved = True
            if not has_moved:
                return
        raise AssertionError(f"not settled after {num_rounds} rounds: {self.requests}")

    def check_quiet(self) -> None:
        """Nothing is held anywhere."""
        for worker in self.workers:
            worker.core.validate()
            assert worker.core.is_idle
            assert worker.core.ledger().is_quiet, worker.core.ledger()
