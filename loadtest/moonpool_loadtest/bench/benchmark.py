"""One benchmark: a configuration in, a report out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.errors import UnavailableError
from moonpool_loadtest.bench.arrivals import ArrivalProcess
from moonpool_loadtest.bench.driver import Driver, RequestOptions
from moonpool_loadtest.bench.grpc_driver import GrpcDriver
from moonpool_loadtest.bench.metrics import (
    BenchMetrics,
    Gate,
    Slo,
    caveats,
    client_gates,
    compute_metrics,
)
from moonpool_loadtest.bench.openai_driver import OpenAIDriver
from moonpool_loadtest.bench.records import Outcome
from moonpool_loadtest.bench.runner import Run, run_one_by_one, run_schedule
from moonpool_loadtest.bench.workload import WorkloadSpec, make_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Everything that decides what is sent, when and where. The API key is not part of it."""

    #: `host:port` of a gRPC door, or the base URL of an OpenAI server.
    target: str
    num_requests: int
    seed: int = 0
    #: Sent one by one before the clock starts; their prompts share nothing with the measured ones.
    num_warmups: int = 2
    arrivals: ArrivalProcess = field(default_factory=ArrivalProcess)
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    options: RequestOptions = field(default_factory=RequestOptions)
    slo: Slo = field(default_factory=Slo)

    @property
    def is_http(self) -> bool:
        return "://" in self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    config: BenchConfig
    #: What the server offers.
    models: tuple[str, ...]
    started_unix_s: float
    run: Run
    metrics: BenchMetrics
    gates: tuple[Gate, ...]
    caveats: tuple[str, ...]

    @property
    def is_client_healthy(self) -> bool:
        return all(gate.is_met for gate in self.gates)


async def run_benchmark(
    config: BenchConfig,
    *,
    api_key: str | None = None,
    on_progress: Callable[[str], None] = lambda _line: None,
) -> BenchResult:
    """Warm up, send the schedule, and compute.

    Raises:
        MoonpoolError: The server does not answer, or a warm-up request failed.
    """
    schedule = config.arrivals.schedule(
        config.num_requests, random.Random(f"{config.seed}/arrivals")
    )
    requests = make_requests(config.workload, schedule, seed=config.seed)
    warmups = make_requests(
        config.workload, (0.0,) * config.num_warmups, seed=config.seed, stream="warm-up"
    )
    timeout_s = config.options.timeout_s
    async with make_driver(config, api_key=api_key) as driver:
        models = await driver.list_models()
        for record in await run_one_by_one(warmups, driver, timeout_s=timeout_s):
            if record.outcome is not Outcome.OK:
                raise UnavailableError(
                    f"A warm-up request failed: {record.error}", code=record.error_code
                )
        on_progress(
            f"{config.num_requests} requests over {schedule[-1] if schedule else 0.0:.1f} s "
            f"to {config.target} ({', '.join(models)})"
        )
        started_unix_s = time.time()
        run = await run_schedule(requests, driver, timeout_s=timeout_s)
    metrics = compute_metrics(run.records, config.slo)
    gates = client_gates(metrics, cpu_share=run.cpu_share)
    return BenchResult(
        config=config,
        models=models,
        started_unix_s=started_unix_s,
        run=run,
        metrics=metrics,
        gates=gates,
        caveats=caveats(metrics, gates),
    )


def make_driver(config: BenchConfig, *, api_key: str | None) -> Driver:
    """The one that speaks the target's protocol."""
    if config.is_http:
        return OpenAIDriver(config.target, config.options, api_key=api_key)
    return GrpcDriver(config.target, config.options, api_key=api_key)
