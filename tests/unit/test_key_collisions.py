"""Two blocks with one 64-bit key: a router cannot tell them apart, whoever holds one of them must."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.core.protocol import FetchEnded, FetchReserved, LockPrefix, PrefixLocked, Release
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_cache import BlockCache
from moonpool.kv.block_key import block_keys
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import PublishedSet
from support.core_cases import chain, decode_here, ident, make_worker, plant, prefill, tokens
from support.fake_runner import answer_alone, kv_values
from support.kv import colliding, hold, hold_chain, make_chain
from support.requests import make_request

REQUEST = make_request(prompt=14, max_tokens=3)
WORKER = WorkerKey(WorkerId("d0"), Incarnation("1"))


def answer(request: InferenceRequest) -> list[int]:
    return answer_alone(request, max_model_len=64)[0]


def test_no_block_is_locked_for_another_hash_with_its_key() -> None:
    worker = make_worker()
    worker.run_until_idle(prefill(REQUEST))
    worker.step(Release(attempt_id=ident()))
    held = chain(REQUEST, 3)
    twins = tuple(colliding(held))
    assert np.array_equal(block_keys(twins), block_keys(held))
    frame = worker.step(
        LockPrefix(read_id=1, hashes=twins),
        LockPrefix(read_id=2, hashes=(*held[:1], *twins[1:])),
        LockPrefix(read_id=3, hashes=(*twins[:1], *held[1:])),
    )
    assert frame.replies == (
        PrefixLocked(read_id=1, block_ids=()),
        PrefixLocked(read_id=2, block_ids=(0,)),
        # A hash names its whole prefix; whoever asks for this has not hashed it.
        PrefixLocked(read_id=3, block_ids=()),
    )
    worker.core.validate()


@pytest.mark.parametrize("num_true", [0, 1, 2])
def test_a_request_uses_no_block_that_only_shares_its_key(num_true: int) -> None:
    worker = make_worker()
    held = chain(REQUEST, 3)
    other = [*held[:num_true], *colliding(held[num_true:])]
    planted = plant(worker.core, other)
    worker.runner.pool[list(planted[:num_true])] = np.reshape(
        kv_values([], REQUEST.prompt_token_ids[: 4 * num_true]), (num_true, 4)
    )
    first, second, third = answer(REQUEST)
    assert worker.run_until_idle(decode_here(REQUEST))[1:] == [
        tokens("r1", 0, first, cached=4 * num_true),
        tokens("r1", 1, second),
        tokens("r1", 2, third, finish=FinishReason.LENGTH),
    ]
    # Both are cached, each under its own hash.
    frame = worker.step(
        LockPrefix(read_id=1, hashes=tuple(other)), LockPrefix(read_id=2, hashes=held)
    )
    of_other, own = frame.replies
    assert isinstance(own, PrefixLocked)
    assert of_other == PrefixLocked(read_id=1, block_ids=planted)
    assert own.block_ids[:num_true] == planted[:num_true]
    assert len(own.block_ids) == 3
    assert not {*own.block_ids[num_true:]} & {*planted}
    worker.core.validate()


def test_a_peer_serves_nothing_that_only_shares_a_key() -> None:
    reader, holder = make_worker(), make_worker()
    plant(holder.core, colliding(chain(REQUEST, 3)))
    _, reserved = reader.step(decode_here(REQUEST, peer=12)).replies
    assert isinstance(reserved, FetchReserved)
    assert reserved.hashes == chain(REQUEST, 3)
    frame = holder.step(LockPrefix(read_id=1, hashes=reserved.hashes))
    assert frame.replies == (PrefixLocked(read_id=1, block_ids=()),)
    replies = reader.run_until_idle(FetchEnded(attempt_id=ident(), num_tokens=0))
    first, second, third = answer(REQUEST)
    assert replies == [
        tokens("r1", 0, first, cached=0),
        tokens("r1", 1, second),
        tokens("r1", 2, third, finish=FinishReason.LENGTH),
    ]


def test_of_two_blocks_with_one_key_the_first_to_go_takes_it_along() -> None:
    cache, published, index = BlockCache(4), PublishedSet(), PrefixIndex()
    index.join(WORKER)
    chains = make_chain("ab"), colliding(make_chain("ab"))
    keys = block_keys(chains[0])

    def tell() -> None:
        """Whoever follows is right, and knows that it is."""
        batch = published.apply(cache.take_events())
        if batch is not None:
            assert not index.apply(WORKER, batch)
        assert not index.note_head(WORKER, published.head)
        published.validate()
        index.validate()
        assert index.keys_of(WORKER).tolist() == sorted(published.snapshot().keys.tolist())

    for one in chains:
        cache.release(hold_chain(cache, one))
        tell()
    # It is believed to hold either; it holds both.
    assert index.match(keys) == {WORKER: 2}
    assert published.head.count == 2
    cache.release(hold(cache, "x"))
    tell()
    # The last block of the one that was used first is gone, and the other one's is missed, which costs a recompute.
    assert [len(cache.match_prefix(one).block_ids) for one in chains] == [1, 2]
    assert index.match(keys) == {WORKER: 1}
    cache.release(hold(cache, "xyz"))
    tell()
    assert [len(cache.match_prefix(one).block_ids) for one in chains] == [0, 1]
    assert index.match(keys) == {}
    cache.release(hold(cache, "pqrs"))
    tell()
    assert index.keys_of(WORKER).tolist() == sorted(block_keys(make_chain("pqrs")).tolist())
    # Made anew, it is known anew.
    cache.release(hold_chain(cache, chains[1]))
    tell()
    assert index.match(keys) == {WORKER: 2}
