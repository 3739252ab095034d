"""Two StoreCores under the machines that workers read prefixes with: one takes a chain from the other.

The machines are driven as a shell drives them; reading is copying labels from one arena into the other.
"""

from __future__ import annotations

from moonpool.core.protocol import Abort, FetchReserved, Reply
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    EndPrefixLease,
    FetchEffect,
    HoldEffect,
    OpenStream,
    RecordFetch,
    SendCommand,
    SendOnPrefixLease,
    StartRead,
    StopReads,
)
from moonpool.handoff.events import (
    AttemptAborted,
    CoreFrameReceived,
    HolderMessageReceived,
    PeerNamed,
    PrefixLeaseClosed,
    PrefixOpenReceived,
    ReadDone,
)
from moonpool.handoff.fetch_holder import PrefixHolds
from moonpool.handoff.fetch_reader import FetchReads
from moonpool.handoff.messages import LeaseId, PeerPrefix, PrefixOpened, with_digests
from moonpool.ids import BlockHash, BlockId, Incarnation, WorkerId, WorkerKey
from moonpool.tiering.protocol import LoadBlocks, StoreCommand, StoreFrame
from support.store import BLOCK_SIZE, Store, attempt, chain, found, loaded

_LEASE = LeaseId(7)
_NUM_LAYERS = 2


class _Node(Store):
    """A store with its machines and an arena of labels."""

    def __init__(self, name: str, **changes: object) -> None:
        super().__init__(**changes)
        self.key = WorkerKey(WorkerId(name), Incarnation("1"))
        fetch = FetchConfig(mode=FetchMode.ALWAYS, block_bytes=1_000, span_bytes=2_000, max_reads=2)
        self.reads = FetchReads(
            key=self.key,
            namespace="n",
            secret_fingerprint="s",
            config=HandoffConfig(num_layers=_NUM_LAYERS, block_size=BLOCK_SIZE),
            fetch=fetch,
        )
        self.holds = PrefixHolds(key=self.key, namespace="n", secret_fingerprint="s", config=fetch)
        self.arena: dict[BlockId, BlockHash] = {}

    def tell(self, command: StoreCommand) -> tuple[Reply, ...]:
        """Give the core a command, do what the disk has to do; what the machines are told."""
        frame: StoreFrame | None = self.say(command)
        replies: list[Reply] = []
        while frame is not None:
            replies += [reply for reply in frame.replies if isinstance(reply, Reply)]
            loads = [work for work in frame.disk_work if isinstance(work, LoadBlocks)]
            for load in loads:
                self.arena.update({block_id: block_hash for block_hash, block_id in load.blocks})
            frame = self.say(*map(loaded, loads)) if loads else None
        return tuple(replies)


class _Pair:
    """`taker` reads from `giver`."""

    def __init__(self, giver: _Node, taker: _Node) -> None:
        self.giver, self.taker = giver, taker
        self.open_reads: list[StartRead] = []

    def offer(self, tokens: str, number: int) -> FetchReserved | None:
        """The giver offers; what the taker wants of it, on which it has begun."""
        reads, num_tokens = self.taker.reads, len(tokens) * BLOCK_SIZE
        _, *wanted = self.taker.offer(tokens, number).replies
        if not wanted:
            return None
        (reserved,) = wanted
        assert isinstance(reserved, FetchReserved)
        peer = PeerPrefix(key=self.giver.key, address="giver:1", num_tokens=num_tokens)
        self.perform(reads.handle(PeerNamed(attempt_id=attempt(number), peer=peer), 0.0))
        self.perform(reads.handle(CoreFrameReceived(step=0, replies=(reserved,)), 0.0))
        return reserved

    def perform(self, effects: list[FetchEffect]) -> None:
        """On behalf of the taker's reader."""
        for effect in effects:
            match effect:
                case SendCommand(command=command):
                    self.taker.tell(command)
                case OpenStream(open=open_):
                    event = PrefixOpenReceived(lease_id=_LEASE, open=open_)
                    self.perform_holding(self.giver.holds.handle(event, 0.0))
                case CloseStream():
                    event = PrefixLeaseClosed(lease_id=_LEASE)
                    self.perform_holding(self.giver.holds.handle(event, 0.0))
                case StartRead():
                    self.open_reads.append(effect)
                case RecordFetch() | StopReads():
                    pass
                case _:
                    raise AssertionError(effect)

    def perform_holding(self, effects: list[HoldEffect]) -> None:
        for effect in effects:
            match effect:
                case SendCommand(command=command):
                    replies = self.giver.tell(command)
                    event = CoreFrameReceived(step=0, replies=replies)
                    self.perform_holding(self.giver.holds.handle(event, 0.0))
                case SendOnPrefixLease(message=message):
                    assert isinstance(message, PrefixOpened)
                    leaves = b"leaf" * (_NUM_LAYERS * len(message.block_ids))
                    told = HolderMessageReceived(message=with_digests(message, leaves))
                    self.perform(self.taker.reads.handle(told, 0.0))
                case EndPrefixLease():
                    pass

    def read_on(self) -> None:
        """All reads, and those that follow from them."""
        while self.open_reads:
            read = self.open_reads.pop(0)
            for source, target in zip(read.source_block_ids, read.target_block_ids, strict=True):
                self.taker.arena[target] = self.giver.arena[source]
            self.perform(self.taker.reads.handle(ReadDone(read_id=read.read_id), 0.0))

    def check_over(self) -> None:
        for node in (self.giver, self.taker):
            assert node.reads.is_quiet
            assert node.holds.is_quiet
            assert node.core.ledger().is_quiet
            node.reads.validate()
            node.holds.validate()


def _restarted(tokens: str) -> _Node:
    """A node that found a chain on its disk."""
    node = _Node("giver", has_disk=True)
    node.say(found(chain(tokens)))
    return node


def test_a_store_takes_what_it_lacks_from_another_that_has_it_on_disk() -> None:
    pair = _Pair(_restarted("abcde"), _Node("taker"))
    pair.offer("abcde", 1)
    pair.read_on()
    pair.check_over()
    (locked,) = pair.taker.lock("abcde", 1).replies
    assert [pair.taker.arena[block_id] for block_id in locked.block_ids] == list(chain("abcde"))
    pair.taker.unlock(1)
    # What it has is not read again, nor what lies on its own disk alone.
    assert pair.offer("abcde", 2) is None
    pair.check_over()


def test_the_beginning_of_what_is_read_may_lie_on_disk_only() -> None:
    pair = _Pair(_restarted("abcd"), _Node("taker", has_disk=True))
    pair.taker.say(found(chain("ab")))
    wanted = pair.offer("abcd", 1)
    assert wanted is not None
    assert wanted.num_cached_tokens == 2 * BLOCK_SIZE
    pair.read_on()
    assert pair.taker.get("abcd") == 4


def test_an_offer_of_what_is_gone_brings_nothing() -> None:
    pair = _Pair(_Node("giver"), _Node("taker"))
    pair.offer("abc", 1)
    pair.check_over()
    assert pair.taker.get("abc") == 0


def test_an_abort_while_reads_are_out_holds_the_blocks_until_they_are_over() -> None:
    pair = _Pair(_restarted("abcd"), _Node("taker"))
    pair.offer("abcd", 1)
    assert len(pair.open_reads) == 2
    pair.taker.tell(Abort(attempt_id=attempt(1)))
    pair.perform(pair.taker.reads.handle(AttemptAborted(attempt_id=attempt(1)), 0.0))
    assert pair.giver.core.ledger().is_quiet
    ledger = pair.taker.core.ledger()
    assert (ledger.num_quarantined, ledger.num_referenced) == (1, 4)
    pair.read_on()
    pair.check_over()
    assert pair.taker.get("abcd") == 0
