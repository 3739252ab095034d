"""A worker as an operator has it: a process started by its module, with an engine process below it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster.process import ChildProcess
from moonpool.config.process import WorkerConfig, write_document
from moonpool.config.secret import load_or_create_secret
from moonpool.rpc.admin import fetch_ledger
from moonpool.service.ready import ReadyPipe
from support.eventually import eventually
from support.router_client import RouterClient


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """Starting, until `wait_ready` returns."""

    config: WorkerConfig
    child: ChildProcess
    ready: ReadyPipe

    @classmethod
    async def start(cls, config: WorkerConfig, directory: Path) -> WorkerProcess:
        document = directory / f"{config.worker_id}.json"
        write_document(config, document)
        module = "moonpool_prefill" if config.role == "prefill" else "moonpool_decode"
        ready = ReadyPipe()
        child = await ChildProcess.start(
            config.worker_id,
            [sys.executable, "-m", module, "--config", str(document)],
            log_path=directory / f"{config.worker_id}.log",
            environment=dict(os.environ) | ready.environment,
            pass_fds=(ready.child_fd,),
        )
        return cls(config=config, child=child, ready=ready)

    async def wait_ready(self) -> str:
        """Its gRPC address."""
        report = await self.ready.wait(deadline_s=60.0)
        return str(report.facts["grpc_address"])

    @property
    def engine_pid(self) -> int:
        """The process below the service."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text()
        (pid,) = map(int, children.split())
        return pid

    def router(self, address: str) -> RouterClient:
        secret = load_or_create_secret(self.config.common.data_dir)
        return RouterClient(address, rpc_key=secret.rpc_key, secret_fingerprint=secret.fingerprint)

    async def until_quiet(self, address: str) -> None:
        secret = load_or_create_secret(self.config.common.data_dir)

        async def is_quiet() -> bool:
            return (await fetch_ledger(address, key=secret.rpc_key, deadline_s=5.0)).is_quiet

        await eventually(is_quiet, timeout_s=10.0, what=f"{self.config.worker_id} is quiet")
