"""The handoff protocol as a world to explore: the product's own machines joined by channels.

One router (Dispatcher), some workers (WorkerHandoffs, and a core, the product's or the HonestCore that
leaves more open). A core takes commands at once: it has no other input, so every run has an
equivalent one in which its commands are not delayed.
All else travels in FIFO channels that are unordered among each other:

    R router -> worker      F frames, core -> service     O reader -> source (the handoff stream)
    S worker -> router      G the control page (latest)   A source -> reader
                                                          P reader -> holder (the prefix stream)
                                                          Q holder -> reader
                                                          T one read each: when it ends
With `num_peer_tokens` every attempt that is computed on a worker is told that the next worker holds so
much of it; `warm` workers do, in their first life.

Time stands still at 0. Where nothing else can happen, the next timer of a machine fires; with
`num_early_ticks` some fire at any time. Faults, each anywhere, are counted by `num_faults`:

    crash          a worker dies and comes back empty, as another incarnation
    cut_router     the router's stream to a worker is cut and stands again
    cut_handoff    a handoff stream, or a prefix stream, is cut
    bad_leaf       a read ends with a block that does not verify
    duplicate      a message between processes comes twice

With `reorders`, messages between processes overtake each other within their channel; a stream's
opening and its end keep their places.

A state is a tuple of small numbers: every machine and message is kept once, and a machine's answer to
an event is computed once, however many states share it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from moonpool.core.config import CoreConfig
from moonpool.core.protocol import (
    Abort,
    Command,
    ReadEnded,
    Release,
    Reply,
    TokensReady,
    UnlockPrefix,
)
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.effects import EmitTokens, EndRequest, SendAbort, SendDecode, SendPrefill
from moonpool.dispatch.events import (
    DispatchEvent,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    WorkerJoined,
    WorkerLost,
    WorkerMessageReceived,
)
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    EndPrefixLease,
    EndStream,
    FetchOutcome,
    HandoffEffect,
    OpenStream,
    RecordFetch,
    SendCommand,
    SendOnPrefixLease,
    SendOnStream,
    SendToRouter,
    StartRead,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HandoffEvent,
    HolderMessageReceived,
    LayersDone,
    OpenReceived,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    ReadDone,
    RouterLost,
    RouterMessageReceived,
    SourceMessageReceived,
    StreamBroken,
    StreamClosed,
)
from moonpool.handoff.messages import (
    Commit,
    DecodeRequest,
    LeaseId,
    Open,
    PeerPrefix,
    PrefillRequest,
    PrefixOpen,
    PrefixOpened,
    RouterKey,
    StreamId,
)
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.routing.config import RoutingConfig
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool.routing.worker_view import WorkerInfo, WorkerLoad, WorkerRole
from support.explored_core import ExploredCore, warm_core
from support.explorer import BrokenRuleError
from support.honest_core import FIRST_TOKEN, HonestConfig, HonestCore, WorldCore

NAMESPACE = "namespace"
#: Timers later than this are deadlines, which nothing here should need.
_SOON_S = 100.0
_DEADLINE_S = 600.0

#: Everything a test may break, to show that the exploration would notice.
MUTATIONS = frozenset(
    {
        "no_parking",
        "no_tombstone",
        "no_end_abort",
        "decode_starts_at_token_2",
        "release_at_commit",
        "no_read_wait",
        "younger_may_revoke",
        "fetch_ends_before_its_reads",
        "fetch_never_ends",
        "unlock_at_opened",
        "no_unlock",
    }
)


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    requests: tuple[InferenceRequest, ...]
    roles: tuple[WorkerRole, ...] = (WorkerRole.PREFILL, WorkerRole.DECODE)
    #: HonestConfig: the stand-in core; CoreConfig: the product's.
    core: HonestConfig | CoreConfig
    max_attempts: int = 3
    max_failures: int = 3
    layers_per_group: int = 1
    num_faults: int = 0
    fault_kinds: frozenset[str] = frozenset({"crash"})
    num_cancels: int = 0
    num_early_ticks: int = 0
    #: Uncached tokens from which a prefill worker is asked.
    threshold_tokens: int = 0
    num_peer_tokens: int = 0
    #: Workers whose first life holds the last request's prompt; the product's core only.
    warm: frozenset[int] = frozenset()
    #: Check who holds the blocks that are read and written: many more states, with the product's core.
    has_block_ids: bool = False
    #: Channels whose messages overtake each other, of R, S and A.
    reorders: frozenset[str] = frozenset()
    #: Requests that may not end in an error, unless they are cancelled.
    must_finish: frozenset[str] = frozenset()
    mutation: str = ""


@dataclass(frozen=True, slots=True)
class Books:
    """What one client has seen."""

    token_ids: tuple[int, ...] = ()
    end: str = ""


@dataclass(frozen=True, slots=True)
class RouterNode:
    dispatcher: Dispatcher
    books: tuple[Books, ...]

    def key(self) -> Hashable:
        return (self.dispatcher.key(), self.books)


@dataclass(frozen=True, slots=True)
class WorkerNode:
    key_: WorkerKey
    handoffs: WorkerHandoffs
    core: WorldCore

    def key(self) -> Hashable:
        return (self.key_, self.handoffs.key(), self.core.key())

    @property
    def is_quiet(self) -> bool:
        return self.handoffs.is_quiet and self.core.is_quiet


class Do(enum.Enum):
    """What an Op does to its channel."""

    PUSH = enum.auto()
    #: The page shows the latest only.
    SET = enum.auto()
    CREATE = enum.auto()
    REMOVE = enum.auto()
    #: Push, if the stream is still there and has not ended.
    STREAM = enum.auto()
    #: Push, if the router's stream to that life of the worker stands.
    SEND = enum.auto()


@dataclass(frozen=True, slots=True)
class Op:
    """A change of one channel, by numbers."""

    do: Do
    channel: int
    message: int = -1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which a node may take an event."""

    label: str
    node: int
    ops: tuple[Op, ...]


#: The end of a stream, as the other side sees it.
END = "end"


class _Table:
    """Things by number, each kept once; equal are those with equal keys."""

    def __init__(self) -> None:
        self.things: list[object] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, thing: object) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.things)
            self.things.append(thing)
        return number


Channels = dict[int, tuple[int, ...]]
#: Next states, each with a label that `describe` turns into words.
Found = list[tuple[Hashable, Hashable]]


class ProtocolWorld:
    """See the file's head. A state is (router, workers, channels, lives, faults, cancels, ticks)."""

    def __init__(self, config: WorldConfig) -> None:
        assert config.mutation in MUTATIONS | {""}, config.mutation
        self.config = config
        core = config.core
        if isinstance(core, HonestConfig):
            core = replace(
                core,
                may_revoke_for_younger=config.mutation == "younger_may_revoke",
                frees_before_reads_end=config.mutation == "no_read_wait",
            )
        self._core_config = core
        self._handoff_config = HandoffConfig(
            num_layers=core.num_layers if isinstance(core, HonestConfig) else 1,
            block_size=core.block_size,
            layers_per_group=config.layers_per_group,
            remember_s=-1.0 if config.mutation == "no_tombstone" else 2.0,
        )
        self._dispatch_config = DispatchConfig(
            routing=RoutingConfig(
                disagg=DisaggConfig(
                    threshold_tokens=config.threshold_tokens,
                    busy_queued_tokens=1_000_000,
                    busy_threshold_tokens=config.threshold_tokens,
                )
            ),
            num_kept_decisions=0,
            max_attempts=config.max_attempts,
            max_failures=config.max_failures,
            max_deaths=2,
        )
        self._request_numbers = {r.request_id: i for i, r in enumerate(config.requests)}
        self._nodes = _Table()
        self._messages = _Table()
        self._names = _Table()
        self._router_memo: dict[tuple[int, int], Outcome] = {}
        self._worker_memo: dict[tuple[int, int], list[Outcome]] = {}
        self._core_memo: dict[int, list[Outcome]] = {}
        self._event_memo: dict[tuple[int, int], tuple[int, int]] = {}
        self._sent_memo: dict[tuple[int, int, WorkerKey], int] = {}
        self._streams: dict[int, tuple[int, AttemptId]] = {}
        self._fetch_config = FetchConfig(
            # One block at a time, so that what has come by parts is explored too.
            mode=FetchMode.ALWAYS,
            block_bytes=1,
            span_bytes=1,
        )
        self._end = self._message(END)
        #: Per worker, the number of its channel to the router.
        self._heard = [self._names.number(("S", w), ("S", w)) for w in range(len(config.roles))]
        self._load = WorkerLoad(num_total_blocks=1_000, num_available_blocks=1_000)
        #: Ways in which requests ended, over all states seen.
        self.ends: set[str] = set()
        #: Ways in which fetches ended, over all states seen.
        self.fetch_outcomes: set[FetchOutcome] = set()

    # -- the world's interface --

    def initial(self) -> Hashable:
        dispatcher = Dispatcher(self._dispatch_config)
        books = tuple(Books() for _ in self.config.requests)
        router = self._number_of_router(RouterNode(dispatcher, books))
        workers = tuple(
            self._number_of_worker(self._new_worker(i, 0)) for i in range(len(self.config.roles))
        )
        events: list[DispatchEvent] = []
        for i in range(len(workers)):
            key = self._key(i, 0)
            events.append(WorkerJoined(info=self._info(i, 0)))
            events.append(LoadReported(key=key, load=self._load))
        events += [RequestArrived(request=r, deadline_s=_DEADLINE_S) for r in self.config.requests]
        outcome = self._router_outcome(router, self._message(tuple(events)))
        lives = ((0, 0),) * len(workers)
        channels = self._apply({}, outcome.ops, lives)
        return self._pack(
            outcome.node,
            workers,
            channels,
            lives,
            (self.config.num_faults, self.config.num_cancels, self.config.num_early_ticks),
        )

    def moves(self, state: Hashable) -> Found:
        router, workers, packed, lives, budget = state  # type: ignore[misc]
        channels = dict(packed)
        found: Found = []
        for number, messages in packed:
            if messages and self._is_ignored(number, messages[0], router, workers):
                rest = dict(channels)
                self._take_first(rest, number, messages)
                state = self._pack(router, workers, rest, lives, budget)
                return [(("deliver", number, messages[0]), state)]
        for number, messages in packed:
            for i in range(self._num_deliverable(number, messages)):
                first = (messages[i], *messages[:i], *messages[i + 1 :])
                self._deliver(found, number, first, router, workers, channels, lives, budget)
        for w, worker in enumerate(workers):
            for outcome in self._core_outcomes(worker):
                self._worker_moved(
                    found, w, outcome, None, router, workers, channels, lives, budget
                )
        if not found:
            self._tick(found, router, workers, channels, lives, budget)
        elif budget[2]:
            self._tick(found, router, workers, channels, lives, (*budget[:2], budget[2] - 1))
        if budget[1]:
            self._cancel(found, router, workers, channels, lives, budget)
        if budget[0]:
            self._faults(found, router, workers, channels, lives, budget)
        return [(label, next_state) for label, next_state in found if next_state != state]

    def describe(self, label: Hashable) -> str:
        """The way from one state to the next, in words."""
        match label:
            case ("deliver", int() as number, int() as message, *more):
                return f"{self._name(number)} delivers {_short(self._thing(message))} {more or ''}"
            case _:
                return str(label)

    def problems(self, state: Hashable, *, is_final: bool) -> Iterable[str]:
        router, workers, packed, _, budget = state  # type: ignore[misc]
        books = self._router(router).books
        nodes = [self._worker(number) for number in workers]
        is_over = all(book.end for book in books)
        if is_final:
            if not is_over:
                yield "a request never ends"
            if packed:
                yield "a stream or a message is left"
            for node in nodes:
                if not node.is_quiet:
                    yield "a worker keeps an attempt, a stream or blocks"
        elif is_over and not any(messages for _, messages in packed):
            is_ticked = self.config.num_early_ticks != budget[2]
            is_settled = all(node.core.is_settled for node in nodes)
            if is_settled and not is_ticked and not all(node.is_quiet for node in nodes):
                yield "a worker works on for an ended request"
        are_blocks_known = isinstance(self._core_config, HonestConfig) or self.config.has_block_ids
        if are_blocks_known and any(self._name(number)[0] == "T" for number, _ in packed):
            yield from self._read_problems(packed, nodes)

    def _read_problems(
        self, packed: tuple[tuple[int, tuple[int, ...]], ...], nodes: list[WorkerNode]
    ) -> Iterable[str]:
        streams = {self._name(n) for n, _ in packed if self._name(n)[0] in ("A", "Q")}
        for number, messages in packed:
            name = self._name(number)
            if name[0] != "T" or not messages:
                continue
            kind, read = self._thing(messages[0])  # type: ignore[misc]
            attempt_id = read.read_id.attempt_id
            reader = nodes[name[1]].core  # type: ignore[index]
            if any(reader.holder(b) != attempt_id for b in read.target_block_ids):
                yield "a block is free while it may still be written"
            source = self._index(read.source.key.worker_id)
            stream = ("Q" if read.is_prefix else "A", name[1], source, attempt_id)
            if kind == "ok" and stream in streams and END not in self._contents(packed, stream):
                core = nodes[source].core
                if read.is_prefix:
                    are_held = all(core.is_locked(b) for b in read.source_block_ids)
                else:
                    are_held = all(core.holder(b) == attempt_id for b in read.source_block_ids)
                if not are_held:
                    yield "a block is free while its reader's stream is open"

    # -- deliveries --

    def _deliver(
        self,
        found: Found,
        number: int,
        messages: tuple[int, ...],
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> None:
        rest = dict(channels)
        self._take_first(rest, number, messages)
        label = ("deliver", number, messages[0])
        if number in self._heard:
            outcome = self._router_outcome(router, messages[0])
            after = self._apply(rest, outcome.ops, lives)
            found.append((label, self._pack(outcome.node, workers, after, lives, budget)))
            return
        w, message = self._numbered_event(number, messages[0])
        for outcome in self._worker_outcomes(workers[w], message):
            after = self._apply(rest, outcome.ops, lives)
            moved = (*workers[:w], outcome.node, *workers[w + 1 :])
            found.append(((*label, outcome.label), self._pack(router, moved, after, lives, budget)))

    def _num_deliverable(self, number: int, messages: tuple[int, ...]) -> int:
        """How many of a channel's messages may come next: the first, or those before a fence."""
        if self._name(number)[0] not in self.config.reorders:
            return min(len(messages), 1)
        fences = (i for i, message in enumerate(messages) if self._is_fence(message))
        return min(len(messages), max(next(fences, len(messages)), 1))

    def _is_fence(self, message: int) -> bool:
        """The end or the opening of a stream: nothing overtakes it."""
        thing = self._thing(message)
        if isinstance(thing, tuple):
            return isinstance(thing[0], WorkerLost | WorkerJoined)
        return thing == END or isinstance(thing, RouterLost)

    def _take_first(self, rest: Channels, number: int, messages: tuple[int, ...]) -> None:
        """A stream's channel to its reader stays while the stream does; all else while it is full."""
        is_stream = self._name(number)[0] in ("A", "Q")
        if messages[1:] or (is_stream and messages[0] != self._end):
            rest[number] = messages[1:]
        else:
            del rest[number]

    def _is_ignored(self, number: int, message: int, router: int, workers: tuple[int, ...]) -> bool:
        """Whether delivering it changes nothing, now and at any later time.

        That holds for what the router, or a service hearing from its core, ignores: the attempt has
        ended there, or the position is taken, for ever. Such a delivery commutes with all else, so
        it goes first and alone.
        """
        if number in self._heard:
            outcome = self._router_outcome(router, message)
            return outcome.node == router and not outcome.ops
        if self._name(number)[0] not in ("F", "G", "O", "P"):
            return False
        w, event = self._numbered_event(number, message)
        outcomes = self._worker_outcomes(workers[w], event)
        return len(outcomes) == 1 and outcomes[0].node == workers[w] and not outcomes[0].ops

    def _numbered_event(self, number: int, message: int) -> tuple[int, int]:
        event = self._event_memo.get((number, message))
        if event is None:
            w, thing = self._event(self._name(number), self._thing(message))
            event = self._event_memo[number, message] = (w, self._message(thing))
        return event

    def _event(self, name: tuple[object, ...], message: object) -> tuple[int, HandoffEvent]:
        """Which worker takes this message of that channel, and as which event."""
        match name:
            case ("R", int() as w):
                return w, message  # type: ignore[return-value]
            case ("F", int() as w):
                step, replies = message  # type: ignore[misc]
                return w, CoreFrameReceived(step=step, replies=replies)
            case ("G", int() as w):
                step, num_layers = message  # type: ignore[misc]
                return w, LayersDone(step=step, num_layers=num_layers)
            case ("O", int() as reader, int() as source, AttemptId() as attempt_id):
                stream_id = StreamId(self._number_of_stream(reader, attempt_id))
                if message == END:
                    return source, StreamClosed(stream_id=stream_id)
                assert isinstance(message, Open)
                return source, OpenReceived(stream_id=stream_id, open=message)
            case ("A", int() as reader, int(), AttemptId() as attempt_id):
                if message == END:
                    return reader, StreamBroken(attempt_id=attempt_id)
                return reader, SourceMessageReceived(message=message)  # type: ignore[arg-type]
            case ("P", int() as reader, int() as holder, AttemptId() as attempt_id):
                lease_id = LeaseId(self._number_of_stream(reader, attempt_id))
                if message == END:
                    return holder, PrefixLeaseClosed(lease_id=lease_id)
                assert isinstance(message, PrefixOpen)
                return holder, PrefixOpenReceived(lease_id=lease_id, open=message)
            case ("Q", int() as reader, int(), AttemptId() as attempt_id):
                if message == END:
                    return reader, StreamBroken(attempt_id=attempt_id)
                return reader, HolderMessageReceived(message=message)  # type: ignore[arg-type]
            case ("T", int() as reader, _):
                kind, read = message  # type: ignore[misc]
                return reader, ReadDone(
                    read_id=read.read_id,
                    is_ok=kind != "failed",
                    bad_indices=(0,) if kind == "bad" else (),
                )
            case _:
                raise AssertionError(name)

    def _worker_moved(
        self,
        found: Found,
        w: int,
        outcome: Outcome,
        label: Hashable,
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> None:
        after = self._apply(channels, outcome.ops, lives)
        moved = (*workers[:w], outcome.node, *workers[w + 1 :])
        found.append((label or outcome.label, self._pack(router, moved, after, lives, budget)))

    def _op(self, do: Do, channel: tuple[object, ...], message: object = None) -> Op:
        return Op(do, self._names.number(channel, channel), self._message(message))

    def _apply(
        self, channels: Channels, ops: tuple[Op, ...], lives: tuple[tuple[int, int], ...]
    ) -> Channels:
        if not ops:
            return channels
        after = dict(channels)
        for op in ops:
            number = op.channel
            match op.do:
                case Do.PUSH:
                    after[number] = (*after.get(number, ()), op.message)
                case Do.SET:
                    after[number] = (op.message,)
                case Do.CREATE:
                    after[number] = ()
                case Do.REMOVE:
                    after.pop(number, None)
                case Do.STREAM:
                    if number in after and self._end not in after[number]:
                        after[number] = (*after[number], op.message)
                case Do.SEND:
                    event = self._sent(op, after, lives)
                    if event is not None:
                        after[number] = (*after.get(number, ()), event)
        return after

    def _sent(self, op: Op, after: Channels, lives: tuple[tuple[int, int], ...]) -> int | None:
        """The router's message as the worker gets it; None: the stream is cut, seen or not yet."""
        key, message = self._thing(op.message)  # type: ignore[misc]
        w = self._index(key.worker_id)
        incarnation, stream = lives[w]
        if key.incarnation != str(incarnation):
            return None
        if any(self._is_loss(m) for m in after.get(self._heard[w], ())):
            return None
        next_worker = (w + 1) % len(lives)
        peer = self._key(next_worker, lives[next_worker][0])
        event = self._sent_memo.get((op.message, stream, peer))
        if event is None:
            message = self._with_peer(message, peer)
            event = self._sent_memo[op.message, stream, peer] = self._message(
                RouterMessageReceived(router=RouterKey(f"stream{stream}"), message=message)
            )
        return event

    def _with_peer(self, message: object, key: WorkerKey) -> object:
        """The message of a router that believes that this worker holds the prefix."""
        num_tokens = self.config.num_peer_tokens
        is_computed = isinstance(message, PrefillRequest) or (
            isinstance(message, DecodeRequest) and message.source is None
        )
        if not num_tokens or not is_computed:
            return message
        return replace(message, peer=PeerPrefix(key=key, address="", num_tokens=num_tokens))

    def _is_loss(self, message: int) -> bool:
        events = self._thing(message)
        return isinstance(events, tuple) and isinstance(events[0], WorkerLost)

    # -- time, clients, faults --

    def _tick(
        self,
        found: Found,
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> None:
        node = self._router(router)
        due = node.dispatcher.next_wakeup(0.0)
        if due is not None and due < _SOON_S:
            outcome = self._router_outcome(router, self._message(("tick", due)))
            after = self._apply(channels, outcome.ops, lives)
            found.append(
                (f"router at {due}", self._pack(outcome.node, workers, after, lives, budget))
            )
        for w, worker in enumerate(workers):
            due = self._worker(worker).handoffs.next_wakeup()
            if due is not None and due < _SOON_S:
                for outcome in self._worker_outcomes(worker, self._message(("tick", due))):
                    label = f"worker {w} at {due}"
                    self._worker_moved(
                        found, w, outcome, label, router, workers, channels, lives, budget
                    )

    def _cancel(
        self,
        found: Found,
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> None:
        for request, book in zip(self.config.requests, self._router(router).books, strict=True):
            if not book.end:
                event = RequestCancelled(request_id=request.request_id)
                outcome = self._router_outcome(router, self._message((event,)))
                after = self._apply(channels, outcome.ops, lives)
                rest = (budget[0], budget[1] - 1, budget[2])
                label = f"cancel {request.request_id}"
                found.append((label, self._pack(outcome.node, workers, after, lives, rest)))

    def _faults(
        self,
        found: Found,
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> None:
        rest = (budget[0] - 1, *budget[1:])
        kinds = self.config.fault_kinds
        for w in range(len(workers)):
            incarnation, stream = lives[w]
            if "crash" in kinds:
                born = (*lives[:w], (incarnation + 1, stream), *lives[w + 1 :])
                fresh = self._number_of_worker(self._new_worker(w, incarnation + 1))
                after = self._crash(channels, w, incarnation)
                moved = (*workers[:w], fresh, *workers[w + 1 :])
                found.append((f"crash {w}", self._pack(router, moved, after, born, rest)))
            if "cut_router" in kinds:
                born = (*lives[:w], (incarnation, stream + 1), *lives[w + 1 :])
                after = dict(channels)
                number = self._names.number(("R", w), ("R", w))
                fences = tuple(m for m in after.get(number, ()) if self._is_fence(m))
                cut = RouterLost(router=RouterKey(f"stream{stream}"))
                after[number] = (*fences, self._message(cut))
                self._lose(after, w, incarnation, incarnation)
                found.append((f"cut router {w}", self._pack(router, workers, after, born, rest)))
        for number, messages in channels.items():
            name = self._name(number)
            is_stream = name[0] in ("A", "Q") and END not in self._things(messages)
            if is_stream and "cut_handoff" in kinds:
                after = dict(channels)
                self._cut_stream(after, name)
                self._set(after, name, END)
                found.append((f"cut {name}", self._pack(router, workers, after, lives, rest)))
            can_double = name[0] in ("R", "S", "A") and "duplicate" in kinds and messages
            if can_double and not self._is_fence(messages[0]):
                after = dict(channels)
                after[number] = (messages[0], *messages)
                label = f"duplicate {name}"
                found.append((label, self._pack(router, workers, after, lives, rest)))
            if name[0] == "T" and "bad_leaf" in kinds:
                kind, read = self._thing(messages[0])  # type: ignore[misc]
                if kind == "ok":
                    after = dict(channels)
                    self._set(after, name, ("bad", read))
                    found.append((f"bad {name}", self._pack(router, workers, after, lives, rest)))

    def _crash(self, channels: Channels, w: int, incarnation: int) -> Channels:
        after = dict(channels)
        for number, messages in channels.items():
            match self._name(number):
                case ("R" | "F" | "G", int() as owner) if owner == w:
                    del after[number]
                case ("T", int() as reader, _) if reader == w:
                    del after[number]
                case ("T", _, _) as name:
                    _, read = self._thing(messages[0])  # type: ignore[misc]
                    if self._index(read.source.key.worker_id) == w:
                        self._set(after, name, ("failed", read))
                case ("A" | "Q", int() as reader, int() as source, _) as name:
                    if reader == w:
                        self._cut_stream(after, name)
                        del after[number]
                    elif source == w:
                        self._set(after, name, END)
                case ("O" | "P", _, int() as source, _) if source == w:
                    del after[number]
                case _:
                    pass
        self._lose(after, w, incarnation, incarnation + 1)
        return after

    def _cut_stream(self, after: Channels, name: tuple[object, ...]) -> None:
        """The source sees the end of a stream, unless it has not seen the stream at all."""
        kind, reader, source, attempt_id = name
        opens = ("O" if kind == "A" else "P", reader, source, attempt_id)
        number = self._names.number(opens, opens)
        if number in after:
            if self._things(after[number]) != [END]:
                del after[number]
        elif END not in self._things(after[self._names.number(name, name)]):
            self._set(after, opens, END)

    def _lose(self, after: Channels, w: int, old: int, new: int) -> None:
        """The router hears that a worker is gone, then that it, or its next life, is there."""
        number = self._heard[w]
        fences = tuple(m for m in after.get(number, ()) if self._is_fence(m))
        lost = self._message((WorkerLost(key=self._key(w, old)),))
        joined = (
            WorkerJoined(info=self._info(w, new)),
            LoadReported(key=self._key(w, new), load=self._load),
        )
        after[number] = (*fences, lost, self._message(joined))

    # -- nodes --

    def _router_outcome(self, number: int, message: int) -> Outcome:
        memo = self._router_memo.get((number, message))
        if memo is None:
            memo = self._router_memo[number, message] = self._handle_router(
                self._router(number), self._thing(message)
            )
        return memo

    def _handle_router(self, node: RouterNode, events: object) -> Outcome:
        dispatcher = node.dispatcher.fork()
        books = node.books
        ops: list[Op] = []
        assert isinstance(events, tuple)
        is_tick = events[0] == "tick"
        with _watched(f"router: {_short(events)}"):
            if is_tick:
                effects = dispatcher.tick(events[1])
            else:
                effects = [e for event in events for e in dispatcher.handle(event, 0.0)]
            dispatcher.validate()
            has_ended = False
            for effect in effects:
                match effect:
                    case (
                        SendPrefill(key=key, message=message) | SendDecode(key=key, message=message)
                    ):
                        w = self._index(key.worker_id)
                        ops.append(self._op(Do.SEND, ("R", w), (key, message)))
                    case SendAbort(key=key, message=message):
                        if has_ended and self.config.mutation == "no_end_abort":
                            continue
                        w = self._index(key.worker_id)
                        ops.append(self._op(Do.SEND, ("R", w), (key, message)))
                    case EmitTokens() | EndRequest():
                        has_ended = has_ended or isinstance(effect, EndRequest)
                        books = self._write_books(books, effect)
                    case _:
                        pass
        return Outcome("", self._number_of_router(RouterNode(dispatcher, books)), tuple(ops))

    def _write_books(
        self, books: tuple[Books, ...], effect: EmitTokens | EndRequest
    ) -> tuple[Books, ...]:
        i = self._request_numbers[effect.request_id]
        request, book = self.config.requests[i], books[i]
        assert not book.end, f"something comes after the end of {effect.request_id}"
        if isinstance(effect, EmitTokens):
            assert effect.run.first_position == len(book.token_ids), "a token is lost or doubled"
            tokens = book.token_ids + effect.run.token_ids
            wanted = tuple(FIRST_TOKEN + p for p in range(len(tokens)))
            assert tokens == wanted, f"wrong tokens: {tokens}"
            book = replace(book, token_ids=tokens)
        else:
            end = effect.error_code or str(effect.finish_reason)
            if request.request_id in self.config.must_finish:
                assert effect.error_code in (None, "cancelled"), "a request fails that must not"
            if effect.error_code is None:
                assert len(book.token_ids) == request.sampling.max_tokens, "the answer is too short"
            assert effect.usage.num_completion_tokens == len(book.token_ids), "usage is wrong"
            book = replace(book, end=end)
            self.ends.add(end)
        return (*books[:i], book, *books[i + 1 :])

    def _worker_outcomes(self, number: int, message: int) -> list[Outcome]:
        memo = self._worker_memo.get((number, message))
        if memo is None:
            memo = self._worker_memo[number, message] = self._handle_worker(
                self._worker(number), self._thing(message)
            )
        return memo

    def _handle_worker(self, node: WorkerNode, event: object) -> list[Outcome]:
        handoffs = node.handoffs.fork()
        with _watched(f"worker {node.key_.worker_id}: {_short(event)}"):
            if isinstance(event, tuple):
                effects = handoffs.tick(event[1])
            else:
                effects = handoffs.handle(event, 0.0)  # type: ignore[arg-type]
            if self.config.mutation == "no_parking" and isinstance(event, OpenReceived):
                effects += handoffs.prefill.tick(self._handoff_config.park_s)
            if self.config.mutation == "no_tombstone":
                effects += handoffs.tick(0.0)
            handoffs.validate()
            return self._perform(node, handoffs, effects)

    def _perform(
        self, node: WorkerNode, handoffs: WorkerHandoffs, effects: list[HandoffEffect]
    ) -> list[Outcome]:
        """The effects' messages, and every way in which the core may take the commands."""
        w = self._index(node.key_.worker_id)
        partial: list[tuple[str, WorldCore, tuple[Op, ...]]] = [("", node.core, ())]
        for effect in effects:
            commands = [effect.command] if isinstance(effect, SendCommand) else []
            if self.config.mutation:
                commands = self._mutated(effect, commands)
            ops = self._ops(w, node, effect)
            partial = [(label, core, done + ops) for label, core, done in partial]
            for command in commands:
                partial = [
                    (
                        f"{label} {turn.label}".strip(),
                        turn.core,
                        done + self._frame_ops(w, turn.frames, turn.page),
                    )
                    for label, core, done in partial
                    for turn in core.handle(command)
                ]
        outcomes = []
        for label, core, done in partial:
            core.validate()
            number = self._number_of_worker(WorkerNode(node.key_, handoffs, core))
            outcomes.append(Outcome(label, number, done))
        return outcomes

    def _mutated(self, effect: HandoffEffect, commands: list[Command]) -> list[Command]:
        """What a broken machine tells its core with this effect."""
        match self.config.mutation, effect:
            case "release_at_commit", SendOnStream(message=Commit(attempt_id=attempt_id)):
                return [Release(attempt_id=attempt_id)]
            case "fetch_ends_before_its_reads", SendCommand(command=Abort(attempt_id=attempt_id)):
                return [*commands, ReadEnded(attempt_id=attempt_id)]
            case "fetch_never_ends", SendCommand(command=ReadEnded()):
                return []
            case "unlock_at_opened", SendOnPrefixLease(lease_id=lease_id, message=PrefixOpened()):
                return [UnlockPrefix(read_id=lease_id)]
            case "no_unlock", SendCommand(command=UnlockPrefix()):
                return []
            case _:
                return commands

    def _ops(self, w: int, node: WorkerNode, effect: HandoffEffect) -> tuple[Op, ...]:
        match effect:
            case SendToRouter(message=message):
                if self._is_first_token_hidden(node, message):
                    return ()
                events = (
                    WorkerMessageReceived(key=node.key_, message=message),
                    LoadReported(key=node.key_, load=self._load),
                )
                return (self._op(Do.PUSH, ("S", w), events),)
            case OpenStream(attempt_id=attempt_id, source=source, open=open_):
                s = self._index(source.key.worker_id)
                there, back = ("P", "Q") if isinstance(open_, PrefixOpen) else ("O", "A")
                return (
                    self._op(Do.CREATE, (back, w, s, attempt_id)),
                    self._op(Do.PUSH, (there, w, s, attempt_id), open_),
                )
            case CloseStream(attempt_id=attempt_id):
                # The reader hears nothing more; the source hears the end. One of the two is the source.
                is_fetch = node.handoffs.fetches.is_reading(attempt_id)
                there, back = ("P", "Q") if is_fetch else ("O", "A")
                ops: list[Op] = []
                for s in range(len(self.config.roles)):
                    if s != w:
                        ops.append(self._op(Do.REMOVE, (back, w, s, attempt_id)))
                        ops.append(self._op(Do.PUSH, (there, w, s, attempt_id), END))
                return tuple(ops)
            case SendOnStream(stream_id=stream_id, message=message):
                reader, attempt_id = self._streams[stream_id]
                return (self._op(Do.STREAM, ("A", reader, w, attempt_id), message),)
            case EndStream(stream_id=stream_id):
                reader, attempt_id = self._streams[stream_id]
                return (self._op(Do.STREAM, ("A", reader, w, attempt_id), END),)
            case SendOnPrefixLease(lease_id=lease_id, message=message):
                reader, attempt_id = self._streams[lease_id]
                return (self._op(Do.STREAM, ("Q", reader, w, attempt_id), message),)
            case EndPrefixLease(lease_id=lease_id):
                reader, attempt_id = self._streams[lease_id]
                return (self._op(Do.STREAM, ("Q", reader, w, attempt_id), END),)
            case RecordFetch(outcome=outcome):
                self.fetch_outcomes.add(outcome)
                return ()
            case StartRead(read_id=read_id):
                return (self._op(Do.PUSH, ("T", w, read_id), ("ok", effect)),)
            case _:
                return ()

    def _is_first_token_hidden(self, node: WorkerNode, message: object) -> bool:
        """The mutation in which the decode worker's frames begin with the token after the commit's."""
        return (
            self.config.mutation == "decode_starts_at_token_2"
            and isinstance(message, TokensReady)
            and self.config.roles[self._index(node.key_.worker_id)] is WorkerRole.DECODE
            and message.num_cached_tokens is not None
            and message.run.finish_reason is None
        )

    def _frame_ops(
        self,
        w: int,
        frames: tuple[tuple[int, tuple[Reply, ...]], ...],
        page: tuple[int, int] | None,
    ) -> tuple[Op, ...]:
        ops = [self._op(Do.PUSH, ("F", w), frame) for frame in frames]
        if page is not None:
            ops.append(self._op(Do.SET, ("G", w), page))
        return tuple(ops)

    def _core_outcomes(self, number: int) -> list[Outcome]:
        memo = self._core_memo.get(number)
        if memo is None:
            node = self._worker(number)
            w = self._index(node.key_.worker_id)
            memo = []
            for turn in node.core.moves():
                turn.core.validate()
                moved = WorkerNode(node.key_, node.handoffs, turn.core)
                memo.append(
                    Outcome(
                        f"core {w}: {turn.label}",
                        self._number_of_worker(moved),
                        self._frame_ops(w, turn.frames, turn.page),
                    )
                )
            self._core_memo[number] = memo
        return memo

    def _new_worker(self, w: int, incarnation: int) -> WorkerNode:
        key = self._key(w, incarnation)
        handoffs = WorkerHandoffs(
            key=key,
            namespace=NAMESPACE,
            config=self._handoff_config,
            fetch=self._fetch_config,
        )
        core: WorldCore
        if isinstance(self._core_config, HonestConfig):
            core = HonestCore(self._core_config)
        else:
            is_warm = w in self.config.warm and incarnation == 0
            core = ExploredCore(
                self._core_config,
                warm_core(self._core_config, self.config.requests[-1]) if is_warm else None,
                has_block_ids=self.config.has_block_ids,
            )
        return WorkerNode(key, handoffs, core)

    # -- names and numbers --

    def _pack(
        self,
        router: int,
        workers: tuple[int, ...],
        channels: Channels,
        lives: tuple[tuple[int, int], ...],
        budget: tuple[int, int, int],
    ) -> Hashable:
        return (router, workers, tuple(sorted(channels.items())), lives, budget)

    def _set(self, after: Channels, name: tuple[object, ...], message: object) -> None:
        after[self._names.number(name, name)] = (self._message(message),)

    def _message(self, message: object) -> int:
        return self._messages.number(message, message)

    def _thing(self, message: int) -> object:
        return self._messages.things[message]

    def _things(self, messages: tuple[int, ...]) -> list[object]:
        return [self._messages.things[message] for message in messages]

    def _contents(
        self, packed: tuple[tuple[int, tuple[int, ...]], ...], name: tuple[object, ...]
    ) -> list[object]:
        number = self._names.number(name, name)
        return self._things(dict(packed).get(number, ()))

    def _name(self, number: int) -> tuple[object, ...]:
        return self._names.things[number]  # type: ignore[return-value]

    def _router(self, number: int) -> RouterNode:
        return self._nodes.things[number]  # type: ignore[return-value]

    def _worker(self, number: int) -> WorkerNode:
        return self._nodes.things[number]  # type: ignore[return-value]

    def _number_of_router(self, node: RouterNode) -> int:
        return self._nodes.number(node.key(), node)

    def _number_of_worker(self, node: WorkerNode) -> int:
        return self._nodes.number(node.key(), node)

    def _number_of_stream(self, reader: int, attempt_id: AttemptId) -> int:
        number = self._request_numbers[RequestId(attempt_id.request_id)]
        stream = reader * 10_000 + number * 1_000 + attempt_id.attempt
        self._streams[stream] = (reader, attempt_id)
        return stream

    def _key(self, w: int, incarnation: int) -> WorkerKey:
        return WorkerKey(WorkerId(f"w{w}"), Incarnation(str(incarnation)))

    def _index(self, worker_id: WorkerId) -> int:
        return int(worker_id[1:])

    def _info(self, w: int, incarnation: int) -> WorkerInfo:
        return WorkerInfo(
            key=self._key(w, incarnation),
            role=self.config.roles[w],
            address=f"w{w}:1",
            block_size=self.config.core.block_size,
        )


class _watched:  # noqa: N801
    """A broken rule inside becomes a BrokenRuleError that names what happened."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, AssertionError):
            raise BrokenRuleError(f"{error} ({self._what})") from error  # type: ignore[misc]


def _short(message: object) -> str:
    """A message in a word or two, for the way to a finding."""
    match message:
        case tuple():
            return "+".join(_short(part) for part in itertools.islice(message, 4))
        case RouterMessageReceived(message=inner) | WorkerMessageReceived(message=inner):
            return _short(inner)
        case TokensReady(attempt_id=attempt_id, run=run):
            return f"tokens {attempt_id} at {run.first_position}"
        case str() | int() | float():
            return str(message)
        case _:
            attempt_id = getattr(message, "attempt_id", "")
            reason = getattr(message, "reason", "")
            return f"{type(message).__name__} {attempt_id} {reason}".strip()
