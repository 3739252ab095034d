"""Workers that read prefixes from each other, as a test drives them: real machines, real cores, one call at
a time.

Each worker is WorkerHandoffs over a Core with a FakeRunner. Between them lie queues that a test empties
in any order it likes:

    commands and frames between service and core; router messages, each of which may come twice;
    a prefix stream's two directions, which may be cut at any time; reads, which end well, badly, or not

Reading is copying pool values. The target of a read that has not ended may hold anything at any time, and
does: what computes with it, or frees it, gives other tokens. A block is compared with its digest after it
was copied; while its lock stands, a difference that the test did not make is a broken lock.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moonpool.core.config import CoreConfig
from moonpool.core.protocol import Command, CoreFrame, HandedBack, Refused, TokensReady
from moonpool.handoff.config import FetchConfig, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    EndPrefixLease,
    FetchOutcome,
    HandoffEffect,
    OpenStream,
    RecordFetch,
    SendCommand,
    SendOnPrefixLease,
    SendToRouter,
    StartRead,
    StopReads,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HandoffEvent,
    HolderMessageReceived,
    PrefixDelayed,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    ReadDone,
    RouterMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import (
    AbortRequest,
    DecodeRequest,
    HolderMessage,
    LeaseId,
    PeerPrefix,
    PrefixOpen,
    PrefixOpened,
    RouterKey,
    RouterMessage,
    with_digests,
)
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from support.core_cluster import Worker
from support.fake_runner import answer_alone

ROUTER = RouterKey("router")
#: What an open read's target holds at any time.
_GARBAGE = -7
_MAX_ROUNDS = 2_000
_DEADLINE_S = 1e6


@dataclass(kw_only=True)
class Stream:
    """One lease on a prefix, with a stream of its own."""

    reader: int
    holder: int
    lease_id: LeaseId
    open: PrefixOpen
    #: The holder has been told of it.
    is_open_told: bool = False
    #: As each side sees it.
    is_open_at_reader: bool = True
    is_open_at_holder: bool = True
    to_reader: deque[HolderMessage | None] = field(default_factory=deque)


@dataclass(kw_only=True)
class Read:
    """A read that has not ended."""

    reader: int
    effect: StartRead
    is_stopped: bool = False


@dataclass(kw_only=True)
class Tracked:
    """A request as its router sees it."""

    request: InferenceRequest
    worker: int
    peer_tokens: int
    attempt: int = 0
    is_placed: bool = False
    is_aborted: bool = False
    answer: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.finish_reason is not None


class Node:
    """One worker."""

    def __init__(self, index: int, core: CoreConfig, fetch: FetchConfig) -> None:
        self.index = index
        self.key = WorkerKey(WorkerId(f"w{index}"), Incarnation("1"))
        self.handoffs = WorkerHandoffs(
            key=self.key,
            namespace="n",
            secret_fingerprint="s",
            config=HandoffConfig(num_layers=1, block_size=core.block_size),
            fetch=fetch,
        )
        self.worker = Worker(core, has_own_memory=True)
        self.commands: list[Command] = []
        #: A plan ran: what it brought lies in the next frame.
        self.has_more = False
        self.frames: deque[CoreFrame] = deque()
        self.messages: deque[RouterMessage] = deque()


class FetchWorld:
    """See the file's head."""

    def __init__(self, *, num_workers: int, core: CoreConfig, fetch: FetchConfig) -> None:
        self.now = 0.0
        self.nodes = [Node(index, core, fetch) for index in range(num_workers)]
        self.requests: dict[RequestId, Tracked] = {}
        self.streams: list[Stream] = []
        self.reads: list[Read] = []
        self.records: list[RecordFetch] = []
        self._num_streams = 0

    # -- the router --

    def submit(self, request: InferenceRequest, worker: int, peer_tokens: int) -> None:
        """A request for one worker, of which the next one is believed to hold so many tokens."""
        tracked = Tracked(request=request, worker=worker, peer_tokens=peer_tokens)
        self.requests[request.request_id] = tracked
        self.place(tracked)

    def place(self, tracked: Tracked, *, is_twice: bool = False) -> None:
        """Send it as a new attempt, or its last message once more."""
        if not is_twice:
            tracked.attempt += 1
            tracked.is_placed = True
        holder = self.nodes[(tracked.worker + 1) % len(self.nodes)]
        peer = PeerPrefix(key=holder.key, address="peer:1", num_tokens=tracked.peer_tokens)
        request = replace(tracked.request, emitted_token_ids=tuple(tracked.answer))
        self.nodes[tracked.worker].messages.append(
            DecodeRequest(
                request=request,
                attempt=tracked.attempt,
                source=None,
                peer=peer if tracked.peer_tokens else None,
                deadline_s=_DEADLINE_S,
            )
        )

    def abort(self, tracked: Tracked) -> None:
        tracked.is_aborted = True
        attempt_id = AttemptId(tracked.request.request_id, tracked.attempt)
        self.nodes[tracked.worker].messages.append(AbortRequest(attempt_id=attempt_id))

    # -- what may happen --

    def moves(self, *, with_reads: bool = True) -> list[Callable[[], None]]:
        """Everything that lies ready, in a fixed order; each does one thing."""
        moves: list[Callable[[], None]] = []
        for node in self.nodes:
            if node.messages:
                moves.append(lambda node=node: self._deliver(node))
            if node.frames:
                moves.append(lambda node=node: self._take_frame(node))
            if node.commands or node.has_more:
                moves.append(lambda node=node: self.step(node))
        for stream in self.streams:
            if not stream.is_open_told or not stream.is_open_at_reader:
                moves.append(lambda stream=stream: self._tell_holder(stream))
            if stream.to_reader:
                moves.append(lambda stream=stream: self._tell_reader(stream))
        if with_reads:
            moves += [lambda read=read: self.end_read(read) for read in self.reads]
        waiting = [t for t in self.requests.values() if not t.is_placed and not t.is_over]
        moves += [lambda tracked=tracked: self.place(tracked) for tracked in waiting]
        return moves

    def step(self, node: Node) -> None:
        """One turn of the engine's loop."""
        self._scribble()
        commands, node.commands = node.commands, []
        frame = node.worker.step(*commands, now=self.now)
        node.frames.append(frame)
        node.has_more = frame.step > 0

    def cut(self, stream: Stream) -> None:
        """Both sides see its end; what was under way is lost."""
        stream.to_reader = deque([None])
        if stream.is_open_at_holder and stream.is_open_told:
            stream.is_open_at_holder = False
            self._handle(stream.holder, PrefixLeaseClosed(lease_id=stream.lease_id))
        stream.is_open_told = True

    def delay(self, num_ready: int) -> bool:
        """A holder that has not answered yet says that it goes to a disk first, for all but so many blocks.

        False: there is none.
        """
        for stream in self.streams:
            if stream.is_open_told and stream.is_open_at_holder and not stream.to_reader:
                num_blocks = len(stream.open.hashes)
                delayed = PrefixDelayed(
                    lease_id=stream.lease_id,
                    num_ready_blocks=min(num_ready, num_blocks - 1),
                    num_blocks=num_blocks,
                )
                self._handle(stream.holder, delayed)
                return True
        return False

    def end_read(self, read: Read, *, fault: str = "") -> None:
        """A read ends: well, with its first block damaged (`bad`), or without having read (`fail`)."""
        self.reads.remove(read)
        effect, node = read.effect, self.nodes[read.reader]
        target = node.worker.runner.pool
        if read.is_stopped or fault == "fail":
            target[list(effect.target_block_ids)] = _GARBAGE
            done = ReadDone(read_id=effect.read_id, is_ok=False)
        else:
            holder = next(n for n in self.nodes if n.key == effect.source.key)
            target[list(effect.target_block_ids)] = holder.worker.runner.pool[
                list(effect.source_block_ids)
            ]
            if fault == "bad":
                target[effect.target_block_ids[0], 0] += 1
            bad = tuple(
                index
                for index, (block, digest) in enumerate(
                    zip(effect.target_block_ids, effect.digests, strict=True)
                )
                if _digest(node, block) != digest
            )
            assert not bad or fault == "bad" or not self._is_locked(read), "a locked block changed"
            done = ReadDone(read_id=effect.read_id, bad_indices=bad)
        self._handle(read.reader, done)

    def pass_time(self) -> None:
        """Until the next timer of a machine, if there is one; no request's deadline passes."""
        times = [node.handoffs.next_wakeup() for node in self.nodes]
        at = min((time for time in times if time is not None), default=None)
        if at is None or at > _DEADLINE_S / 2:
            return
        self.now = max(self.now, at)
        for node in self.nodes:
            effects = node.handoffs.tick(self.now)
            node.handoffs.validate()
            self._perform(node.index, effects)

    def settle(self) -> None:
        """Let everything happen that can, then check that it ended as it must."""
        for _ in range(_MAX_ROUNDS):
            moves = self.moves()
            if moves:
                moves[0]()
            elif all(node.handoffs.is_quiet for node in self.nodes):
                break
            else:
                # A message that came twice, the second time long after its attempt had ended.
                self.pass_time()
        else:
            raise AssertionError("it does not come to an end")
        assert not self.reads
        for tracked in self.requests.values():
            if not tracked.is_aborted:
                assert tracked.answer == self._expected(tracked), tracked
        for node in self.nodes:
            ledger = node.worker.core.ledger()
            assert ledger.is_quiet, ledger

    @property
    def outcomes(self) -> set[FetchOutcome]:
        return {record.outcome for record in self.records}

    # -- deliveries --

    def _deliver(self, node: Node) -> None:
        message = node.messages.popleft()
        self._handle(node.index, RouterMessageReceived(router=ROUTER, message=message))

    def _take_frame(self, node: Node) -> None:
        frame = node.frames.popleft()
        self._handle(node.index, CoreFrameReceived(step=frame.step, replies=frame.replies))

    def _tell_holder(self, stream: Stream) -> None:
        if not stream.is_open_told:
            stream.is_open_told = True
            if not stream.is_open_at_reader:
                stream.is_open_at_holder = False
                self.streams.remove(stream)
                return
            event = PrefixOpenReceived(lease_id=stream.lease_id, open=stream.open)
            self._handle(stream.holder, event)
            return
        self.streams.remove(stream)
        if stream.is_open_at_holder:
            stream.is_open_at_holder = False
            self._handle(stream.holder, PrefixLeaseClosed(lease_id=stream.lease_id))

    def _tell_reader(self, stream: Stream) -> None:
        message = stream.to_reader.popleft()
        if not stream.is_open_at_reader:
            return
        if message is None:
            stream.is_open_at_reader = False
            self._handle(stream.reader, StreamBroken(attempt_id=stream.open.attempt_id))
        else:
            self._handle(stream.reader, HolderMessageReceived(message=message))

    # -- effects --

    def _handle(self, index: int, event: HandoffEvent) -> None:
        node = self.nodes[index]
        effects = node.handoffs.handle(event, self.now)
        node.handoffs.validate()
        self._perform(index, effects)

    def _perform(self, index: int, effects: list[HandoffEffect]) -> None:
        node = self.nodes[index]
        for effect in effects:
            match effect:
                case SendCommand(command=command):
                    node.commands.append(command)
                case SendToRouter(message=message):
                    self._report(message)
                case OpenStream(open=PrefixOpen() as open_):
                    self._open(index, open_)
                case CloseStream(attempt_id=attempt_id):
                    for stream in self._streams_of(index, attempt_id):
                        stream.is_open_at_reader = False
                        stream.to_reader.clear()
                case StartRead():
                    self.reads.append(Read(reader=index, effect=effect))
                case StopReads(attempt_id=attempt_id):
                    for read in self.reads:
                        read.is_stopped |= read.effect.read_id.attempt_id == attempt_id
                case SendOnPrefixLease(lease_id=lease_id, message=holder_message):
                    self._send(node, lease_id, holder_message)
                case EndPrefixLease(lease_id=lease_id):
                    self._end(lease_id)
                case RecordFetch():
                    self.records.append(effect)
                case _:
                    raise AssertionError(effect)

    def _open(self, index: int, open_: PrefixOpen) -> None:
        self._num_streams += 1
        holder = next(node.index for node in self.nodes if node.key == open_.holder)
        self.streams.append(
            Stream(
                reader=index,
                holder=holder,
                lease_id=LeaseId(self._num_streams),
                open=open_,
            )
        )

    def _send(self, node: Node, lease_id: LeaseId, message: HolderMessage) -> None:
        """Digests are filled in as it leaves; that it arrives later changes nothing."""
        stream = self._stream(lease_id)
        if stream is None or not stream.is_open_at_holder:
            return
        if isinstance(message, PrefixOpened):
            digests = b"".join(_digest(node, block) for block in message.block_ids)
            message = with_digests(message, digests)
        stream.to_reader.append(message)

    def _end(self, lease_id: LeaseId) -> None:
        stream = self._stream(lease_id)
        if stream is not None:
            stream.is_open_at_holder = False
            stream.to_reader.append(None)

    def _report(self, message: TokensReady | Refused | HandedBack) -> None:
        tracked = self.requests[message.attempt_id.request_id]
        if message.attempt_id.attempt != tracked.attempt or tracked.is_over:
            return
        if not isinstance(message, TokensReady):
            tracked.is_placed = False
            return
        run = message.run
        assert run.first_position == len(tracked.answer), (run, tracked)
        assert message.num_peer_tokens <= (message.num_cached_tokens or 0), message
        tracked.answer += run.token_ids
        tracked.finish_reason = run.finish_reason

    # -- looking --

    def _stream(self, lease_id: LeaseId) -> Stream | None:
        return next((s for s in self.streams if s.lease_id == lease_id), None)

    def _streams_of(self, reader: int, attempt_id: AttemptId) -> list[Stream]:
        return [
            stream
            for stream in self.streams
            if (stream.reader, stream.open.attempt_id) == (reader, attempt_id)
        ]

    def _is_locked(self, read: Read) -> bool:
        """Its stream stands, as the holder sees it."""
        streams = self._streams_of(read.reader, read.effect.read_id.attempt_id)
        return any(stream.is_open_at_holder for stream in streams)

    def _scribble(self) -> None:
        for read in self.reads:
            pool = self.nodes[read.reader].worker.runner.pool
            pool[list(read.effect.target_block_ids)] = _GARBAGE

    def _expected(self, tracked: Tracked) -> list[int]:
        answer, _ = answer_alone(tracked.request, max_model_len=10_000)
        return answer


def _digest(node: Node, block: int) -> bytes:
    return hashlib.blake2b(node.worker.runner.pool[block].tobytes(), digest_size=8).digest()
