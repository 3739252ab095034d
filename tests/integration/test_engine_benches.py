"""The engine's benchmarks run, on a model of no size, and say what they leave out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_llama import TinyLlama, write_tiny_llama

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny", TinyLlama(is_embedding_tied=True)
    )


def run_bench(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What it prints before its JSON, and that."""
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    text, brace, document = done.stdout.partition("\n{\n")
    return text, json.loads(brace + document)


def test_a_peer_that_is_not_there_is_left_out_and_it_is_said_why(
    model: Path, tmp_path: Path
) -> None:
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho no engine here >&2\nexit 3\n")
    without.chmod(0o755)
    text, found = run_bench(
        "bench_peers.py",
        "--quick",
        *("--model", str(model), "--vllm", "float32", "--llama", "bf16"),
        *("--vllm-python", str(without), "--llama-python", str(without)),
    )
    assert found["skipped"] == {
        "vllm float32": "status 3: no engine here",
        "llama.cpp bf16": "status 3: no engine here",
    }
    assert "vllm float32: left out: status 3: no engine here" in text
    assert set(found["seconds"]) == {"prefill 32", "prefill 64", "decode 1 x 48", "decode 4 x 48"}
    for by_side in found["seconds"].values():
        assert set(by_side) == {"moonpool"}
    assert all(rate > 0 for rate in found["rates"][0].values())
    assert all(ratios["floor"][0] > 0 for ratios in found["ratios"].values())


def test_what_a_step_costs_beside_the_model(model: Path) -> None:
    text, found = run_bench(
        "bench_step.py", "--model", str(model), "--batches", "2", "4", "--steps", "8"
    )
    assert "batch 4: non-model" in text
    for kinds in found["medians_ms"].values():
        for times in kinds.values():
            assert times["steps"] == 6
            assert 0 < times["schedule"] < times["non-model"]
            assert times["sampler"] > 0


def test_a_pool_by_blocks_beside_one_by_layers() -> None:
    text, found = run_bench("bench_layout.py", "--rounds", "1", "--blocks", "1100")
    assert "chain of 512" in text
    cases = [name for name in found if name not in ("load_average", "rounds")]
    assert len(cases) == 8
    assert all(found[name]["blocks"] > 0 < found[name]["ratio"] for name in cases)


def test_where_the_time_of_a_step_goes(model: Path) -> None:
    text, found = run_bench(
        "bench_profile.py",
        # Medians of so many that other work on the machine does not decide them.
        *("--model", str(model), "--rounds", "9"),
        *("--prefills", "40", "--batches", "2", "--context", "48"),
    )
    assert "prefill 40" in text
    assert set(found["figures"]) == {"prefill 40", "decode 2 x 48"}
    for figure in found["figures"].values():
        times = figure["ms"]
        parts = [time for part, time in times.items() if part != "all"]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(times["all"], rel=0.5)
        assert set(figure["floor_ms"]) == {"products", "vocabulary", "attention"}
