"""Replays of traces: what is counted, on traces small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.core.config import CoreConfig
from moonpool.errors import InvalidRequestError
from moonpool.kv.eviction import EvictionName, LruEviction
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.tiering.config import StoreConfig
from moonpool_loadtest.replay.__main__ import main
from moonpool_loadtest.replay.cluster import ReplayCluster
from moonpool_loadtest.replay.one_pool import make_evictions, replay, replay_belady
from moonpool_loadtest.replay.pace import Pace, Tally
from moonpool_loadtest.replay.trace import TraceRequest, ideal_hits, read_trace
from moonpool_loadtest.replay.virtual_time import NEVER_S, Alarm, VirtualTime


def requests(*chains: tuple[int, ...], every_s: float = 10.0) -> list[TraceRequest]:
    return [
        TraceRequest(arrived_s=every_s * number, block_ids=chain, num_output_tokens=2)
        for number, chain in enumerate(chains)
    ]


def test_ideal_counts_whatever_was_asked_before() -> None:
    assert ideal_hits(requests((1, 2), (1, 3), (1, 2, 4))) == 3


def test_one_pool_forgets_the_least_recent_tail() -> None:
    trace = requests((1, 2), (1, 3), (5,), (1, 2))
    # Three blocks: 5 pushes out 2, the least recent one; with a fourth nothing is lost.
    assert replay(trace, 3, LruEviction()) == 2
    assert replay(trace, 4, LruEviction()) == 3


def test_belady_keeps_what_comes_again() -> None:
    trace = requests((1, 2), (1, 3), (5,), (1, 2))
    assert replay_belady(trace, 3) == 3
    assert replay_belady(trace, 1) == 2


def test_no_policy_beats_belady() -> None:
    chains = [(1, *range(10 + 3 * (n * 7 % 11), 13 + 3 * (n * 7 % 11))) for n in range(60)]
    trace = requests(*chains)
    best = replay_belady(trace, 12)
    for name, eviction in make_evictions(12).items():
        assert replay(trace, 12, eviction) <= best, name


def run(
    trace: list[TraceRequest], *, num_workers: int, policy: PolicyName, reads_from_peers: bool
) -> Tally:
    return ReplayCluster(
        num_workers=num_workers,
        core=CoreConfig(num_blocks=32, max_num_batched_tokens=64, is_checked=True),
        routing=RoutingConfig(policy=policy, reads_from_peers=reads_from_peers),
        pace=Pace(),
    ).run(trace, on_progress=lambda _: None)


def test_one_worker_finds_what_one_pool_finds() -> None:
    trace = requests((1, 2), (1, 3), (5,), (1, 2, 4), (1, 2, 4))
    tally = run(trace, num_workers=1, policy=PolicyName.MIN_TTFT, reads_from_peers=False)
    assert (tally.num_requests, tally.num_failed, tally.num_blocks) == (5, 0, 11)
    assert (tally.num_device_hits, tally.num_peer_hits) == (ideal_hits(trace), 0)
    assert len(tally.ttft_s) == 5


def test_round_robin_finds_on_peers_what_is_not_here() -> None:
    trace = requests((1, 2, 3, 4), (1, 2, 3, 4, 5))
    private = run(trace, num_workers=2, policy=PolicyName.ROUND_ROBIN, reads_from_peers=False)
    shared = run(trace, num_workers=2, policy=PolicyName.ROUND_ROBIN, reads_from_peers=True)
    assert (private.num_device_hits, private.num_peer_hits) == (0, 0)
    assert (shared.num_device_hits, shared.num_peer_hits) == (0, 4)


def test_placement_goes_where_the_prefix_lies() -> None:
    trace = requests((1, 2, 3, 4), (1, 2, 3, 4, 5))
    tally = run(trace, num_workers=2, policy=PolicyName.MIN_TTFT, reads_from_peers=False)
    assert tally.num_device_hits == 4


def run_with_stores(
    trace: list[TraceRequest], *, num_workers: int = 1, num_stores: int, store_blocks: int = 64
) -> Tally:
    cluster = ReplayCluster(
        num_workers=num_workers,
        core=CoreConfig(num_blocks=8, max_num_batched_tokens=64, is_checked=True),
        routing=RoutingConfig(policy=PolicyName.MIN_TTFT),
        pace=Pace(),
        stores=[
            StoreConfig(
                num_blocks=store_blocks,
                block_bytes=1,
                eviction=EvictionName.LRU,
                high_water=1.0,
                is_checked=True,
            )
        ]
        * num_stores,
    )
    tally = cluster.run(trace, on_progress=lambda _: None)
    cluster.validate()
    return tally


@pytest.mark.parametrize("num_stores", [1, 2])
def test_stores_keep_what_small_pools_push_out(num_stores: int) -> None:
    chains = [tuple(range(10 * n, 10 * n + 4)) for n in range(1, 5)]
    trace = requests(*chains, *chains)
    without = run_with_stores(trace, num_stores=0)
    assert without.hit_ratio == 0.0
    tally = run_with_stores(trace, num_stores=num_stores)
    assert (tally.num_failed, tally.num_refused_puts) == (0, 0)
    assert tally.num_store_hits == ideal_hits(trace) == 16
    assert tally.num_put_blocks >= 16
    # What is not computed was found, the token behind each prompt's last block apart.
    assert tally.num_computed_tokens == 4 * 65 + 4


def test_a_store_serves_all_workers() -> None:
    chains = [tuple(range(10 * n, 10 * n + 4)) for n in range(1, 9)]
    trace = requests(*chains, *chains, every_s=1.0)
    tally = run_with_stores(trace, num_workers=3, num_stores=1)
    assert tally.num_failed == 0
    hits = tally.num_device_hits + tally.num_peer_hits + tally.num_store_hits
    assert hits == ideal_hits(trace)
    assert tally.num_store_hits > 0


def test_a_small_store_forgets() -> None:
    chains = [tuple(range(10 * n, 10 * n + 4)) for n in range(1, 9)]
    trace = requests(*chains, *chains)
    tally = run_with_stores(trace, num_stores=1, store_blocks=10)
    assert tally.num_store_hits < ideal_hits(trace) / 2


def test_virtual_time_runs_in_order_and_an_alarm_rings_once() -> None:
    time = VirtualTime()
    seen: list[tuple[str, float]] = []
    alarm = Alarm(time, lambda: seen.append(("alarm", time.now)))
    time.at(2.0, lambda: seen.append(("b", time.now)))
    time.at(1.0, lambda: seen.append(("a", time.now)))
    time.at(NEVER_S, lambda: seen.append(("never", time.now)))
    alarm.set(3.0)
    alarm.set(1.5)
    alarm.set(None)
    alarm.set(2.5)
    time.run()
    assert seen == [("a", 1.0), ("alarm", 1.5), ("b", 2.0)]
    alarm.set(0.0)
    time.run()
    assert seen[-1] == ("alarm", 3.0)


def write_trace(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    row = {"timestamp": 3000, "input_length": 700, "output_length": 320, "hash_ids": [7, 8]}
    path = write_trace(tmp_path / "t.jsonl", [row])
    assert read_trace(path) == [TraceRequest(arrived_s=3.0, block_ids=(7, 8), num_output_tokens=10)]
    (late,) = read_trace(path, jitter_s=3.0)
    assert 3.0 <= late.arrived_s < 6.0


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "t.jsonl", [{"timestamp": 1}])
    with pytest.raises(InvalidRequestError, match=r"line 1: not a row"):
        read_trace(path)
    assert main([str(path)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_the_command_tells_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 32, "hash_ids": [0, n % 3]}
        for n in range(6)
    ]
    path = write_trace(tmp_path / "t.jsonl", rows)
    arguments = [str(path), "--workers", "2", "--worker-tokens", "20000"]
    assert main([*arguments, "--policies", "min_ttft", "round_robin"]) == 0
    table = capsys.readouterr().out
    for arm in ("ideal", "min_ttft ", "min_ttft + reads", "round_robin + reads"):
        assert any(line.startswith(arm) for line in table.splitlines()), arm
    assert main([*arguments, "--what", "evictions", "--pool-tokens", "2048"]) == 0
    assert "belady" in capsys.readouterr().out
    assert main([*arguments, "--what", "stores", "--total-tokens", "30000"]) == 0
    table = capsys.readouterr().out
    for arm in ("ideal", "stores, lru ", "stores, s3_fifo", "the best"):
        assert any(line.startswith(arm) for line in table.splitlines()), arm
    assert main([*arguments, "--what", "stores", "--total-tokens", "2048"]) == 1
    assert "--total-tokens must be more" in capsys.readouterr().err
