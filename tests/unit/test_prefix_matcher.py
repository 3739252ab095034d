"""What a router believes to be cached of a request: by namespace, by worker, in whole blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.events import BlockStored
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import PublishedSet
from moonpool.routing.prefix_matcher import PrefixMatcher
from support.kv import SECRET, make_model_namespace
from support.requests import make_request

KEY = WorkerKey(WorkerId("d0"), Incarnation("a" * 16))
NAMESPACE = make_model_namespace(block_size=16)


def hold(index: PrefixIndex, request: InferenceRequest, num_blocks: int) -> None:
    """A worker says that it holds the first blocks of this request."""
    seed = NamespaceSeeds(NAMESPACE, SECRET)(request)
    hashes = hash_blocks(seed, request.token_ids, 16)[:num_blocks]
    batch = PublishedSet().apply((BlockStored(hashes=tuple(hashes), parent_hash=None),))
    assert batch is not None
    index.join(KEY)
    index.apply(KEY, batch)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def matcher(index: PrefixIndex) -> PrefixMatcher:
    matcher = PrefixMatcher(index, SECRET)
    matcher.adopt(NAMESPACE)
    return matcher


def test_leading_blocks_count_in_tokens(index: PrefixIndex, matcher: PrefixMatcher) -> None:
    request = make_request(prompt=100)
    hold(index, request, 3)
    assert matcher(request) == {KEY: 48}
    assert matcher(make_request("other", prompt=100)) == {}


def test_the_last_token_is_never_cached(index: PrefixIndex, matcher: PrefixMatcher) -> None:
    request = make_request(prompt=64)
    hold(index, request, 4)
    assert matcher(request) == {KEY: 48}


def test_a_replay_finds_the_blocks_of_its_answer(
    index: PrefixIndex, matcher: PrefixMatcher
) -> None:
    request = make_request(prompt=40, max_tokens=100)
    replay = replace(request, emitted_token_ids=tuple(range(50)))
    hold(index, replay, 5)
    assert matcher(request) == {KEY: 32}
    assert matcher(replay) == {KEY: 80}
    assert len(matcher.keys(replay)) == 90 // 16
    assert matcher.keys(request).tolist() == matcher.keys(replay)[:2].tolist()


def test_namespaces_never_meet(index: PrefixIndex, matcher: PrefixMatcher) -> None:
    mine = make_request("mine", prompt=range(64), tenant="a")
    hold(index, mine, 4)
    assert matcher(mine) == {KEY: 48}
    others = [
        replace(make_request("tenant", prompt=range(64)), tenant="b"),
        replace(make_request("salt", prompt=range(64), tenant="a"), cache_salt="s"),
        replace(make_request("adapter", prompt=range(64), tenant="a"), adapter="lora@1"),
    ]
    for other in others:
        assert matcher(other) == {}
        assert not set(matcher.keys(other).tolist()) & set(matcher.keys(mine).tolist())


def test_nothing_matches_before_the_namespace_is_known(index: PrefixIndex) -> None:
    matcher = PrefixMatcher(index, SECRET)
    request = make_request(prompt=64)
    hold(index, request, 3)
    assert matcher(request) == {}
    assert len(matcher.keys(request)) == 0
    matcher.adopt(NAMESPACE)
    assert matcher(request) == {KEY: 48}
    matcher.adopt(make_model_namespace(block_size=16, kv_dtype="bfloat16"))
    assert matcher(request) == {}


def test_keys_are_kept_until_the_request_ends(matcher: PrefixMatcher) -> None:
    request = make_request(prompt=64)
    matcher(request)
    assert matcher.num_requests == 1
    # Asked again, they are not computed again.
    assert np.shares_memory(matcher.keys(request), matcher.keys(request))
    matcher.forget(request.request_id)
    matcher.forget(request.request_id)
    assert matcher.num_requests == 0


def test_keys_that_were_computed_elsewhere_are_taken(matcher: PrefixMatcher) -> None:
    request = make_request(prompt=100)
    job = matcher.key_job(request)
    assert job is not None
    chain = job.run()
    matcher.bring(request.request_id, job, chain)
    assert np.shares_memory(matcher.keys(request), chain.keys)
    # An answer goes on from there.
    replay = replace(request, emitted_token_ids=tuple(range(50)))
    expected = PrefixMatcher(PrefixIndex(), SECRET)
    expected.adopt(NAMESPACE)
    assert matcher.keys(replay).tolist() == expected.keys(replay).tolist()
    matcher.forget(request.request_id)
    assert matcher.num_requests == 0


def test_keys_of_another_namespace_are_not_taken(index: PrefixIndex) -> None:
    matcher = PrefixMatcher(index, SECRET)
    request = make_request(prompt=100)
    assert matcher.key_job(request) is None
    assert matcher.block_size == 0
    matcher.adopt(NAMESPACE)
    job = matcher.key_job(request)
    assert job is not None
    matcher.adopt(make_model_namespace(block_size=16, kv_dtype="bfloat16"))
    matcher.bring(request.request_id, job, job.run())
    assert matcher.num_requests == 0
    short = make_request("short", prompt=15)
    job = matcher.key_job(short)
    assert job is not None
    assert len(job.run().keys) == 0
