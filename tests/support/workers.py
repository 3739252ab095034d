"""Worker services inside a test: configuration, an in-memory bus, real gRPC on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bus.protocol import Bus
from moonpool.config.process import CommonSettings, WorkerConfig
from moonpool.config.schema import TelemetrySettings, WorkerSettings
from moonpool.config.secret import load_or_create_secret
from moonpool.rpc.admin import fetch_ledger, fetch_steps
from moonpool.service.life import Running, StopPolicy, running
from moonpool.wire.steps import StepRecord
from moonpool.wire.worker import LedgerReport
from moonpool.worker.service import StartEngine, WorkerService
from moonpool_decode.app import build as build_decode
from moonpool_prefill.app import build as build_prefill
from support.eventually import eventually
from support.router_client import RouterClient


def worker_config(
    data_dir: Path,
    model: Path,
    worker_id: str,
    role: str = "both",
    *,
    failpoints: str = "",
    local_prefill_tokens: int = 64,
    dtype: str = "float32",
    **settings: Any,
) -> WorkerConfig:
    """A worker's document; `settings` are WorkerSettings'."""
    defaults = {"num_blocks": 64, "max_num_seqs": 8, "is_checked": True}
    return WorkerConfig(
        common=CommonSettings(
            cluster="test",
            data_dir=data_dir,
            model=str(model),
            dtype=dtype,
            compute_dtype="float32",
            nats_url="nats://127.0.0.1:1",
            local_prefill_tokens=local_prefill_tokens,
            telemetry=TelemetrySettings(),
            failpoints=failpoints,
            unsafe_failpoints=bool(failpoints),
        ),
        role=role,
        worker_id=worker_id,
        worker=WorkerSettings.model_validate(defaults | settings),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningWorker:
    """A worker that serves, and how to reach it."""

    config: WorkerConfig
    service: WorkerService
    running: Running
    address: str

    def router(self, router_id: str = "router-test", **options: Any) -> RouterClient:
        """A session to it, to be entered."""
        secret = load_or_create_secret(self.config.common.data_dir)
        given = {"rpc_key": secret.rpc_key, "secret_fingerprint": secret.fingerprint} | options
        return RouterClient(self.address, router_id=router_id, **given)

    async def ledger(self) -> LedgerReport:
        secret = load_or_create_secret(self.config.common.data_dir)
        return await fetch_ledger(self.address, key=secret.rpc_key, deadline_s=5.0)

    async def steps(self, *, after_step: int = 0) -> tuple[StepRecord, ...]:
        secret = load_or_create_secret(self.config.common.data_dir)
        return await fetch_steps(
            self.address, after_step=after_step, key=secret.rpc_key, deadline_s=5.0
        )

    async def until_quiet(self, *, timeout_s: float = 10.0) -> None:
        """Nothing is held any more, on either of its processes."""

        async def is_quiet() -> bool:
            return (await self.ledger()).is_quiet

        await eventually(is_quiet, timeout_s=timeout_s, what=f"{self.config.worker_id} is quiet")


@contextlib.asynccontextmanager
async def running_worker(
    config: WorkerConfig,
    bus: Bus,
    *,
    start_engine: StartEngine | None = None,
    policy: StopPolicy | None = None,
) -> AsyncIterator[RunningWorker]:
    """The worker of `config`, drained and stopped on exit."""
    build = build_prefill if config.role == "prefill" else build_decode
    service = build(config, bus=bus, start_engine=start_engine)
    async with running(service, policy=policy) as life:
        address = str(life.facts["grpc_address"])
        yield RunningWorker(config=config, service=service, running=life, address=address)
