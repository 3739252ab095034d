"""Where every token of a prompt was found, or why it was not: one reason at a time, and all at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.dispatch.reuse_books import MissReason, ReuseBooks, ReuseCounts
from moonpool.ids import RequestId, WorkerId
from moonpool.inference.cached_tokens import CachedTokens
from moonpool.inference.generation import Usage
from moonpool.inference.output import FinishReason
from moonpool.kv.asked_keys import AskedKeys
from moonpool.kv.block_key import KeyArray
from moonpool.routing.config import PolicyName
from moonpool.routing.forecast import PlanKind
from moonpool.routing.selection import make_selection
from moonpool.routing.selector import PeerMatch, PlacementDecision, PrefillPlan
from support.fleet import make_key

BLOCK = 16
#: 6 full blocks, of which the last token's one counts: tokens [0, 96) and a tail of 4.
NUM_PROMPT = 100


def chain(name: int, num_blocks: int = 6) -> KeyArray:
    return np.arange(1, num_blocks + 1, dtype=np.uint64) + np.uint64(name << 32)


def placement(
    *,
    cached: int = 0,
    read: int = 0,
    peer: int = 0,
    held: int = 0,
    worker: str = "p",
    attempt: int = 1,
) -> Placement:
    """`cached`, `peer`: what the worker, and the peer that it is told of, are believed to hold."""
    none = np.zeros(0)
    return Placement(
        request_id=RequestId("r"),
        attempt=attempt,
        placed_at=0.0,
        record=PlacementDecision(
            policy=PolicyName.MIN_TTFT,
            is_measured=False,
            num_tokens=NUM_PROMPT,
            num_held_tokens=held or max(cached, peer),
            decode=make_selection(
                keys=(), filters=np.zeros(0, np.int8), row=None, scores=none, terms=()
            ),
            plan=PrefillPlan(
                key=make_key(worker),
                kind=PlanKind.RECOMPUTE,
                num_cached_tokens=cached,
                num_read_tokens=read,
                num_computed_tokens=NUM_PROMPT - cached - read,
                peer=PeerMatch(key=make_key("peer"), num_tokens=peer) if peer else None,
                queue_s=0.0,
                load_s=0.0,
                compute_s=0.0,
                exposed_s=0.0,
            ),
        ),
    )


def end(
    cached: int = 0,
    *,
    peer: int = 0,
    store: int = 0,
    num_tokens: int = 3,
    peer_held: int | None = None,
    attempt: int = 0,
) -> EndRequest:
    """`peer_held`: what the peer turned out to hold; `attempt`: whose cached tokens these are."""
    return EndRequest(
        request_id=RequestId("r"),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(
            num_prompt_tokens=NUM_PROMPT,
            num_completion_tokens=num_tokens,
            num_cached_tokens=cached,
            num_peer_tokens=peer,
            num_store_tokens=store,
        ),
        cached_attempt=attempt,
        num_peer_held_tokens=peer_held,
    )


class Books:
    """The machine, checked after every event."""

    def __init__(self) -> None:
        self.machine = ReuseBooks(AskedKeys())

    def place(self, placed: Placement, keys: KeyArray | None = None) -> None:
        self.machine.on_placed(
            placed,
            num_prompt_tokens=NUM_PROMPT,
            keys=chain(1) if keys is None else keys,
            block_size=BLOCK,
        )
        self.machine.validate()

    def end(self, ended: EndRequest) -> ReuseCounts | None:
        reuse = self.machine.on_ended(ended)
        self.machine.validate()
        return reuse.counts if reuse is not None else None

    def missed(self, placed: Placement, ended: EndRequest) -> dict[str, int]:
        """One request; what it missed, by reason."""
        self.place(placed)
        counts = self.end(ended)
        assert counts is not None
        assert counts.num_prompt_tokens == NUM_PROMPT
        return {reason.value: n for reason, n in counts.num_missed_tokens.items() if n}


@pytest.fixture
def b() -> Iterator[Books]:
    books = Books()
    yield books
    books.machine.validate()
    assert not books.machine.num_open


def test_what_was_never_asked_before_is_cold(b: Books) -> None:
    assert b.missed(placement(), end()) == {"cold": 96}
    (total, by_worker) = b.machine.report().total, b.machine.report().by_worker
    assert total == by_worker[WorkerId("p")]
    assert (total.num_requests, total.num_tail_tokens, total.num_ceiling_tokens) == (1, 4, 0)


def test_what_nobody_holds_any_more_was_evicted(b: Books) -> None:
    b.missed(placement(), end())
    assert b.missed(placement(), end()) == {"evicted": 96}
    assert b.machine.report().total.num_ceiling_tokens == 96


def test_blocks_of_answers_are_known_from_their_announcements(b: Books) -> None:
    b.machine.on_stored(chain(1)[:4])
    assert b.missed(placement(), end()) == {"evicted": 64, "cold": 32}


def test_what_went_elsewhere_without_a_peer_was_routed_away(b: Books) -> None:
    b.machine.on_stored(chain(1))
    assert b.missed(placement(held=64, cached=16), end(16)) == {"routed_away": 48, "evicted": 32}
    assert b.machine.report().total.num_recomputed_held_tokens == 48


def test_a_named_peer_that_was_not_read_was_too_slow(b: Books) -> None:
    b.machine.on_stored(chain(1)[:5])
    assert b.missed(placement(cached=16, peer=64, read=48), end(32, peer=16)) == {
        "too_slow": 32,
        "evicted": 16,
        "cold": 16,
    }
    total = b.machine.report().total
    assert (total.num_device_tokens, total.num_peer_tokens) == (16, 16)
    assert total.num_predicted_tokens == 64


@pytest.mark.parametrize(
    ("found", "peer_held", "missed"),
    [
        pytest.param(64, None, {}, id="whole"),
        pytest.param(48, 48, {"evicted": 16}, id="short"),
        pytest.param(16, 16, {"evicted": 48}, id="absent"),
        # The peer, or a block of it, was good for a part of what was read.
        pytest.param(32, 32, {"evicted": 32}, id="lost"),
        pytest.param(32, 32, {"evicted": 32}, id="damaged"),
        pytest.param(32, None, {"too_slow": 32}, id="slow"),
        pytest.param(32, 48, {"too_slow": 16, "evicted": 16}, id="slow, and short"),
        pytest.param(16, None, {"too_slow": 48}, id="recompute, busy, or not asked"),
        pytest.param(16, 16, {"evicted": 48}, id="refused: it is another one"),
        # The worker had less than was believed, and the peer less than that.
        pytest.param(0, 0, {"evicted": 64}, id="absent, and nothing here"),
    ],
)
def test_why_a_named_peer_spared_less_than_it_could(
    b: Books, found: int, peer_held: int | None, missed: dict[str, int]
) -> None:
    b.machine.on_stored(chain(1)[:4])
    placed = placement(cached=16, peer=64, read=48)
    assert b.missed(placed, end(found, peer=max(found - 16, 0), peer_held=peer_held)) == (
        missed | {"cold": 32}
    )
    total = b.machine.report().total
    assert total.num_recomputed_held_tokens == missed.get("too_slow", 0)
    assert (total.num_predicted_tokens, total.num_ceiling_tokens) == (64, 64)


def test_a_third_one_may_hold_what_the_peer_lacked(b: Books) -> None:
    b.machine.on_stored(chain(1))
    assert b.missed(placement(peer=64, held=96), end(peer_held=32)) == {
        "too_slow": 32,
        "evicted": 32,
        "routed_away": 32,
    }


def test_the_attempt_that_computed_the_most_is_told_of(b: Books) -> None:
    b.machine.on_stored(chain(1))
    b.place(placement(cached=16, peer=96, attempt=1))
    b.place(placement(cached=96, worker="peer", attempt=2))
    # The first one's peer was too slow; the second went to that peer, and found all of it.
    counts = b.end(end(16, attempt=1))
    assert counts is not None
    assert counts.num_missed_tokens[MissReason.TOO_SLOW] == 80
    # The other way round: what the second one did not find was evicted there.
    b.place(placement(cached=96, attempt=1))
    b.place(placement(cached=96, worker="other", attempt=2))
    counts = b.end(end(16, attempt=2))
    assert counts is not None
    assert counts.num_missed_tokens[MissReason.EVICTED] == 80
    assert list(b.machine.report().by_worker) == ["p", "other"]


def test_what_was_held_then_was_too_slow_whatever_died_later(b: Books) -> None:
    b.machine.on_stored(chain(1))
    b.place(placement(peer=96, attempt=1))
    b.place(placement(worker="other", attempt=2))
    counts = b.end(end(attempt=1))
    assert counts is not None
    assert counts.num_missed_tokens[MissReason.TOO_SLOW] == 96


def test_what_the_index_believed_too_long_was_evicted(b: Books) -> None:
    assert b.missed(placement(cached=64), end(32)) == {"evicted": 32, "cold": 32}


def test_what_single_flight_found_counts_as_found(b: Books) -> None:
    # Nobody held it when it was placed; a request before it was computing it.
    assert b.missed(placement(), end(96)) == {}
    total = b.machine.report().total
    assert (total.num_device_tokens, total.num_ceiling_tokens, total.num_tail_tokens) == (96, 96, 4)


def test_its_own_earlier_attempt_is_no_holder(b: Books) -> None:
    b.place(placement())
    assert b.missed(placement(cached=96), end()) == {"cold": 96}
    b.place(placement())
    assert b.missed(placement(peer=96, read=96), end()) == {"evicted": 96}


def test_a_holder_that_died_between_attempts_holds_nothing(b: Books) -> None:
    b.machine.on_stored(chain(1))
    b.place(placement(cached=96, worker="dead"))
    assert b.missed(placement(worker="other"), end()) == {"evicted": 96}
    assert list(b.machine.report().by_worker) == ["other"]


def test_a_request_without_a_token_does_not_count(b: Books) -> None:
    b.place(placement())
    assert b.end(end(num_tokens=0)) is None
    assert b.end(end()) is None
    assert b.machine.report().total == ReuseCounts()


def test_a_replay_whose_whole_prompt_was_found_has_no_tail(b: Books) -> None:
    assert b.missed(placement(cached=112), end(NUM_PROMPT)) == {}
    assert b.machine.report().total.num_tail_tokens == 0


def test_which_reasons_are_of_what_is_held() -> None:
    held = [reason for reason in MissReason if reason.is_held]
    assert held == [MissReason.ROUTED_AWAY, MissReason.TOO_SLOW]


def test_a_prefix_is_cut_from_its_end() -> None:
    cached = CachedTokens(num_tokens=64, num_peer_tokens=32)
    assert cached.within(100) == cached
    assert cached.within(48) == CachedTokens(num_tokens=48, num_peer_tokens=16)
    assert cached.within(16) == CachedTokens(num_tokens=16)
    assert cached.num_device_tokens == 32
