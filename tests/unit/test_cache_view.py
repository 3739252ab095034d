"""`moonpool cache stats`: what travels, what is shown, and that every token is shown once."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.cli.cache import print_stats, stats_json
from moonpool.dispatch.reuse_books import ReuseCounts
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.cache_stats import (
    CacheStats,
    WorkerCache,
    cache_stats_from_pb,
    cache_stats_to_pb,
)
from moonpool.wire.fields import InvalidMessageError

COUNTS = ReuseCounts(
    num_requests=3,
    num_prompt_tokens=2_000,
    num_device_tokens=500,
    num_peer_tokens=100,
    num_cold_tokens=900,
    num_evicted_tokens=200,
    num_routed_away_tokens=160,
    num_too_slow_tokens=40,
    num_tail_tokens=100,
    num_predicted_tokens=640,
    max_error_tokens=20,
)
STATS = CacheStats(
    router_id="router-0",
    model="tiny",
    block_size=16,
    total=COUNTS,
    workers=(
        WorkerCache(
            worker_id="prefill-0",
            role=WorkerRole.PREFILL,
            counts=COUNTS,
            num_published_blocks=1_234,
            num_total_blocks=4_096,
            kv_eviction_policy="s3_fifo",
        ),
        WorkerCache(worker_id="decode-0", role=None, counts=ReuseCounts()),
    ),
    num_indexed_blocks=1_200,
    num_asked_keys=5_000,
    kept_fraction=0.25,
)


def test_the_counts_travel() -> None:
    message = pb.CacheStatsReply.FromString(cache_stats_to_pb(STATS).SerializeToString())
    assert cache_stats_from_pb(message) == STATS


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="kept_fraction"):
        cache_stats_from_pb(pb.CacheStatsReply())
    message = cache_stats_to_pb(STATS)
    message.workers[0].worker_id = ""
    with pytest.raises(InvalidMessageError, match=r"workers\[0\].worker_id"):
        cache_stats_from_pb(message)


def test_every_token_is_shown_once() -> None:
    out = io.StringIO()
    print_stats(STATS, Console(file=out, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0] == "router-0  model tiny  3 requests, 2,000 prompt tokens"
    account = [line.split() for line in lines[2:9]]
    assert sum(int(line[-2].replace(",", "")) for line in account) == 2_000
    assert [line[-1] for line in account] == [
        "25.0%",
        "5.0%",
        "45.0%",
        "10.0%",
        "8.0%",
        "2.0%",
        "5.0%",
    ]
    assert "recomputed while held: 200 tokens (160 routed away, 40 too slow)" in lines
    assert (
        "hit ratio 30.0%, ceiling 50.0% (a cache that never forgets), estimated within 1.0% from "
        "25.00% of the block keys"
    ) in lines
    assert "…" not in out.getvalue()
    assert "1234/4096" in out.getvalue()
    assert lines[-1].split() == ["decode-0", "gone", "0", *["-"] * 6, "-", "-"]


def test_programs_get_all_of_it() -> None:
    told = json.loads(json.dumps(stats_json(STATS)))
    total = told["total"]
    assert total["hit_tokens_by_source"] == {"device": 500, "peer": 100}
    assert total["hit_ratio"] == 0.3
    assert total["ceiling_hit_ratio"] == 0.5
    assert total["recomputed_held_tokens_by_reason"] == {"routed_away": 160, "too_slow": 40}
    assert told["workers"][1]["hit_ratio"] is None
    assert not told["workers"][1]["is_live"]
