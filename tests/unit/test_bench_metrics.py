"""Numbers of a benchmark, by hand-made records with known answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from moonpool.cli.main import run
from moonpool.inference.generation import Usage
from moonpool_loadtest.bench.__main__ import _without_secrets, main
from moonpool_loadtest.bench.arrivals import ArrivalProcess
from moonpool_loadtest.bench.benchmark import BenchConfig, BenchResult
from moonpool_loadtest.bench.metrics import (
    Distribution,
    Slo,
    caveats,
    client_gates,
    compute_metrics,
)
from moonpool_loadtest.bench.records import Outcome, RequestRecord, ServerTold
from moonpool_loadtest.bench.report import to_document, to_table
from moonpool_loadtest.bench.runner import Run


def record(
    index: int, scheduled_s: float, times_s: tuple[float, ...], **fields: Any
) -> RequestRecord:
    """An answer whose usage is what was seen, sent 1 ms late."""
    told = ServerTold(
        usage=Usage(num_prompt_tokens=10, num_completion_tokens=len(times_s), num_cached_tokens=4),
        ttft_ms=50.0,
    )
    return RequestRecord(
        **{
            "index": index,
            "scheduled_s": scheduled_s,
            "sent_s": scheduled_s + 0.001,
            "ended_s": times_s[-1] if times_s else scheduled_s + 0.01,
            "outcome": Outcome.OK,
            "token_times_s": times_s,
            "told": told,
            **fields,
        }
    )


#: One even answer, one with a stall, one of a single token, one refused, one that broke off.
RECORDS = (
    record(0, 0.0, (0.1, 0.2, 0.3)),
    record(1, 1.0, (1.3, 1.4, 1.9)),
    record(2, 2.0, (2.2,)),
    record(3, 3.0, (), outcome=Outcome.REFUSED, error_code="server_overloaded", error="full"),
    record(4, 4.0, (4.1,), outcome=Outcome.FAILED, error_code="worker_lost", error="lost"),
)


def test_latencies_count_from_the_schedule() -> None:
    metrics = compute_metrics(RECORDS, Slo())
    assert metrics.num_arrived == 5
    assert metrics.num_by_outcome == {
        Outcome.OK: 3,
        Outcome.REFUSED: 1,
        Outcome.TIMEOUT: 0,
        Outcome.FAILED: 1,
    }
    assert metrics.num_by_error == {"server_overloaded": 1, "worker_lost": 1}
    assert metrics.wall_s == pytest.approx(4.1)
    assert metrics.offered_rps == pytest.approx(1.0)
    assert metrics.completed_rps == pytest.approx(3 / 4.1)
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (30, 12)
    assert metrics.num_output_tokens == 7
    ttft = metrics.ttft_ms
    assert ttft is not None
    # 100, 300 and 200 ms: from the schedule, not from the sending 1 ms later.
    assert (ttft.count, ttft.mean, ttft.p50, ttft.max) == pytest.approx((3, 200, 200, 300))
    assert ttft.p90 == pytest.approx(280)
    itl = metrics.itl_ms
    assert itl is not None
    assert (itl.count, itl.mean, itl.max) == pytest.approx((4, 200, 500))
    assert itl.p50 == pytest.approx(100)
    tpot = metrics.tpot_ms
    assert tpot is not None
    assert (tpot.count, tpot.mean, tpot.max) == pytest.approx((2, 200, 300))
    max_gap = metrics.max_gap_ms
    assert max_gap is not None
    assert (max_gap.count, max_gap.mean) == pytest.approx((2, 300))
    e2e = metrics.e2e_ms
    assert e2e is not None
    assert (e2e.mean, e2e.max) == pytest.approx(((300 + 900 + 200) / 3, 900))
    ntpot = metrics.ntpot_ms
    assert ntpot is not None
    assert ntpot.max == pytest.approx(300)
    assert metrics.send_lag_ms is not None
    assert metrics.send_lag_ms.max == pytest.approx(1.0)
    assert metrics.server_ttft_ms is not None
    assert metrics.server_ttft_ms.mean == pytest.approx(50.0)


def test_goodput_is_out_of_all_that_arrived_and_sees_the_stall_that_a_mean_hides() -> None:
    metrics = compute_metrics(RECORDS, Slo(ttft_ms=350, gap_ms=150, tpot_ms=350))
    assert metrics.goodput_gap is not None
    # The single token has no gap; the stalled answer fails by its gap though not by its mean.
    assert (metrics.goodput_gap.num_good, metrics.goodput_gap.share) == (2, 0.4)
    assert metrics.goodput_gap.rps == pytest.approx(0.4)
    assert metrics.goodput_tpot is not None
    assert metrics.goodput_tpot.num_good == 3
    assert metrics.goodput_ttft is not None
    assert metrics.goodput_ttft.num_good == 3
    tight = compute_metrics(RECORDS, Slo(ttft_ms=250, gap_ms=150))
    assert tight.goodput_gap is not None
    assert tight.goodput_gap.num_good == 2
    assert tight.goodput_tpot is None


def test_tokens_are_counted_by_usage_where_messages_bundle_them() -> None:
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=9, num_cached_tokens=0)
    bundled = record(0, 0.0, (0.1, 0.5, 0.9), told=ServerTold(usage=usage))
    metrics = compute_metrics([bundled], Slo())
    assert metrics.num_bundled == 1
    assert metrics.num_output_tokens == 9
    assert metrics.tpot_ms is not None
    assert metrics.tpot_ms.mean == pytest.approx(100)
    assert metrics.offered_rps is None
    assert any("between messages" in caveat for caveat in caveats(metrics, ()))
    silent = record(0, 0.0, (0.1, 0.2), told=ServerTold())
    assert (silent.num_tokens, silent.has_bundled_tokens) == (2, False)


def test_tbt10_is_the_mean_of_the_longest_tenth() -> None:
    gaps = [0.01] * 18 + [0.3, 0.1]
    times = tuple(math.fsum(gaps[:count]) for count in range(len(gaps) + 1))
    metrics = compute_metrics([record(0, 0.0, times)], Slo())
    assert metrics.tbt10_ms is not None
    assert metrics.tbt10_ms.mean == pytest.approx(200)


def test_percentiles_interpolate() -> None:
    distribution = Distribution.of_ms(value / 1_000 for value in range(101))
    assert distribution is not None
    assert (distribution.p50, distribution.p95, distribution.p99) == pytest.approx((50, 95, 99))
    assert Distribution.of_ms([None]) is None


def test_nothing_arrived() -> None:
    metrics = compute_metrics([], Slo(gap_ms=1))
    assert metrics.ttft_ms is None
    assert metrics.goodput_gap is not None
    assert metrics.goodput_gap.share == 0


def result(cpu_s: float) -> BenchResult:
    slo = Slo(ttft_ms=350, gap_ms=150)
    metrics = compute_metrics(RECORDS, slo)
    run = Run(records=RECORDS, wall_s=4.0, cpu_s=cpu_s)
    gates = client_gates(metrics, cpu_share=run.cpu_share)
    return BenchResult(
        config=BenchConfig(
            target="127.0.0.1:1",
            num_requests=5,
            seed=3,
            arrivals=ArrivalProcess(rate_rps=math.inf),
            slo=slo,
        ),
        models=("tiny",),
        started_unix_s=0.0,
        run=run,
        metrics=metrics,
        gates=gates,
        caveats=caveats(metrics, gates),
    )


def test_a_client_that_does_not_keep_up_is_told_of() -> None:
    gates = result(cpu_s=3.0).gates
    assert [(gate.name, gate.value) for gate in gates] == [
        ("send_lag_p99_ms", pytest.approx(1.0)),
        ("client_cpu_share", 0.75),
    ]
    assert not gates[1].is_met
    assert "client_cpu_share 0.75 (limit 0.5, MISSED)" in to_table(result(cpu_s=3.0))
    assert result(cpu_s=1.0).gates[1].is_met


def test_the_document_repeats_the_run() -> None:
    document = json.loads(json.dumps(to_document(result(cpu_s=1.0), command=["bench", "-x"])))
    assert document["schema"] == "moonpool.bench/1"
    assert document["started_at"] == "1970-01-01T00:00:00Z"
    assert document["seed"] == 3
    assert document["config"]["arrivals"] == {
        "kind": "poisson",
        "rate_rps": "inf",
        "burstiness": 1.0,
    }
    assert document["metrics"]["num_by_outcome"]["refused"] == 1
    assert document["metrics"]["goodput_gap"]["num_good"] == 2
    assert document["machine"]["num_cpus"] >= 1
    assert len(document["requests"]) == 5
    assert document["requests"][1]["token_times_s"] == [1.3, 1.4, 1.9]
    assert "requests" not in to_document(result(cpu_s=1.0), command=[], has_records=False)


def test_the_table_has_what_matters() -> None:
    table = to_table(result(cpu_s=1.0))
    assert "requests 5 offered 1/s: 3 ok, 1 refused, 1 failed" in table
    assert "goodput  2 of 5 (40.0%), 0.4/s: TTFT <= 350 ms, every gap <= 150 ms" in table
    assert "error    1 x worker_lost: lost" in table
    assert "40.0% cached" in table


def test_no_key_is_kept() -> None:
    assert _without_secrets(["--api-key", "k", "--seed", "1"]) == [
        "--api-key",
        "***",
        "--seed",
        "1",
    ]
    assert _without_secrets(["--api-key=k"]) == ["--api-key=***"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--request-rate", "0"], "0 is not above 0"),
        (["--input-len", "5:1"], "a length is"),
        (["--address", "a:1", "--base-url", "http://b"], "not allowed with"),
        (["--num-prompts", "-1"], "below 0"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--address", "nonsense"],
        ["--base-url", "ftp://x/v1"],
        ["--address", "a:1", "--num-prefixes", "0"],
        ["--address", "a:1", "--request-rate", "inf", "--duration-s", "1"],
    ],
)
def test_a_wrong_configuration_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("moonpool bench: ")


def test_the_command_hands_its_flags_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--burstiness", "0", "--help"]) == 2
    assert "moonpool bench: error: argument --burstiness" in capfd.readouterr().err
