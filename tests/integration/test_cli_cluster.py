"""The command line with real processes: a cluster from `up` to Ctrl-C, and the demo."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli.failure import EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED, EXIT_UNAVAILABLE
from moonpool.cluster.run_file import running_clusters
from support.cli import COMMAND, Ran, cli, environment, run_cli
from support.processes import wait_for_exit
from support.tiny_llama import TinyLlama, write_tiny_llama

_START_S = 60.0
_STOP_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for the demo's text, which is many tokens to a byte-level tokenizer."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", TinyLlama(max_positions=16_384)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A running `moonpool up --json`."""

    process: subprocess.Popen[str]
    data_dir: Path
    model: Path

    def events_until(self, name: str) -> list[dict[str, Any]]:
        """Read events up to the one called `name`; stdout's end before it is a failure."""
        events: list[dict[str, Any]] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == name:
                return events
        raise AssertionError(f"ended without {name}: {events}")

    def cli(self, command: str, *arguments: str) -> Ran:
        return cli(command, *arguments, "--data-dir", str(self.data_dir))


@contextmanager
def up(model: Path, data_dir: Path, *more: str) -> Iterator[Up]:
    process = subprocess.Popen(
        [
            *COMMAND,
            *("up", "--json", "--model", str(model), "--dtype", "float32"),
            *("--port", "0", "--grpc-port", "0", "--kv-cache-memory-bytes", "16MiB"),
            *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(data_dir),
    )
    with process:
        try:
            yield Up(process=process, data_dir=data_dir, model=model)
        finally:
            process.kill()


def descendants(pid: int) -> set[int]:
    """Living processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_a_cluster_from_start_to_ctrl_c(model: Path, tmp_path: Path) -> None:
    stores = ("--stores", "1", "--host-size", "16MiB", "--ssd", str(tmp_path / "absent"))
    with up(model, tmp_path, *stores) as cluster:
        events = cluster.events_until("ready")
        parts = {event["part"] for event in events if event["event"] == "part"}
        assert parts == {"nats", "router", "prefill-0", "decode-0", "store-0"}
        (warning,) = (event["warning"] for event in events if "warning" in event)
        assert str(tmp_path / "absent") in warning
        ready = events[-1]
        assert ready["model"] == "tiny"
        assert [run.model for run in running_clusters(tmp_path)] == ["tiny"]

        status = cluster.cli("status", "--json")
        assert (status.code, status.json["is_ready"]) == (EXIT_OK, True)
        assert {worker["worker_id"] for worker in status.json["workers"]} == {
            "prefill-0",
            "decode-0",
            "store-0",
        }
        assert all(worker["ledger"]["is_quiet"] for worker in status.json["workers"])
        assert "ready" in cluster.cli("status").out

        answer = cluster.cli("chat", "tell " * 300, "--json", "--max-tokens", "4")
        assert answer.code == EXIT_OK
        assert answer.json["prefill_worker"] == "prefill-0"
        assert answer.json["usage"]["completion_tokens"] <= 4
        plain = cluster.cli("chat", "hello", "--max-tokens", "3", "--seed", "1")
        assert plain.code == EXIT_OK
        assert plain.out.endswith("\n")

        request_id = answer.json["request_id"]
        trace = cluster.cli("trace", request_id)
        assert trace.code == EXIT_OK
        assert request_id in trace.out
        for name in ("tokenize", "attempt", "prefill", "kv.transfer", "decode"):
            assert f" {name} " in trace.out
        spans = cluster.cli("trace", request_id, "--json").json["spans"]
        assert {span["trace_id"] for span in spans} == {spans[0]["trace_id"]}
        assert cluster.cli("trace", "nobody").code == EXIT_REFUSED
        refused = cluster.cli("chat", "x", "--temperature", "9")
        assert (refused.code, "temperature" in refused.err) == (EXIT_REFUSED, True)

        port = ready["grpc_address"].rpartition(":")[2]
        second = cluster.cli("up", "--model", str(model), "--port", "0", "--grpc-port", port)
        assert second.code == EXIT_UNAVAILABLE
        assert f"pid {cluster.process.pid}" in second.err

        below = descendants(cluster.process.pid)
        assert len(below) >= 7
        cluster.process.send_signal(signal.SIGINT)
        last = cluster.events_until("stopped")
        assert last[0]["event"] == "draining"
        ended = [event["part"] for event in last if event.get("state") == "stopped"]
        assert (ended[0], set(ended[1:3]), ended[3:]) == (
            "router",
            {"prefill-0", "decode-0"},
            ["store-0"],
        )
        assert cluster.process.wait(_STOP_S) == EXIT_OK
        assert all(wait_for_exit(pid, timeout_s=1) for pid in below)
        assert running_clusters(tmp_path) == ()
        assert cluster.cli("status").code == EXIT_UNAVAILABLE


def test_ctrl_c_while_it_starts_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with up(model, tmp_path) as cluster:
        cluster.events_until("part")
        below = descendants(cluster.process.pid)
        cluster.process.send_signal(signal.SIGINT)
        cluster.process.send_signal(signal.SIGINT)
        cluster.events_until("stopped")
        assert cluster.process.wait(_STOP_S) == EXIT_INTERRUPTED
        assert all(wait_for_exit(pid, timeout_s=1) for pid in below)


def test_the_demo_shows_what_happened_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    ran = run_cli(
        *("demo", "--model", str(model), "--dtype", "float32", "--max-tokens", "12"),
        data_dir=tmp_path,
        timeout_s=_START_S,
    )
    assert ran.code == EXIT_OK, ran.err
    assert "\x1b" not in ran.out
    for text in (
        "prefilled on    prefill-0, in ",
        "because         above_threshold: ",
        "over shm in ",
        " before",
        "Time to the first token",
        "between tokens  p50 ",
        "nothing is left running",
    ):
        assert text in ran.out, ran.out


def test_a_worker_that_cannot_start_is_one_line(model: Path, tmp_path: Path) -> None:
    ran = run_cli(
        *("up", "--model", str(model), "--port", "0", "--grpc-port", "0"),
        *("--prefill", "0", "--max-model-len", "1000000"),
        data_dir=tmp_path,
        timeout_s=_START_S,
    )
    assert ran.code == EXIT_UNAVAILABLE
    assert len(ran.err.splitlines()) == 1, ran.err
    assert ran.err.startswith("moonpool: decode-0 is failed: ")
    assert "max_model_len = 1000000: the model's limit is 16384 (logs: " in ran.err
