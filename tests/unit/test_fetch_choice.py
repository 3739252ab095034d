"""Load or recompute, as hits feel it: many fetches from a peer whose speed a test chooses, on a clock of its
own, and each compared with computing everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moonpool.core.protocol import FetchEnded, FetchReserved
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import FetchEffect, OpenStream, SendCommand, StartRead, StopReads
from moonpool.handoff.events import (
    CoreFrameReceived,
    FetchEvent,
    HolderMessageReceived,
    PeerNamed,
    ReadDone,
    ReadId,
)
from moonpool.handoff.fetch_choice import FetchChooser
from moonpool.handoff.fetch_reader import FetchReads
from moonpool.handoff.messages import PeerPrefix, PrefixOpened, PrefixStaging
from moonpool.ids import (
    AttemptId,
    BlockHash,
    BlockId,
    Incarnation,
    RequestId,
    WorkerId,
    WorkerKey,
)
from moonpool.latency.costs import PrefillCost

HOLDER = WorkerKey(WorkerId("h"), Incarnation("1"))
READER = WorkerKey(WorkerId("r"), Incarnation("1"))
BLOCK_SIZE = 16
#: About SmolLM2-135M on one core: 23 KB of KV a token, some 1.2 ms to compute one.
BLOCK_BYTES = 16 * 23_040
COST = PrefillCost(base_s=0.01, per_token_s=1.2e-3, per_work_s=1e-7, max_step_tokens=2_048)
#: A question behind the prefix, computed either way.
NUM_OWN_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a peer: until it has answered, and from then on."""

    latency_s: float = 0.003
    bytes_per_s: float = 2e9
    #: Of its disk, if that is where a prefix lies; all of it is brought before the peer answers.
    disk_bytes_per_s: float | None = None


HEALTHY = Speed()


class Hits:
    """One reader and one peer, a hit at a time."""

    def __init__(self, config: FetchConfig | None = None) -> None:
        self.machine = FetchReads(
            key=READER,
            namespace="n",
            secret_fingerprint="s",
            config=HandoffConfig(num_layers=30),
            fetch=config or FetchConfig(block_bytes=BLOCK_BYTES),
        )
        self.machine.chooser.prefill_cost = COST
        self.now = 0.0
        self.num_asked = 0

    def hit(self, num_tokens: int, speed: Speed, *, pause_s: float = 1.0) -> float:
        """Its time to first token as a multiple of what computing everything takes."""
        self.now += pause_s
        alone_s = COST.predict(num_tokens + NUM_OWN_TOKENS)
        peer = PeerPrefix(key=HOLDER, address="h:1", num_tokens=num_tokens)
        begun_at = self.now
        if self.machine.worth_asking(peer, self.now) is None:
            return 1.0
        num_fetched = self._fetch(peer, speed)
        rest_s = COST.predict(num_tokens + NUM_OWN_TOKENS - num_fetched, num_fetched)
        return (self.now - begun_at + rest_s) / alone_s

    def _fetch(self, peer: PeerPrefix, speed: Speed) -> int:
        """Until FetchEnded; how many tokens have come by then."""
        self.num_asked += 1
        attempt_id = AttemptId(RequestId(f"q{self.num_asked}"), 1)
        num_blocks = peer.num_tokens // BLOCK_SIZE
        blocks = tuple(map(BlockId, range(num_blocks)))
        reserved = FetchReserved(
            attempt_id=attempt_id,
            num_cached_tokens=0,
            num_tokens=peer.num_tokens,
            block_ids=blocks,
            hashes=tuple(BlockHash(block.to_bytes(32, "big")) for block in blocks),
        )
        opened = PrefixOpened(
            attempt_id=attempt_id, block_ids=blocks, digests=bytes(8 * num_blocks)
        )
        staging = PrefixStaging(attempt_id=attempt_id, num_ready_blocks=0, num_blocks=num_blocks)
        #: What the peer will do, and when.
        due: list[tuple[float, FetchEvent]] = []
        free_at = 0.0

        def perform(effects: list[FetchEffect]) -> int | None:
            nonlocal free_at
            for effect in effects:
                match effect:
                    case OpenStream():
                        at = self.now + speed.latency_s
                        if speed.disk_bytes_per_s is not None:
                            due.append((at, HolderMessageReceived(message=staging)))
                            at += num_blocks * BLOCK_BYTES / speed.disk_bytes_per_s
                        due.append((at, HolderMessageReceived(message=opened)))
                    case StartRead(read_id=read_id, source_block_ids=source_block_ids):
                        num_bytes = len(source_block_ids) * BLOCK_BYTES
                        free_at = max(free_at, self.now) + num_bytes / speed.bytes_per_s
                        due.append((free_at, ReadDone(read_id=read_id)))
                    case StopReads():
                        for index, (_, event) in enumerate(due):
                            if isinstance(event, ReadDone):
                                due[index] = (self.now, _stopped(event.read_id))
                    case SendCommand(command=FetchEnded(num_tokens=num_tokens)):
                        return num_tokens
                    case _:
                        pass
            return None

        machine = self.machine
        machine.handle(PeerNamed(attempt_id=attempt_id, peer=peer), self.now)
        effects = machine.handle(CoreFrameReceived(step=0, replies=(reserved,)), self.now)
        while (num_tokens := perform(effects)) is None:
            machine.validate()
            at, event = min(due, key=lambda item: item[0])
            wakeup = machine.next_wakeup()
            if wakeup is not None and wakeup <= at:
                self.now = wakeup
                effects = machine.tick(self.now)
            else:
                due.remove((at, event))
                self.now = at
                effects = machine.handle(event, self.now)
        machine.validate()
        assert machine.is_quiet
        return num_tokens


def _stopped(read_id: ReadId) -> ReadDone:
    return ReadDone(read_id=read_id, is_ok=False)


def median_and_p95(ratios: list[float]) -> tuple[float, float]:
    ordered = sorted(ratios)
    return ordered[len(ordered) // 2], ordered[-(-len(ordered) * 95 // 100) - 1]


def run(
    hits: Hits, speed: Callable[[int], Speed], *, num_hits: int = 100, pause_s: float = 1.0
) -> list[float]:
    lengths = (256, 512, 1_024, 2_048, 4_096)
    return [hits.hit(lengths[n % len(lengths)], speed(n), pause_s=pause_s) for n in range(num_hits)]


def test_a_healthy_peer_is_read_from() -> None:
    hits = Hits()
    median, p95 = median_and_p95(run(hits, lambda _: HEALTHY))
    assert hits.num_asked == 100
    assert median < 0.1
    assert p95 < 0.4  # the shortest prefix, of 256 tokens, before a question of 64


@pytest.mark.parametrize(
    "speed",
    [
        Speed(latency_s=2.0),
        Speed(bytes_per_s=2e8),
        Speed(bytes_per_s=1e7),
        Speed(latency_s=0.5, bytes_per_s=5e7),
        Speed(bytes_per_s=1e5),
    ],
    ids=str,
)
@pytest.mark.parametrize("was_healthy", [False, True])
@pytest.mark.parametrize("pause_s", [0.05, 1.0, 20.0])
def test_a_peer_that_is_slow_costs_its_hits_nothing(
    speed: Speed, was_healthy: bool, pause_s: float
) -> None:
    hits = Hits()
    if was_healthy:
        run(hits, lambda _: HEALTHY, num_hits=30, pause_s=pause_s)
    median, p95 = median_and_p95(run(hits, lambda _: speed, pause_s=pause_s))
    assert median <= 1.05
    assert p95 <= 1.05


def test_a_disk_that_is_well_is_waited_for() -> None:
    hits = Hits()
    median, p95 = median_and_p95(run(hits, lambda _: Speed(disk_bytes_per_s=1e9)))
    assert hits.num_asked == 100
    assert median < 0.15
    assert p95 < 0.5


#: Twice as long as computing, on the longest and on the shortest prefix of a run; and hopeless ones.
SLOW_DISKS = (1.0e7, 8e6, 2e6, 1e5)


@pytest.mark.parametrize("bytes_per_s", SLOW_DISKS)
@pytest.mark.parametrize("pause_s", [0.05, 1.0, 20.0])
def test_a_slow_disk_costs_hits_nothing_though_what_it_brought_is_read_from_memory(
    bytes_per_s: float, pause_s: float
) -> None:
    hits = Hits()

    def speed(number: int) -> Speed:
        # Every other hit finds in memory what the disk has brought since.
        return Speed(disk_bytes_per_s=bytes_per_s) if number % 2 == 0 else HEALTHY

    ratios = run(hits, speed, num_hits=200, pause_s=pause_s)
    on_disk, in_memory = ratios[::2], ratios[1::2]
    assert max(median_and_p95(on_disk)) <= 1.05
    assert median_and_p95(in_memory)[0] < 0.1


def test_a_peer_that_recovers_is_read_from_again() -> None:
    hits = Hits()
    run(hits, lambda n: HEALTHY if n < 20 else Speed(latency_s=2.0))
    ratios = run(hits, lambda _: HEALTHY, num_hits=300, pause_s=2.0)
    median, _ = median_and_p95(ratios[-50:])
    assert median < 0.1


def test_short_prefixes_are_not_worth_their_latency() -> None:
    hits = Hits()
    slow = Speed(latency_s=0.2)
    run(hits, lambda _: slow)
    ratios = [hits.hit(32, slow) for _ in range(100)]
    # Once in fifty it is looked whether that is still so.
    assert sum(ratio > 1.0 for ratio in ratios) <= 2


def test_an_unknown_peer_is_tried_by_one_at_a_time() -> None:
    chooser = FetchChooser(FetchConfig(block_bytes=BLOCK_BYTES), block_size=BLOCK_SIZE)
    chooser.prefill_cost = COST
    peer = PeerPrefix(key=HOLDER, address="h:1", num_tokens=2_048)
    num_bytes = 2_048 // BLOCK_SIZE * BLOCK_BYTES

    def is_chosen(now: float = 0.0) -> bool:
        return chooser.choose(peer, num_cached_tokens=0, num_tokens=2_048, now=now) is not None

    assert is_chosen()
    first = chooser.begin(HOLDER, num_bytes=num_bytes, now=0.0)
    assert not is_chosen()
    chooser.came(first, num_bytes)
    chooser.ended(first, num_bytes=num_bytes, recompute_s=2.0, now=0.01)
    others = [chooser.begin(HOLDER, num_bytes=num_bytes, now=0.01) for _ in range(7)]
    assert is_chosen()
    others.append(chooser.begin(HOLDER, num_bytes=num_bytes, now=0.01))
    assert not is_chosen()
    for other in others:
        chooser.told_nothing(other, num_bytes=0)
    chooser.validate(num_fetching=0)


def test_who_always_reads_takes_its_own_time_and_not_that_of_its_readers() -> None:
    config = FetchConfig(mode=FetchMode.ALWAYS, always_s=20.0, hold_s=5.0)
    chooser = FetchChooser(config, block_size=BLOCK_SIZE)
    peer = PeerPrefix(key=HOLDER, address="h:1", num_tokens=64)
    plan = chooser.choose(peer, num_cached_tokens=0, num_tokens=64, now=0.0)
    assert plan is not None
    assert (plan.patience_s, plan.limit_s) == (20.0, 20.0)


def test_the_first_connection_is_not_part_of_what_a_read_takes() -> None:
    chooser = FetchChooser(FetchConfig(block_bytes=BLOCK_BYTES), block_size=BLOCK_SIZE)

    def read_from(now: float) -> float:
        """A read that waits 0.5 s for its answer and takes 10 ms then; what one is believed to take."""
        ticket = chooser.begin(HOLDER, num_bytes=BLOCK_BYTES, now=now)
        ticket = chooser.opened(ticket, now + 0.5)
        chooser.came(ticket, BLOCK_BYTES)
        chooser.ended(ticket, num_bytes=BLOCK_BYTES, recompute_s=2.0, now=now + 0.51)
        ((_, cost),) = chooser.transfer_costs()
        return cost.predict(BLOCK_BYTES)

    assert read_from(0.0) == pytest.approx(0.01, rel=0.01)
    # Who waits each time is slow.
    assert read_from(1.0) == pytest.approx(0.51, rel=0.01)


def test_what_comes_from_memory_says_nothing_of_a_disk_that_is_read_beside_it() -> None:
    chooser = FetchChooser(FetchConfig(block_bytes=BLOCK_BYTES), block_size=BLOCK_SIZE)
    chooser.prefill_cost = COST
    peer = PeerPrefix(key=HOLDER, address="h:1", num_tokens=2_048)
    num_bytes = 2_048 // BLOCK_SIZE * BLOCK_BYTES

    def predicted_s() -> float:
        plan = chooser.choose(peer, num_cached_tokens=0, num_tokens=2_048, now=0.0)
        assert plan is not None
        return plan.predicted_s

    alone_s = predicted_s()
    on_disk = chooser.begin(HOLDER, num_bytes=num_bytes, now=0.0)
    on_disk = chooser.waits_for_disk(on_disk, 0.0)
    # Nor does what waits for a disk stand before it in memory.
    assert predicted_s() == alone_s
    for _ in range(10):
        in_memory = chooser.begin(HOLDER, num_bytes=num_bytes, now=0.0)
        chooser.came(in_memory, num_bytes)
        chooser.ended(in_memory, num_bytes=num_bytes, recompute_s=2.0, now=0.02)
    chooser.came(on_disk, num_bytes)
    chooser.ended(on_disk, num_bytes=num_bytes, recompute_s=2.0, now=1.0)
    again = chooser.begin(HOLDER, num_bytes=num_bytes, now=1.0)
    plan = chooser.choose_disk(again, num_cached_tokens=0, num_tokens=2_048, now=1.0)
    assert plan is not None
    assert plan.predicted_s == pytest.approx(1.0, rel=0.05)


def test_what_is_known_of_peers_is_bounded() -> None:
    chooser = FetchChooser(FetchConfig(), block_size=BLOCK_SIZE)
    keys = [WorkerKey(WorkerId(f"w{n}"), Incarnation("1")) for n in range(1_100)]
    held = chooser.begin(keys[0], num_bytes=1, now=0.0)
    for key in keys[1:]:
        chooser.told_nothing(chooser.begin(key, num_bytes=1, now=0.0), num_bytes=0)
    known = [key for key, _ in chooser.transfer_costs()]
    assert len(known) == 1_024
    assert keys[0] in known
    chooser.told_nothing(held, num_bytes=0)
    chooser.validate(num_fetching=0)
