"""Replays of traces: what is counted, on traces small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.core.config import CoreConfig
from moonpool.errors import InvalidRequestError
from moonpool.kv.eviction import LruEviction
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool_loadtest.replay.__main__ import main
from moonpool_loadtest.replay.cluster import Pace, ReplayCluster, Tally
from moonpool_loadtest.replay.one_pool import make_evictions, replay, replay_belady
from moonpool_loadtest.replay.trace import TraceRequest, ideal_hits, read_trace


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
