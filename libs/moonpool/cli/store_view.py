"""What store nodes say of their tiers, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moonpool.cli.terminal import format_bytes
from moonpool.tiering.breaker import BreakerState
from moonpool.tiering.protocol import StoreStats
from moonpool.wire.store import DiskReport, StoreReport


def store_lines(report: StoreReport, *, block_size: int) -> list[str]:
    """A few lines about one node.

    Args:
        block_size: Tokens of a block.
    """
    stats = report.stats
    lines = [
        f"host: {stats.num_host_blocks:,} of {report.num_total_blocks:,} blocks "
        f"({_bytes(stats.num_host_blocks, report)}), {stats.num_pinned_blocks:,} pinned, "
        f"{stats.num_evicted_blocks:,} evicted, {stats.num_demoted_blocks:,} of those on disk",
    ]
    if report.disk is not None:
        lines += _disk_lines(stats, report.disk)
    lines += [
        f"lent: {stats.num_hit_host_blocks * block_size:,} tokens from host, "
        f"{stats.num_hit_disk_blocks * block_size:,} from disk; {stats.num_gets:,} gets, "
        f"{stats.num_missed_gets:,} found nothing, {stats.num_short_gets:,} got less than is there",
        f"taken: {stats.num_put_blocks:,} blocks in {stats.num_puts:,} puts; "
        f"{stats.num_known_puts:,} brought nothing new, {stats.num_expired_puts:,} expired, "
        f"refused: {_refused(stats)}",
    ]
    if report.problem:
        lines.append(f"problem: {report.problem}")
    return lines


def store_json(report: StoreReport) -> dict[str, Any]:  # Any: JSON
    """All of it; `disk` is null for memory alone."""
    stats = asdict(report.stats)
    stats["num_refused_puts"] = dict(stats["num_refused_puts"])
    return {
        "block_bytes": report.block_bytes,
        "num_total_blocks": report.num_total_blocks,
        "problem": report.problem,
        "disk": asdict(report.disk) if report.disk is not None else None,
        **stats,
    }


def reports_json(reports: Mapping[str, StoreReport | str]) -> dict[str, Any]:  # Any: JSON
    """By node; with `no_report_because` where there is none."""
    return {
        store_id: {"no_report_because": report} if isinstance(report, str) else store_json(report)
        for store_id, report in sorted(reports.items())
    }


# -- parts --


def _disk_lines(stats: StoreStats, disk: DiskReport) -> list[str]:
    used = f"{format_bytes(disk.file_bytes)} of {format_bytes(disk.capacity_bytes)}"
    lines = [
        f"disk: {stats.num_disk_blocks:,} blocks ({used}), {stats.num_unwritten_blocks:,} to be "
        f"written, {stats.num_reclaimed_blocks:,} reclaimed, {stats.num_bad_blocks:,} bad",
        f"written: {format_bytes(disk.written_bytes)}, {stats.num_unadmitted_blocks:,} blocks not "
        f"admitted, budget {_budget(stats)}",
    ]
    left_alone = [
        words
        for words, state in (("reads", stats.disk_reads), ("writes", stats.disk_writes))
        if state is not BreakerState.CLOSED
    ]
    if left_alone:
        lines.append(f"left alone since it fails: {' and '.join(left_alone)} of the disk")
    return lines


def _budget(stats: StoreStats) -> str:
    if stats.write_budget_bytes is None or stats.write_budget_max_bytes is None:
        return "without a limit"
    left = format_bytes(max(stats.write_budget_bytes, 0))
    return f"{left} left of {format_bytes(stats.write_budget_max_bytes)}"


def _refused(stats: StoreStats) -> str:
    refused = [f"{number:,} {reason.value}" for reason, number in stats.num_refused_puts if number]
    return ", ".join(refused) or "none"


def _bytes(num_blocks: int, report: StoreReport) -> str:
    return format_bytes(num_blocks * report.block_bytes)
