"""Prefix reads among the other machines of a worker: who hears of what, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.core.protocol import (
    Abort,
    Accepted,
    Decode,
    FetchEnded,
    FetchReserved,
    LockPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixLocked,
    ReadEnded,
    Refused,
    RefuseReason,
    Reply,
    Revoked,
    TokensReady,
)
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    OpenStream,
    RecordFetch,
    SendCommand,
    SendOnPrefixLease,
    SendOnStream,
    SendToRouter,
    StartRead,
    StopReads,
)
from moonpool.handoff.events import (
    CoreFrameReceived,
    HandoffEvent,
    HolderMessageReceived,
    OpenReceived,
    PrefixOpenReceived,
    ReadDone,
    ReadId,
    RouterLost,
    RouterMessageReceived,
    StreamBroken,
)
from moonpool.handoff.messages import (
    AbortRequest,
    DecodeRequest,
    LeaseId,
    Open,
    Opened,
    PeerPrefix,
    PrefillRequest,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixRefusal,
    RouterKey,
    SourceRef,
    StreamId,
    Waiting,
)
from moonpool.handoff.worker import WorkerHandoffs
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)
from moonpool.inference.output import TokenRun
from support.requests import make_request

R = RouterKey("r")
W = WorkerKey(WorkerId("w"), Incarnation("1"))
H = WorkerKey(WorkerId("h"), Incarnation("1"))
REQUEST = make_request("a", prompt=10, max_tokens=5)
A = AttemptId(RequestId("a"), 1)
PEER = PeerPrefix(key=H, address="h:1", num_tokens=8)
HASHES = (BlockHash(bytes(32)), BlockHash(bytes([1]) * 32))
RESERVED = FetchReserved(
    attempt_id=A,
    num_cached_tokens=0,
    num_tokens=8,
    block_ids=(BlockId(0), BlockId(1)),
    hashes=HASHES,
)
OPENED = PrefixOpened(attempt_id=A, block_ids=(BlockId(5), BlockId(6)), digests=bytes(4))


class Machines:
    """All machines of one worker, checked after every event."""

    def __init__(self, mode: FetchMode = FetchMode.ALWAYS) -> None:
        self.handoffs = WorkerHandoffs(
            key=W,
            namespace="n",
            secret_fingerprint="s",
            config=HandoffConfig(num_layers=2, block_size=4),
            fetch=FetchConfig(mode=mode),
        )
        self.now = 0.0

    def __call__(self, event: HandoffEvent) -> list[object]:
        effects = self.handoffs.handle(event, self.now)
        self.handoffs.validate()
        return list(effects)

    def at(self, now: float) -> list[object]:
        self.now = now
        effects = self.handoffs.tick(now)
        self.handoffs.validate()
        return list(effects)

    def prefill(self, attempt: int = 1, peer: PeerPrefix | None = PEER) -> list[object]:
        message = PrefillRequest(request=REQUEST, attempt=attempt, peer=peer, deadline_s=60.0)
        return self(RouterMessageReceived(router=R, message=message))

    def decode(
        self, attempt: int = 1, peer: PeerPrefix | None = PEER, source: SourceRef | None = None
    ) -> list[object]:
        message = DecodeRequest(
            request=REQUEST, attempt=attempt, source=source, peer=peer, deadline_s=60.0
        )
        return self(RouterMessageReceived(router=R, message=message))

    def core(self, *replies: Reply, step: int = 0) -> list[object]:
        return self(CoreFrameReceived(step=step, replies=replies))


def command(value: object) -> SendCommand:
    return SendCommand(command=value)  # type: ignore[arg-type]


@pytest.fixture
def m() -> Iterator[Machines]:
    machines = Machines()
    yield machines
    machines.handoffs.validate()


def test_both_roles_name_the_peer_to_the_core(m: Machines) -> None:
    assert m.prefill() == [command(Prefill(request=REQUEST, attempt=1, num_peer_tokens=8))]
    assert m.decode(2)[-1] == command(
        Decode(request=REQUEST, attempt=2, has_source=False, num_peer_tokens=8)
    )


def test_a_decode_with_a_source_has_no_peer(m: Machines) -> None:
    source = SourceRef(key=H, address="h:1")
    assert m.decode(source=source) == [command(Decode(request=REQUEST, attempt=1, has_source=True))]


def test_a_peer_that_is_not_worth_it_is_not_named() -> None:
    m = Machines(FetchMode.NEVER)
    assert m.prefill() == [command(Prefill(request=REQUEST, attempt=1))]


def test_a_message_that_comes_twice_names_nobody_twice(m: Machines) -> None:
    m.decode()
    assert m.decode() == []
    assert len(m.core(Accepted(attempt_id=A), RESERVED)) == 1


def test_the_life_of_a_decode_that_fetches(m: Machines) -> None:
    m.decode()
    assert m.core(Accepted(attempt_id=A)) == []
    (opened,) = m.core(RESERVED)
    assert isinstance(opened, OpenStream)
    (read,) = m(HolderMessageReceived(message=OPENED))
    assert isinstance(read, StartRead)
    close, ended, record = m(ReadDone(read_id=read.read_id))
    assert close == CloseStream(attempt_id=A)
    assert ended == command(FetchEnded(attempt_id=A, num_tokens=8))
    assert isinstance(record, RecordFetch)
    assert m.handoffs.num_entries == 1  # the decode itself


@pytest.mark.parametrize(
    "event",
    [
        RouterMessageReceived(router=R, message=AbortRequest(attempt_id=A)),
        RouterLost(router=R),
    ],
)
def test_an_end_from_the_router_ends_the_fetch_after_the_attempt(
    m: Machines, event: HandoffEvent
) -> None:
    m.prefill()
    m.core(Accepted(attempt_id=A), RESERVED)
    m(HolderMessageReceived(message=OPENED))
    abort, close, _, stop = m(event)
    assert abort == command(Abort(attempt_id=A))
    assert close == CloseStream(attempt_id=A)
    assert stop == StopReads(attempt_id=A)
    assert m(ReadDone(read_id=ReadId(A, 0), is_ok=False)) == [command(ReadEnded(attempt_id=A))]
    assert m.handoffs.is_quiet


def test_a_higher_attempt_ends_the_lower_ones_fetch_and_has_its_own(m: Machines) -> None:
    m.decode()
    m.core(Accepted(attempt_id=A), RESERVED)
    abort, _, _, ended, asked = m.prefill(2)
    assert abort == command(Abort(attempt_id=A))
    assert ended == command(ReadEnded(attempt_id=A))
    assert asked == command(Prefill(request=REQUEST, attempt=2, num_peer_tokens=8))


def test_the_deadline_ends_a_fetch(m: Machines) -> None:
    m.decode()
    m.core(Accepted(attempt_id=A), RESERVED)
    effects = m.at(65.0)
    assert effects[0] == command(Abort(attempt_id=A))
    assert command(ReadEnded(attempt_id=A)) in effects
    assert m.handoffs.is_quiet


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_revoked_fetch_is_not_told_to_the_router(m: Machines, role: str) -> None:
    getattr(m, role)()
    m.core(Accepted(attempt_id=A), RESERVED)
    effects = m.core(Revoked(attempt_id=A))
    assert not [effect for effect in effects if isinstance(effect, SendToRouter)]
    assert command(ReadEnded(attempt_id=A)) in effects
    assert m.handoffs.num_entries == 1


def test_a_refusal_forgets_the_peer(m: Machines) -> None:
    m.decode()
    refused = Refused(attempt_id=A, reason=RefuseReason.NO_BLOCKS)
    assert m.core(refused) == [SendToRouter(router=R, message=refused)]
    assert m.handoffs.is_quiet


NOTHING = PrefixOpened(attempt_id=A, block_ids=())
FIRST_RUN = TokenRun(first_position=0, token_ids=(7,))


def test_the_router_is_told_how_much_the_peer_of_a_decode_held(m: Machines) -> None:
    m.decode()
    m.core(Accepted(attempt_id=A), RESERVED)
    m(HolderMessageReceived(message=replace(OPENED, block_ids=(BlockId(5),), digests=bytes(2))))
    assert command(FetchEnded(attempt_id=A, num_tokens=4)) in m(ReadDone(read_id=ReadId(A, 0)))
    first = TokensReady(attempt_id=A, run=FIRST_RUN, num_cached_tokens=4, num_peer_tokens=4)
    told = replace(first, num_peer_held_tokens=4)
    assert m.core(first) == [SendToRouter(router=R, message=told)]
    # It goes with what is said of cached tokens, and with nothing else.
    later = TokensReady(attempt_id=A, run=TokenRun(first_position=1, token_ids=(8,)))
    assert m.core(later) == [SendToRouter(router=R, message=later)]


def test_router_and_reader_are_told_how_much_the_peer_of_a_prefill_held(m: Machines) -> None:
    m.prefill()
    m(
        OpenReceived(
            stream_id=StreamId(1), open=Open(attempt_id=A, reader=H, source=W, namespace="n")
        )
    )
    m.core(Accepted(attempt_id=A), RESERVED)
    m(HolderMessageReceived(message=NOTHING))
    blocks = (BlockId(0), BlockId(1), BlockId(2))
    (opened,) = m.core(PrefillStarted(attempt_id=A, num_cached_tokens=0, block_ids=blocks))
    assert opened == SendOnStream(
        stream_id=StreamId(1),
        message=Opened(attempt_id=A, num_cached_tokens=0, block_ids=(), num_peer_held_tokens=0),
    )
    told, _ = m.core(PrefillDone(attempt_id=A, num_cached_tokens=0, first_token=7))
    assert told == SendToRouter(
        router=R,
        message=TokensReady(
            attempt_id=A, run=FIRST_RUN, num_cached_tokens=0, num_peer_held_tokens=0
        ),
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_peer_that_only_took_too_long_is_no_news_to_the_router(m: Machines, role: str) -> None:
    getattr(m, role)()
    m.core(Accepted(attempt_id=A), RESERVED)
    m(
        HolderMessageReceived(
            message=PrefixFailed(attempt_id=A, reason=PrefixRefusal.BUSY, message="")
        )
    )
    if role == "prefill":
        blocks = (BlockId(0), BlockId(1), BlockId(2))
        m.core(PrefillStarted(attempt_id=A, num_cached_tokens=0, block_ids=blocks))
        effects = m.core(PrefillDone(attempt_id=A, num_cached_tokens=0, first_token=7))
    else:
        effects = m.core(TokensReady(attempt_id=A, run=FIRST_RUN, num_cached_tokens=0))
    told = TokensReady(attempt_id=A, run=FIRST_RUN, num_cached_tokens=0)
    assert effects == [SendToRouter(router=R, message=told)]


def test_a_broken_stream_is_the_fetchs(m: Machines) -> None:
    m.decode()
    m.core(Accepted(attempt_id=A), RESERVED)
    assert m(StreamBroken(attempt_id=A))[0] == command(FetchEnded(attempt_id=A, num_tokens=0))


def test_the_reader_of_a_prefill_that_fetches_is_kept_patient(m: Machines) -> None:
    m.prefill()
    opened = Open(attempt_id=A, reader=H, source=W, namespace="n")
    assert m(OpenReceived(stream_id=StreamId(1), open=opened)) == []
    m.core(Accepted(attempt_id=A), RESERVED)
    waiting = SendOnStream(stream_id=StreamId(1), message=Waiting(attempt_id=A))
    for second in (1.0, 2.0, 3.0):
        assert m.handoffs.next_wakeup() == second
        assert m.at(second) == [waiting]
    m(StreamBroken(attempt_id=A))
    m.core(PrefillStarted(attempt_id=A, num_cached_tokens=0, block_ids=(BlockId(0),) * 3))
    # From now on it is the engine that has to move.
    assert m.at(5.0) == []


def test_a_holder_answers_beside_everything_else(m: Machines) -> None:
    open_ = PrefixOpen(
        attempt_id=A,
        reader=H,
        holder=W,
        namespace="n",
        secret_fingerprint="s",
        hashes=HASHES,
        first=0,
    )
    assert m(PrefixOpenReceived(lease_id=LeaseId(1), open=open_)) == [
        command(LockPrefix(read_id=1, hashes=HASHES, reader=open_.reader))
    ]
    m.decode()
    (told,) = m.core(Accepted(attempt_id=A), PrefixLocked(read_id=1, block_ids=(BlockId(3),)))
    assert isinstance(told, SendOnPrefixLease)
    assert m.handoffs.num_entries == 2
    fork = m.handoffs.fork()
    assert fork.key() == m.handoffs.key()
