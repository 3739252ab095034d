"""`moonpool explain`: why a request went where, every term of every candidate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from moonpool.cli.failure import EXIT_OK
from moonpool.cli.target import Target
from moonpool.cli.terminal import format_ms, make_console, print_json
from moonpool.dispatch.effects import Placement
from moonpool.routing.disagg_decider import DisaggDecision
from moonpool.routing.selection import Candidate, Selection
from moonpool.routing.selector import PeerMatch, PrefillPlan
from moonpool.rpc.explanation import fetch_explanation

_DEADLINE_S = 5.0
#: Candidates of a table: those fit a terminal.
_MAX_COLUMNS = 5

Format = Callable[[float], str]


def run_explain(request_id: str, target: Target, *, is_json: bool) -> int:
    """Print the request's placements, the oldest first.

    Raises:
        NotFoundError: The router does not know the request, or no longer.
        UnavailableError: It does not answer.
    """
    placements = asyncio.run(
        fetch_explanation(target.address, request_id, key=target.api_key, deadline_s=_DEADLINE_S)
    )
    if is_json:
        print_json(
            {
                "request_id": request_id,
                "placements": [placement_json(placement) for placement in placements],
            }
        )
        return EXIT_OK
    console = make_console()
    for placement in placements:
        print_placement(placement, console)
    return EXIT_OK


def print_placement(placement: Placement, console: Console) -> None:
    """What was decided in words, then a table of candidates for each leg."""
    record = placement.record
    unit = "" if record.is_measured else ", not measured yet: uncached tokens are the unit"
    console.print(
        f"request {placement.request_id}  attempt {placement.attempt}  "
        f"{-placement.placed_at:,.1f} s ago  policy {record.policy}{unit}",
        soft_wrap=True,
        markup=False,
    )
    if placement.previous_outcome:
        console.print(f"after: {placement.previous_outcome}", soft_wrap=True, markup=False)
    console.print(disagg_words(placement.decision), soft_wrap=True, markup=False)
    console.print(plan_words(placement.plan), soft_wrap=True, markup=False)
    console.print()
    _print_leg("decode", placement.decode, console)
    if placement.prefill is not None:
        _print_leg("prefill", placement.prefill, console)


def disagg_words(decision: DisaggDecision) -> str:
    """Local or remote prefill, and both sides of it."""
    where = "on a prefill worker" if decision.is_remote else "on the decode worker"
    words = (
        f"prefill {where}: {decision.reason}; {decision.num_uncached_tokens} uncached tokens there, "
        f"threshold {decision.threshold_tokens}, {decision.num_prefill_workers} prefill workers"
    )
    prediction = decision.prediction
    if prediction is not None:
        words += f"; here {_time(prediction.local_s)}, elsewhere {_time(prediction.remote_s)}"
    return words


def plan_words(plan: PrefillPlan) -> str:
    """What the worker that prefills is expected to do."""
    parts = [f"{plan.num_cached_tokens} tokens cached there"]
    if plan.num_read_tokens and plan.peer is not None:
        parts.append(f"{plan.num_read_tokens} read from {_peer_words(plan.peer)}")
    elif plan.peer is not None:
        parts.append(f"{_peer_words(plan.peer)} holds {plan.peer.num_tokens}, not worth reading")
    parts.append(f"{plan.num_computed_tokens} to compute")
    times = (
        f"queue {_time(plan.queue_s)}, load {_time(plan.load_s)}, compute {_time(plan.compute_s)}"
    )
    if plan.exposed_s:
        times += f", handoff {_time(plan.exposed_s)}"
    return (
        f"{plan.kind} on {plan.key.worker_id}: {', '.join(parts)}; {times}: "
        f"first token in {_time(plan.ttft_s)}"
    )


def placement_json(placement: Placement) -> dict[str, Any]:  # Any: JSON
    """All of it, for programs; what is not possible is null."""
    record, decision, plan = placement.record, placement.decision, placement.plan
    prediction = decision.prediction
    return {
        "attempt": placement.attempt,
        "age_s": -placement.placed_at,
        "policy": record.policy.value,
        "is_measured": record.is_measured,
        "num_tokens": record.num_tokens,
        "previous_outcome": placement.previous_outcome,
        "disagg": {
            "is_remote": decision.is_remote,
            "reason": decision.reason.value,
            "num_uncached_tokens": decision.num_uncached_tokens,
            "num_cached_tokens": decision.num_cached_tokens,
            "threshold_tokens": decision.threshold_tokens,
            "num_prefill_workers": decision.num_prefill_workers,
            "least_queued_tokens": decision.least_queued_tokens,
            "local_s": _number(prediction.local_s) if prediction is not None else None,
            "remote_s": _number(prediction.remote_s) if prediction is not None else None,
        },
        "plan": {
            "worker": str(plan.key),
            "kind": plan.kind.value,
            "num_cached_tokens": plan.num_cached_tokens,
            "num_read_tokens": plan.num_read_tokens,
            "num_computed_tokens": plan.num_computed_tokens,
            "peer": str(plan.peer.key) if plan.peer is not None else None,
            "num_peer_tokens": plan.peer.num_tokens if plan.peer is not None else 0,
            "is_peer_store": plan.peer is not None and plan.peer.is_store,
            "queue_s": plan.queue_s,
            "load_s": plan.load_s,
            "compute_s": plan.compute_s,
            "exposed_s": plan.exposed_s,
            "ttft_s": plan.ttft_s,
        },
        "decode": _leg_json(placement.decode),
        "prefill": _leg_json(placement.prefill) if placement.prefill is not None else None,
    }


# -- parts --


def _peer_words(peer: PeerMatch) -> str:
    return f"the store {peer.key.worker_id}" if peer.is_store else peer.key.worker_id


def _leg_json(selection: Selection) -> dict[str, Any]:
    return {
        "chosen": str(selection.key) if selection.key is not None else None,
        "inputs": {name: _number(value) for name, value in selection.inputs},
        "candidates": [
            {
                "worker": str(candidate.key),
                "filtered": candidate.filtered.value if candidate.filtered is not None else None,
                "score": _number(candidate.score),
                "terms": {name: _number(value) for name, value in candidate.terms},
            }
            for candidate in selection.candidates
        ],
    }


def _print_leg(leg: str, selection: Selection, console: Console) -> None:
    """A column per candidate, the chosen one first, then by score; a row per term."""
    ordered = sorted(
        selection.candidates,
        key=lambda candidate: (
            candidate.key != selection.key,
            candidate.score is None,
            candidate.score or 0.0,
        ),
    )
    shown = ordered[:_MAX_COLUMNS]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(leg, no_wrap=True)
    for candidate in shown:
        mark = "* " if candidate.key == selection.key else ""
        table.add_column(mark + candidate.key.worker_id, justify="right")
    table.add_row("score", *map(_score, shown))
    for row, name in enumerate(selection.term_names):
        write = _format(name)
        table.add_row(_heading(name), *(write(candidate.terms[row][1]) for candidate in shown))
    console.print(table)
    if len(shown) < len(ordered):
        console.print(f"and {len(ordered) - len(shown)} more: --json shows all", soft_wrap=True)
    if selection.inputs:
        inputs = (f"{_heading(name)} {_format(name)(value)}" for name, value in selection.inputs)
        console.print(f"decided by: {', '.join(inputs)}", soft_wrap=True, markup=False)
    console.print()


def _score(candidate: Candidate) -> str:
    """The policy's, or why there is none."""
    if candidate.score is None:
        return str(candidate.filtered).replace("_", " ")
    return f"{candidate.score:.4g}" if math.isfinite(candidate.score) else "never"


def _heading(name: str) -> str:
    """A term's name without its unit, which its values have."""
    return name.removeprefix("num_").removeprefix("has_").removesuffix("_s").replace("_", " ")


def _format(name: str) -> Format:
    if name.endswith("_s"):
        return _time
    if name.endswith("_fraction"):
        return "{:.0%}".format
    if name.startswith("has_"):
        return _yes_or_no
    return "{:,.0f}".format if name.startswith("num_") else "{:.6g}".format


def _yes_or_no(value: float) -> str:
    return "yes" if value else "no"


def _time(seconds: float) -> str:
    return format_ms(seconds * 1_000) if math.isfinite(seconds) else "never"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
