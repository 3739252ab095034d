"""What was not computed is what clients, books and `moonpool cache` say: whole clusters, engines in threads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.subjects import Subjects
from moonpool.client import AsyncClient, GenerationResult
from moonpool.clock import SystemClock
from moonpool.dispatch.index_follower import IndexFollower
from moonpool.dispatch.reuse_books import ReuseBooks, ReuseCounts
from moonpool.handoff.messages import DecodeRequest
from moonpool.inference.generation import TokenPrompt
from moonpool.inference.output import FinishReason
from moonpool.kv.asked_keys import AskedKeys
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.rpc.cache import fetch_cache_stats
from moonpool.service.life import StopPolicy
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.wire.cache_stats import CacheStats
from moonpool_router.books import ROUTER_METRICS, RouterBooks
from moonpool_router.index_feed import LONG_PROMPT_TOKENS, IndexFeed
from support.cli import cli
from support.eventually import eventually
from support.fake_worker import fake_worker
from support.indexed_cluster import IndexedCluster, IndexedRouter, indexed_cluster
from support.kv import make_model_namespace
from support.requests import make_request
from support.router import ask as make_ask
from support.router import router
from support.thread_engine import StepLog, Turnstile
from support.worker_pair import expected_answer

#: 12 blocks and 8 tokens.
PROMPT = [7 * i % 251 for i in range(200)]
NUM_SHARED = 192


async def ask(router: IndexedRouter, prompt: list[int], *, max_tokens: int = 5) -> GenerationResult:
    """Greedy tokens through the gRPC door."""
    async with AsyncClient(router.address) as client:
        return await client.complete(
            token_ids=prompt, max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True
        )


def cached(result: GenerationResult) -> tuple[int, int]:
    """What was not computed, and what of that came from a peer."""
    usage = result.usage
    by_source = usage.num_cached_tokens_by_source
    assert sum(by_source.values()) == usage.num_cached_tokens <= usage.num_prompt_tokens
    return usage.num_cached_tokens, by_source["peer"]


async def stats(router: IndexedRouter) -> CacheStats:
    return await fetch_cache_stats(router.address, key=None, deadline_s=5.0)


def missed(counts: ReuseCounts) -> dict[str, int]:
    return {reason.value: n for reason, n in counts.num_missed_tokens.items() if n}


async def run_cache(cluster: IndexedCluster, router: IndexedRouter, *arguments: str) -> Any:
    """`moonpool cache ...` as JSON."""
    ran = await asyncio.to_thread(
        cli,
        "cache",
        *arguments,
        "--json",
        "--address",
        router.address,
        "--data-dir",
        str(cluster.data_dir),
    )
    assert (ran.code, ran.err) == (0, "")
    return ran.json


async def test_a_chat_of_turns_over_workers_that_come_and_go(tmp_path: Path) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(
            local_prefill_tokens=64, placement={"disagg": "threshold"}
        )
        prefill = await cluster.start_worker("p0", role="prefill")
        decode = await cluster.start_worker("d0", role="decode")
        await router.follows(prefill, decode)

        first = await ask(router, PROMPT)
        assert first.placement.prefill_worker == "p0"
        assert cached(first) == (0, 0)
        await router.follows(prefill, decode)

        # The decode worker has it all, and the answer: 23 tokens are left, which it computes itself.
        second_turn = [*PROMPT, *first.token_ids, *range(10)]
        second = await ask(router, second_turn)
        assert second.placement.prefill_worker == ""
        assert cached(second) == (NUM_SHARED, 0)
        await router.follows(prefill, decode)

        # It dies. The prefill worker still has the first turn's prompt.
        await decode.stop()
        other = await cluster.start_worker("d1", role="decode")
        await router.follows(prefill, other)
        third_turn = [*second_turn, *second.token_ids, *range(40, 60)]
        third = await ask(router, third_turn)
        assert third.placement.prefill_worker == "p0"
        assert cached(third) == (NUM_SHARED, 0)
        await router.follows(prefill, other)

        # All is forgotten: what was asked before is evicted, not cold.
        cleared = await run_cache(cluster, router, "clear")
        assert [worker["worker_id"] for worker in cleared["workers"]] == ["d1", "p0"]
        assert all(worker["is_cleared"] for worker in cleared["workers"])
        await router.follows(prefill, other)
        assert not any(worker.num_published_blocks for worker in (await stats(router)).workers)
        assert cached(await ask(router, third_turn)) == (0, 0)
        await router.follows(prefill, other)

        report = await stats(router)
        by_worker = {worker.worker_id: worker for worker in report.workers}
        assert missed(by_worker["p0"].counts) == {
            # Turn 1, and the block that turn 3 fills.
            "cold": NUM_SHARED + 16,
            # The block of the second turn, which died with the decode worker; then what was cleared.
            "evicted": 16 + (len(third_turn) - 1) // 16 * 16,
        }
        assert not by_worker["d0"].is_live
        assert by_worker["d0"].counts.num_device_tokens == NUM_SHARED
        assert by_worker["d1"].num_published_blocks > 0
        assert by_worker["d1"].kv_eviction_policy == "lru"
        total = report.total
        assert total.num_requests == 4
        assert total == sum((w.counts for w in report.workers), ReuseCounts())
        assert router.metric(names.CACHED_TOKENS, model="model", source="device") == 2 * NUM_SHARED
        evicted = router.metric(names.MISSED_TOKENS, model="model", reason="evicted")
        assert evicted == total.num_evicted_tokens


async def test_what_peers_hold_is_read_or_it_is_said_why_not(tmp_path: Path) -> None:
    placement = {"mode": "round_robin"}
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(local_prefill_tokens=1_000, placement=placement)
        first = await cluster.start_worker("d0", kv_peer_reads="always")
        second = await cluster.start_worker("d1", kv_peer_reads="always")
        await router.follows(first, second)

        assert cached(await ask(router, PROMPT)) == (0, 0)
        await router.follows(first, second)
        assert cached(await ask(router, PROMPT)) == (NUM_SHARED, NUM_SHARED)
        await router.follows(first, second)

        # The third one computes what the peer that is named could have spared it.
        stubborn = await cluster.start_worker("d2", kv_peer_reads="never")
        await router.follows(first, second, stubborn)
        assert cached(await ask(router, PROMPT)) == (0, 0)
        total = (await stats(router)).total
        assert missed(total) == {"cold": NUM_SHARED, "too_slow": NUM_SHARED}
        for source, num_tokens in (("device", 0), ("peer", NUM_SHARED), ("store", 0)):
            told = router.metric(names.CACHED_TOKENS, model="model", source=source)
            assert told == num_tokens, source
        for reason, num_tokens in (("routed_away", 0), ("too_slow", NUM_SHARED)):
            told = router.metric(names.RECOMPUTED_HELD_TOKENS, model="model", reason=reason)
            assert told == num_tokens, reason
        assert total.num_predicted_tokens == 2 * NUM_SHARED
        assert router.metric(names.PREDICTED_HIT_TOKENS, model="model") == 2 * NUM_SHARED
        await router.follows(first, second, stubborn)

        # Another router, which names no peers, sends it where it is not held.
        blind = await cluster.start_router(
            local_prefill_tokens=1_000, placement=placement | {"reads_from_peers": False}
        )
        await blind.follows(first, second, stubborn)
        (cleared,) = (await run_cache(cluster, blind, "clear", "--worker", "d0"))["workers"]
        assert cleared == {"worker_id": "d0", "is_cleared": True, "because": ""}
        await blind.follows(first, second, stubborn)
        assert cached(await ask(blind, PROMPT)) == (0, 0)
        told = await run_cache(cluster, blind, "stats")
        assert told["total"]["missed_tokens_by_reason"] == {
            "cold": 0,
            "evicted": 0,
            "routed_away": NUM_SHARED,
            "too_slow": 0,
        }
        assert told["total"]["recomputed_held_tokens_by_reason"]["routed_away"] == NUM_SHARED
        assert told["total"]["ceiling_hit_ratio"] == NUM_SHARED / len(PROMPT)
        assert told["total"]["hit_ratio"] == 0.0


async def test_after_a_death_the_least_that_an_attempt_found_counts(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus, "decode-0") as first:
        await r.ready()
        asking = asyncio.create_task(
            r.client.generate(make_ask(TokenPrompt(token_ids=tuple(PROMPT)), max_tokens=2))
        )
        command = await first.next(DecodeRequest)
        first.tokens(command, 0, [65], num_cached_tokens=128)
        async with fake_worker(r.cluster, r.bus, "decode-1") as second:
            await r.ready(2)
            await first.stop()
            # It finds less than the first one did, and reads a part of it from a peer.
            replay = await second.next(DecodeRequest)
            assert replay.request.emitted_token_ids == (65,)
            second.tokens(
                replay,
                1,
                [66],
                finish=FinishReason.LENGTH,
                num_cached_tokens=96,
                num_peer_tokens=32,
            )
            answered = await asking
            assert answered.done is not None
            assert answered.done.usage.num_cached_tokens_by_source == {
                "device": 64, "peer": 32, "store": 0,
            }  # fmt: skip
            (counted,) = (
                worker.counts
                for worker in (
                    await fetch_cache_stats(r.client.address, key=None, deadline_s=5.0)
                ).workers
                if worker.counts.num_requests
            )
            assert (counted.num_device_tokens, counted.num_peer_tokens) == (64, 32)
            assert missed(counted) == {"cold": NUM_SHARED - 96}


@pytest.mark.parametrize("is_source_left", [True, False])
async def test_after_a_migration_cached_is_what_no_engine_has_computed(
    tmp_path: Path, is_source_left: bool
) -> None:
    """The decode worker is stopped in the middle of an answer; with it goes the prefill worker, or does not."""
    log = StepLog()
    turnstile = Turnstile(log)
    at_once = StopPolicy(drain_grace_s=0.0, drain_timeout_s=0.0)
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(
            local_prefill_tokens=64, placement={"disagg": "threshold"}
        )
        prefill = await cluster.start_worker("p0", role="prefill", gate=log)
        decode = await cluster.start_worker("d0", role="decode", gate=turnstile, policy=at_once)
        await router.follows(prefill, decode)
        await ask(router, PROMPT[:104])
        await router.follows(prefill, decode)

        log.forget()
        turnstile.close(num_steps=3)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask(router, PROMPT, max_tokens=60))
            await eventually(lambda: turnstile.is_reached, timeout_s=5, what="it is in the middle")
            other = await cluster.start_worker("d1", role="decode", gate=log)
            await router.meets(prefill, decode, other)
            if not is_source_left:
                await prefill.stop()
                await router.meets(decode, other)
            decode.worker.running.request_stop()

            def is_answered() -> bool:
                turnstile.let_pass()
                return asking.done()

            await eventually(is_answered, timeout_s=10, what="another one has gone on")
        answered = asking.result()
        assert answered.placement.decode_worker == "d1"
        request = make_request(prompt=PROMPT, max_tokens=60, seed=1, ignore_eos=True)
        assert list(answered.token_ids) == expected_answer(request)
        # Six blocks were there from the first prompt. The second attempt finds all full blocks, or nothing.
        times = log.times_computed(len(PROMPT))
        if is_source_left:
            assert cached(answered) == (96, 0)
            assert times.total() == (len(PROMPT) - 96) + (len(PROMPT) - NUM_SHARED)
        else:
            assert cached(answered) == (0, 0)
            assert times.total() == (len(PROMPT) - 96) + len(PROMPT)
        assert answered.usage.num_cached_tokens == len(PROMPT) - len(times)
        await other.worker.until_quiet()


@pytest.mark.parametrize("is_chat", [False, True])
async def test_http_tells_where_cached_tokens_lay(tmp_path: Path, is_chat: bool) -> None:
    async with indexed_cluster(tmp_path) as cluster:
        router = await cluster.start_router(
            local_prefill_tokens=1_000, placement={"mode": "round_robin"}
        )
        workers = [
            await cluster.start_worker(name, kv_peer_reads="always") for name in ("d0", "d1")
        ]
        await router.follows(*workers)
        text = "the same beginning of everything " * 4
        body: dict[str, Any] = {"model": "model", "max_tokens": 2, "temperature": 0, "seed": 1}
        if is_chat:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        else:
            path, body["prompt"] = "/v1/completions", text
        async with httpx.AsyncClient(base_url=router.http_url, timeout=20) as client:

            async def usage(*, is_streamed: bool) -> Mapping[str, Any]:
                if not is_streamed:
                    answer = await client.post(path, json=body)
                    return answer.json()["usage"]
                options = {"stream": True, "stream_options": {"include_usage": True}}
                answer = await client.post(path, json=body | options)
                return json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["usage"]

            told = []
            for is_streamed in (False, True, True, False):
                told.append(await usage(is_streamed=is_streamed))
                await router.follows(*workers)
        num_shared = (told[0]["prompt_tokens"] - 1) // 16 * 16
        assert num_shared > 64
        assert [one["prompt_tokens_details"]["cached_tokens"] for one in told] == [
            0, num_shared, num_shared, num_shared,
        ]  # fmt: skip
        assert [one["moonpool"]["cached_tokens_by_source"] for one in told] == [
            {"device": 0, "peer": 0, "store": 0},
            {"device": 0, "peer": num_shared, "store": 0},
            {"device": num_shared, "peer": 0, "store": 0},
            {"device": num_shared, "peer": 0, "store": 0},
        ]


async def test_a_long_prompts_keys_are_computed_off_the_loop() -> None:
    matcher = PrefixMatcher(PrefixIndex(), b"secret")
    matcher.adopt(make_model_namespace(block_size=16))
    feed = IndexFeed(
        IndexFollower(PrefixIndex()),
        matcher,
        ReuseBooks(AskedKeys()),
        bus=MemoryBus(MemoryBroker()),
        subjects=Subjects("test"),
        key="",
        clock=SystemClock(),
        books=RouterBooks(Metrics(ROUTER_METRICS), model="tiny"),
    )
    with ThreadPoolExecutor(1) as threads:
        await feed.prepare(make_request("short", prompt=LONG_PROMPT_TOKENS - 1), threads)
        assert matcher.num_requests == 0
        long = make_request("long", prompt=LONG_PROMPT_TOKENS)
        await feed.prepare(long, threads)
    assert matcher.num_requests == 1
    assert len(matcher.keys(long)) == LONG_PROMPT_TOKENS // 16
