"""What a placement costs: one decision over a fleet, by policy, the dispatcher's whole turn, and what a span
has of its candidates.

    python tests/bench/bench_placement.py            in tests/ or with tests/ on the path

A prompt of 12,000 tokens; every worker holds another length of its prefix, some are busy, all have told
their fits. Times are CPU time of the thread, the best of the rounds: the machine may be shared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.events import LoadReported, RequestArrived, RequestCancelled, WorkerJoined
from moonpool.ids import WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.fleet_table import FleetTable
from moonpool.routing.selector import Selector
from moonpool.routing.worker_view import WorkerLoad, WorkerView
from moonpool_router.placement_facts import candidates_json
from support.fleet import FITS, make_key, make_query, make_view
from support.requests import make_request

NUM_TOKENS = 12_000
NUM_ROUNDS = 7
NUM_CALLS = 100


def main() -> None:
    print(f"{'workers':>7}  {'what':24}  {'us':>6}")
    for num_workers in (8, 64, 256):
        fleet = [
            make_view(
                f"w{number:03}",
                total=100_000,
                num_requests=number % 7,
                queued=100 * (number % 11),
                fits=FITS,
            )
            for number in range(num_workers)
        ]
        cached = {
            f"w{number:03}": (number % 64 + 1) * 176 for number in range(min(num_workers, 64))
        }
        table, query = FleetTable.of(fleet), make_query(NUM_TOKENS, cached=cached)
        for policy in PolicyName:
            selector = Selector(RoutingConfig(policy=policy))
            took_s = best_of(partial(selector.place, table, query))
            print(f"{num_workers:7}  {policy.value:24}  {took_s * 1e6:6.0f}")
        took_s = best_of(dispatcher_turn(fleet, cached))
        print(f"{num_workers:7}  {'dispatcher, min_ttft':24}  {took_s * 1e6:6.0f}")
        selection = Selector(RoutingConfig()).place(table, query).decode
        took_s = best_of(partial(candidates_json, selection))
        print(f"{num_workers:7}  {'candidates for a span':24}  {took_s * 1e6:6.0f}")


def dispatcher_turn(fleet: list[WorkerView], cached: Mapping[str, int]) -> Callable[[], object]:
    """A request arrives, is placed, and goes away again."""
    matches = {make_key(name): number for name, number in cached.items()}

    def match(request: InferenceRequest) -> Mapping[WorkerKey, int]:
        return matches

    dispatcher = Dispatcher(DispatchConfig(), match=match)
    for view in fleet:
        load = WorkerLoad(
            num_total_blocks=view.load.num_total_blocks,
            num_available_blocks=view.load.num_available_blocks,
            num_free_blocks=view.load.num_free_blocks,
            num_requests=view.load.num_requests,
            num_queued_tokens=view.load.num_queued_tokens,
            fits=FITS,
        )
        dispatcher.handle(WorkerJoined(info=view.info), 0.0)
        dispatcher.handle(LoadReported(key=view.key, load=load), 0.0)
    request = make_request("r", prompt=NUM_TOKENS, max_tokens=100)

    def turn() -> object:
        effects = dispatcher.handle(RequestArrived(request=request, deadline_s=60.0), 0.0)
        dispatcher.handle(RequestCancelled(request_id=request.request_id), 0.0)
        return effects

    return turn


def best_of(call: Callable[[], object]) -> float:
    """Seconds per call."""
    call()
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        started = time.thread_time()
        for _ in range(NUM_CALLS):
            call()
        best = min(best, (time.thread_time() - started) / NUM_CALLS)
    return best


if __name__ == "__main__":
    main()
