"""`moonpool cache stats`: what travels, what is shown, and that every token is shown once."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.cli.cache import print_stats, stats_json
from moonpool.cli.store_view import reports_json
from moonpool.dispatch.reuse_books import ReuseCounts
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerRole
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.protocol import PutRefusal, StoreStats
from moonpool.wire.cache_stats import (
    CacheStats,
    WorkerCache,
    cache_stats_from_pb,
    cache_stats_to_pb,
)
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.store import DiskReport, StoreReport

COUNTS = ReuseCounts(
    num_requests=3,
    num_prompt_tokens=2_000,
    num_device_tokens=500,
    num_peer_tokens=60,
    num_store_tokens=40,
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
    account = [line.split() for line in lines[2:10]]
    assert sum(int(line[-2].replace(",", "")) for line in account) == 2_000
    assert [line[-1] for line in account] == [
        "25.0%",
        "3.0%",
        "2.0%",
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


REPORT = StoreReport(
    store=WorkerKey(WorkerId("store-0"), Incarnation("1")),
    block_bytes=2**20,
    num_total_blocks=1_024,
    disk=DiskReport(
        capacity_bytes=4 * 2**30, file_bytes=2**30, written_bytes=3 * 2**30, read_bytes=2**20
    ),
    problem="the disk is full",
    stats=StoreStats(
        num_host_blocks=512,
        num_disk_blocks=900,
        num_hit_host_blocks=10,
        num_hit_disk_blocks=3,
        num_gets=7,
        num_missed_gets=2,
        num_puts=4,
        num_put_blocks=40,
        num_refused_puts=((PutRefusal.OVER_QUOTA, 5), (PutRefusal.NO_ROOM, 0)),
        write_budget_bytes=2**30,
        write_budget_max_bytes=3 * 2**30,
        disk_writes=BreakerState.OPEN,
    ),
)
WITH_STORES = replace(
    STATS,
    workers=(
        *STATS.workers,
        WorkerCache(
            worker_id="store-0",
            role=WorkerRole.STORE,
            counts=ReuseCounts(),
            num_published_blocks=1_400,
            num_total_blocks=1_024,
        ),
        WorkerCache(worker_id="store-1", role=WorkerRole.STORE, counts=ReuseCounts()),
    ),
)


def test_stores_are_told_apart() -> None:
    out = io.StringIO()
    reports: dict[str, StoreReport | str] = {"store-0": REPORT, "store-1": "it is away"}
    print_stats(WITH_STORES, Console(file=out, width=80), reports=reports)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    start = lines.index("store-0  store, 1,400 blocks in the router's index")
    assert lines[start - 2].split()[:2] == ["decode-0", "gone"]
    assert lines[start + 1 :] == [
        "  host: 512 of 1,024 blocks (512.0 MiB), 0 pinned, 0 evicted, 0 of those on disk",
        "  disk: 900 blocks (1.0 GiB of 4.0 GiB), 0 to be written, 0 reclaimed, 0 bad",
        "  written: 3.0 GiB, 0 blocks not admitted, budget 1.0 GiB left of 3.0 GiB",
        "  left alone since it fails: writes of the disk",
        "  lent: 160 tokens from host, 48 from disk; 7 gets, 2 found nothing, 0 got less than is there",
        "  taken: 40 blocks in 4 puts; 0 brought nothing new, 0 expired, refused: 5 over_quota",
        "  problem: the disk is full",
        "",
        "store-1  store, 0 blocks in the router's index",
        "  no report: it is away",
    ]
    told = json.loads(json.dumps(reports_json(reports)))
    assert told["store-0"]["num_refused_puts"] == {"over_quota": 5, "no_room": 0}
    assert told["store-0"]["disk"]["file_bytes"] == 2**30
    assert told["store-0"]["disk_writes"] == "open"
    assert told["store-1"] == {"no_report_because": "it is away"}


def test_programs_get_all_of_it() -> None:
    told = json.loads(json.dumps(stats_json(STATS)))
    total = told["total"]
    assert total["hit_tokens_by_source"] == {"device": 500, "peer": 60, "store": 40}
    assert total["hit_ratio"] == 0.3
    assert total["ceiling_hit_ratio"] == 0.5
    assert total["recomputed_held_tokens_by_reason"] == {"routed_away": 160, "too_slow": 40}
    assert told["workers"][1]["hit_ratio"] is None
    assert not told["workers"][1]["is_live"]
