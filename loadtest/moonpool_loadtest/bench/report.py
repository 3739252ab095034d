"""A result as a JSON document, and as a table for people."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool import __version__
from moonpool_loadtest.bench.benchmark import BenchResult
from moonpool_loadtest.bench.metrics import Attained, BenchMetrics, Distribution
from moonpool_loadtest.bench.records import Outcome

SCHEMA = "moonpool.bench/1"
_GIT_TIMEOUT_S = 5.0


def to_document(
    result: BenchResult, *, command: Sequence[str], has_records: bool = True
) -> dict[str, Any]:
    """Everything needed to judge the numbers and to repeat them.

    Args:
        command: As it was typed, without secrets.
        has_records: Include every request with the receipt time of every token.
    """
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "moonpool_version": __version__,
        "commit": commit(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.started_unix_s)),
        "command": list(command),
        "machine": machine(),
        "seed": result.config.seed,
        "config": plain(result.config),
        "models": list(result.models),
        "metrics": plain(result.metrics),
        "client": {
            "is_healthy": result.is_client_healthy,
            "cpu_s": result.run.cpu_s,
            "wall_s": result.run.wall_s,
            "gates": [
                {"name": gate.name, "value": gate.value, "limit": gate.limit, "is_met": gate.is_met}
                for gate in result.gates
            ],
        },
        "caveats": list(result.caveats),
    }
    if has_records:
        document["requests"] = [plain(record) for record in result.run.records]
    return document


def plain(value: Any) -> Any:  # Any: what JSON can hold
    """Dataclasses, mappings and tuples as JSON holds them; an infinite number as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def machine() -> dict[str, Any]:
    """What the client ran on; its name is nobody's business."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
    }


def commit() -> dict[str, Any] | None:
    """The checkout that this file belongs to; None if it was installed from a wheel."""
    here = Path(__file__).resolve()
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return {
            "id": _git(here.parent, "rev-parse", "HEAD"),
            "is_clean": not _git(here.parent, "status", "--porcelain"),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def to_table(result: BenchResult) -> str:
    """The summary, ready to print."""
    metrics = result.metrics
    lines = [*_counts(metrics), "", *_latencies(metrics)]
    if result.config.slo.is_set:
        lines += ["", *_goodput(result)]
    gates = ", ".join(
        f"{gate.name} {gate.value:.3g} (limit {gate.limit:g}{'' if gate.is_met else ', MISSED'})"
        for gate in result.gates
    )
    lines += ["", f"client   {gates}"]
    lines += [f"note     {caveat}" for caveat in result.caveats]
    lines += _errors(result)
    return "\n".join(lines)


def _counts(metrics: BenchMetrics) -> list[str]:
    outcomes = ", ".join(
        f"{count} {outcome}"
        for outcome, count in metrics.num_by_outcome.items()
        if count or outcome is Outcome.OK
    )
    offered = "at once" if metrics.offered_rps is None else f"{metrics.offered_rps:.3g}/s"
    cached = (
        f", {metrics.num_cached_tokens / metrics.num_prompt_tokens:.1%} cached"
        if metrics.num_prompt_tokens
        else ""
    )
    return [
        f"requests {metrics.num_arrived} offered {offered}: {outcomes}; "
        f"{metrics.completed_rps:.3g}/s answered in {metrics.wall_s:.1f} s",
        f"tokens   {metrics.num_prompt_tokens} in{cached}; {metrics.num_output_tokens} out, "
        f"{metrics.output_tokens_per_s:.4g}/s",
    ]


def _latencies(metrics: BenchMetrics) -> list[str]:
    header = ("ms", "mean", "p50", "p90", "p95", "p99", "max", "count")
    rows: list[tuple[str, Distribution | None]] = [
        ("TTFT", metrics.ttft_ms),
        ("  in server", metrics.server_ttft_ms),
        ("ITL", metrics.itl_ms),
        ("max gap", metrics.max_gap_ms),
        ("TBT10", metrics.tbt10_ms),
        ("TPOT", metrics.tpot_ms),
        ("E2E", metrics.e2e_ms),
        ("E2E/token", metrics.ntpot_ms),
        ("send lag", metrics.send_lag_ms),
    ]
    lines = [f"{header[0]:<12}" + "".join(f"{name:>10}" for name in header[1:])]
    for name, values in rows:
        if values is None:
            continue
        numbers = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
        lines.append(
            f"{name:<12}"
            + "".join(f"{number:>10.2f}" for number in numbers)
            + f"{values.count:>10}"
        )
    return lines


def _goodput(result: BenchResult) -> list[str]:
    metrics, slo = result.metrics, result.config.slo
    ttft = "" if slo.ttft_ms is None else f"TTFT <= {slo.ttft_ms:g} ms"
    rows: list[tuple[Sequence[str], Attained | None]] = [
        ((ttft, f"every gap <= {slo.gap_ms} ms"), metrics.goodput_gap),
        ((ttft, f"TPOT <= {slo.tpot_ms} ms"), metrics.goodput_tpot),
        ((ttft,), metrics.goodput_ttft),
    ]
    return [
        f"goodput  {attained.num_good} of {metrics.num_arrived} ({attained.share:.1%}), "
        f"{attained.rps:.3g}/s: {', '.join(part for part in conditions if part)}"
        for conditions, attained in rows
        if attained is not None
    ]


def _errors(result: BenchResult) -> list[str]:
    """One line per kind, with the words of its first."""
    first_by_code: dict[str, str] = {}
    for record in result.run.records:
        first_by_code.setdefault(record.error_code, record.error)
    return [
        f"error    {count} x {code}: {first_by_code[code]}"
        for code, count in result.metrics.num_by_error.items()
    ]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
    ).stdout.strip()
