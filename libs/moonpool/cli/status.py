"""`moonpool status`: what a router says of itself and its workers, and what each worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.cli.failure import EXIT_OK, EXIT_UNAVAILABLE
from moonpool.cli.target import Target
from moonpool.cli.terminal import make_console, print_json
from moonpool.errors import MoonpoolError
from moonpool.rpc.admin import fetch_ledger, fetch_status
from moonpool.wire.admin import RouterSnapshot, WorkerSnapshot
from moonpool.wire.worker import LedgerReport

_DEADLINE_S = 5.0
#: Short, so that a table of five-digit counts fits a terminal of 80 columns.
_COUNTS = (
    "run",
    "wait",
    "resv",
    "prefill",
    "tokens",
    "held",
    "cached",
    "blocks",
)
#: Of the table where nobody looks through a window.
_FILE_WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The router's view, and the workers' own books where they could be asked."""

    address: str
    router: RouterSnapshot
    #: By worker id; a text says why there is none.
    ledgers: Mapping[str, LedgerReport | str]


def run_status(target: Target, *, is_json: bool) -> int:
    """Print it. The exit code says whether requests can be served.

    Raises:
        UnavailableError: The router does not answer.
    """
    status = asyncio.run(fetch_cluster_status(target))
    if is_json:
        print_json(status_json(status))
    else:
        print_status(status, make_console())
    return EXIT_OK if status.router.is_ready else EXIT_UNAVAILABLE


async def fetch_cluster_status(target: Target) -> ClusterStatus:
    """Ask the router, then every live worker at once."""
    router = await fetch_status(target.address, key=target.api_key, deadline_s=_DEADLINE_S)
    live = [worker for worker in router.workers if worker.is_live]
    key = target.rpc_key
    async with asyncio.TaskGroup() as asking:
        tasks = {
            worker.worker_id: asking.create_task(_ledger(worker.address, key)) for worker in live
        }
    return ClusterStatus(
        address=target.address,
        router=router,
        ledgers={worker_id: task.result() for worker_id, task in tasks.items()},
    )


async def _ledger(address: str, key: str | None) -> LedgerReport | str:
    if key is None:
        return "the cluster's secret is not on this machine"
    try:
        return await fetch_ledger(address, key=key, deadline_s=_DEADLINE_S)
    except MoonpoolError as error:
        return error.message


def print_status(status: ClusterStatus, console: Console) -> None:
    """A line for the router, a table of workers, and what needs explaining."""
    router = status.router
    state = (
        "[green]ready[/]" if router.is_ready else f"[red]not ready[/]: {router.not_ready_because}"
    )
    bus = "connected" if router.is_bus_connected else "[red]not connected[/]"
    console.print(f"[bold]{router.router_id}[/] at {status.address}  {state}", soft_wrap=True)
    console.print(
        f"model {router.model}, bus {bus}, {router.num_running} running, {router.num_queued} "
        "queued",
        soft_wrap=True,
    )
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("worker")
    table.add_column("role")
    table.add_column("state")
    for column in _COUNTS:
        table.add_column(column, justify="right")
    table.add_column("books")
    for worker in router.workers:
        table.add_row(*_cells(worker, status.ledgers.get(worker.worker_id)))
    if router.workers:
        console.print(table, width=None if console.is_terminal else _FILE_WIDTH)
    else:
        console.print("no worker has introduced itself yet")
    for worker in router.workers:
        if worker.because:
            name = worker.worker_id or worker.address
            console.print(f"{name}: {worker.because}", soft_wrap=True, markup=False)


def status_json(status: ClusterStatus) -> dict[str, Any]:
    """For programs; a ledger is null where it could not be had."""
    router = status.router
    return {
        "router_id": router.router_id,
        "grpc_address": status.address,
        "model": router.model,
        "is_ready": router.is_ready,
        "not_ready_because": router.not_ready_because,
        "is_bus_connected": router.is_bus_connected,
        "num_running": router.num_running,
        "num_queued": router.num_queued,
        "workers": [
            _worker_json(worker, status.ledgers.get(worker.worker_id)) for worker in router.workers
        ],
    }


def _cells(worker: WorkerSnapshot, ledger: LedgerReport | str | None) -> list[Text]:
    style = {"up": "green", "connecting": "yellow"}.get(worker.state, "red")
    cells = [
        Text(worker.worker_id or worker.address),
        Text(worker.role.value if worker.role is not None else "?"),
        Text(worker.state, style=style),
    ]
    if worker.load is None:
        return [*cells, *([Text("-")] * len(_COUNTS)), Text(_books(ledger))]
    books = worker.load.ledger
    return [
        *cells,
        Text(str(books.num_running)),
        Text(str(books.num_waiting)),
        Text(str(books.num_reserved)),
        Text(str(books.num_prefills)),
        Text(str(worker.load.num_queued_tokens)),
        Text(str(books.num_referenced)),
        Text(str(books.num_cached)),
        Text(str(books.num_total)),
        Text(_books(ledger) + (", draining" if worker.load.is_draining else "")),
    ]


def _books(ledger: LedgerReport | str | None) -> str:
    """Whether anything is held for a request."""
    if not isinstance(ledger, LedgerReport):
        return "not asked" if ledger is None else "no answer"
    if ledger.is_quiet:
        return "quiet"
    counts = {
        "handoffs": ledger.num_handoffs,
        "streams": ledger.num_open_streams,
        "reads": ledger.num_reads,
    }
    held = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join(["busy", *held])


def _worker_json(worker: WorkerSnapshot, ledger: LedgerReport | str | None) -> dict[str, Any]:
    load = worker.load
    return {
        "worker_id": worker.worker_id,
        "incarnation": worker.key.incarnation if worker.key is not None else "",
        "role": worker.role.value if worker.role is not None else "",
        "grpc_address": worker.address,
        "state": worker.state,
        "because": worker.because,
        "load": None
        if load is None
        else {
            **asdict(load.ledger),
            "num_queued_tokens": load.num_queued_tokens,
            "step_age_ms": load.step_age_ms,
            "is_draining": load.is_draining,
        },
        "ledger": None
        if not isinstance(ledger, LedgerReport)
        else {
            **asdict(ledger.ledger),
            "num_handoffs": ledger.num_handoffs,
            "num_open_streams": ledger.num_open_streams,
            "num_reads": ledger.num_reads,
            "num_router_sessions": ledger.num_router_sessions,
            "is_quiet": ledger.is_quiet,
        },
        "no_ledger_because": ledger if isinstance(ledger, str) else "",
    }
