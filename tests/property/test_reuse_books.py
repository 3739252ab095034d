"""Whatever is placed, found and lost: every prompt token is counted once, and the ceiling is one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.dispatch.reuse_books import ReuseBooks
from moonpool.ids import RequestId
from moonpool.inference.generation import Usage
from moonpool.inference.output import FinishReason
from moonpool.kv.asked_keys import AskedKeys
from moonpool.kv.block_key import KeyArray
from moonpool.routing.config import PolicyName
from moonpool.routing.forecast import PlanKind
from moonpool.routing.selection import make_selection
from moonpool.routing.selector import PeerMatch, PlacementDecision, PrefillPlan
from support.fleet import make_key

BLOCK = 4
NOBODY = make_selection(
    keys=(), filters=np.zeros(0, np.int8), row=None, scores=np.zeros(0), terms=()
)


def chain(path: list[int]) -> KeyArray:
    """The keys of blocks, each of which names those before it."""
    keys, parent = [], 1
    for block in path:
        parent = (parent * 6_364_136_223_846_793_005 + 2 * block + 1) % 2**64
        keys.append(parent or 1)
    return np.array(keys, np.uint64)


@dataclass
class NeverForgets:
    """What AskedKeys estimates, exactly."""

    keys: set[int] = field(default_factory=set)

    def prefix(self, keys: KeyArray) -> int:
        run = 0
        for key in keys.tolist():
            if key not in self.keys:
                break
            run += 1
        return run


@settings(max_examples=60)
@given(st.data())
def test_every_token_is_counted_once(data: st.DataObject) -> None:
    max_keys = data.draw(st.sampled_from([8, 10_000]), label="max_keys")
    books = ReuseBooks(AskedKeys(max_keys=max_keys))
    truth = NeverForgets()
    num_ceiling = 0
    for number in range(data.draw(st.integers(1, 12))):
        path = data.draw(st.lists(st.integers(0, 1), max_size=8))
        num_prompt = len(path) * BLOCK + data.draw(st.integers(1 if not path else 0, BLOCK - 1))
        keys = chain(path)
        num_reusable = min(len(keys), (num_prompt - 1) // BLOCK)
        known = truth.prefix(keys[:num_reusable])
        request_id = RequestId(str(number))
        # A worker holds, and finds, what was asked for before.
        blocks = st.integers(0, known)
        held = data.draw(blocks)
        cached = data.draw(st.integers(0, held))
        peer = data.draw(st.sampled_from([0, held]))
        num_attempts = data.draw(st.integers(1, 3))
        for attempt in range(1, num_attempts + 1):
            books.on_placed(
                Placement(
                    request_id=request_id,
                    attempt=attempt,
                    placed_at=0.0,
                    record=PlacementDecision(
                        policy=PolicyName.MIN_TTFT,
                        is_measured=False,
                        num_tokens=num_prompt,
                        num_held_tokens=held * BLOCK,
                        decode=NOBODY,
                        plan=PrefillPlan(
                            key=make_key("w"),
                            kind=PlanKind.LOCAL,
                            num_cached_tokens=cached * BLOCK,
                            num_read_tokens=0,
                            num_computed_tokens=num_prompt - cached * BLOCK,
                            peer=PeerMatch(key=make_key("p"), num_tokens=peer * BLOCK)
                            if peer
                            else None,
                            queue_s=0.0,
                            load_s=0.0,
                            compute_s=0.0,
                            exposed_s=0.0,
                        ),
                    ),
                ),
                num_prompt_tokens=num_prompt,
                keys=keys,
                block_size=BLOCK,
            )
        found = data.draw(blocks)
        from_peer = data.draw(st.integers(0, found))
        end = EndRequest(
            request_id=request_id,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(
                num_prompt_tokens=num_prompt,
                num_completion_tokens=1,
                num_cached_tokens=found * BLOCK,
                num_peer_tokens=from_peer * BLOCK,
            ),
            cached_attempt=data.draw(st.integers(0, num_attempts)),
            num_peer_held_tokens=data.draw(st.none() | blocks.map(lambda n: n * BLOCK)),
        )
        reuse = books.on_ended(end)
        assert reuse is not None
        counts = reuse.counts
        assert abs(counts.num_ceiling_tokens - known * BLOCK) <= counts.max_error_tokens
        num_ceiling += known * BLOCK
        truth.keys.update(keys.tolist())
        books.validate()
    total = books.report().total
    assert not books.num_open
    assert abs(total.num_ceiling_tokens - num_ceiling) <= total.max_error_tokens
    if max_keys > 100:
        assert total.max_error_tokens == 0
