"""Store nodes inside a test: configuration, real gRPC on loopback, a real log where there is a directory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bus.protocol import Bus
from moonpool.config.process import CommonSettings, KvStoreConfig
from moonpool.config.schema import StoreSettings, TelemetrySettings
from moonpool.config.secret import load_or_create_secret
from moonpool.handoff.messages import PeerPrefix, SourceRef
from moonpool.ids import BlockHash, WorkerKey
from moonpool.rpc.admin import fetch_ledger
from moonpool.rpc.channel import open_channel
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.store import fetch_store_report, offer_blocks, store_stub
from moonpool.service.life import Running, StopPolicy, running
from moonpool.wire.store import PutAnswer, PutOffer, StoreReport
from moonpool.wire.worker import LedgerReport
from moonpool_kvstore.app import build
from moonpool_kvstore.service import OpenLog, StoreService
from support.eventually import eventually
from support.router_client import RouterClient


def store_config(
    data_dir: Path,
    model: Path,
    store_id: str = "store-0",
    *,
    failpoints: str = "",
    dtype: str = "float32",
    **settings: Any,
) -> KvStoreConfig:
    """A store's document; `settings` are StoreSettings'."""
    defaults = {"host_bytes": 2**16, "ssd_bytes": 2**24, "is_checked": True}
    return KvStoreConfig(
        common=CommonSettings(
            cluster="test",
            data_dir=data_dir,
            model=str(model),
            dtype=dtype,
            compute_dtype="float32",
            nats_url="nats://127.0.0.1:1",
            local_prefill_tokens=64,
            telemetry=TelemetrySettings(),
            failpoints=failpoints,
            unsafe_failpoints=bool(failpoints),
        ),
        store_id=store_id,
        block_size=16,
        store=StoreSettings.model_validate(defaults | settings),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningStore:
    """A store that serves, and how to reach it."""

    config: KvStoreConfig
    service: StoreService
    running: Running
    address: str

    @property
    def key(self) -> WorkerKey:
        return self.service.shell.hello.worker

    @property
    def rpc_key(self) -> str:
        return load_or_create_secret(self.config.common.data_dir).rpc_key

    def router(self) -> RouterClient:
        """A session to it, to be entered."""
        secret = load_or_create_secret(self.config.common.data_dir)
        return RouterClient(
            self.address, rpc_key=secret.rpc_key, secret_fingerprint=secret.fingerprint
        )

    def peer(self, num_tokens: int) -> PeerPrefix:
        """This store as one that holds so many tokens of a prompt."""
        return PeerPrefix(key=self.key, address=self.address, num_tokens=num_tokens, is_store=True)

    async def offer(
        self,
        hashes: tuple[BlockHash, ...],
        source: SourceRef,
        *,
        tenant: str = "default",
        store: WorkerKey | None = None,
        deadline_s: float = 10.0,
    ) -> PutAnswer:
        """Offer it a chain that `source` holds."""
        offer = PutOffer(
            store=store or self.key,
            tenant=tenant,
            hashes=hashes,
            source=source,
            deadline_s=deadline_s,
        )
        async with open_channel(self.address) as channel:
            return await offer_blocks(
                store_stub(channel), offer, metadata=call_metadata(key=self.rpc_key), timeout_s=5.0
            )

    async def report(self) -> StoreReport:
        return await fetch_store_report(self.address, key=self.rpc_key, deadline_s=5.0)

    async def ledger(self) -> LedgerReport:
        return await fetch_ledger(self.address, key=self.rpc_key, deadline_s=5.0)

    async def until_quiet(self, *, timeout_s: float = 10.0) -> None:
        """Nothing is read, lent or written any more."""

        async def is_quiet() -> bool:
            return (await self.ledger()).is_quiet

        await eventually(is_quiet, timeout_s=timeout_s, what=f"{self.config.store_id} is quiet")


@contextlib.asynccontextmanager
async def running_store(
    config: KvStoreConfig,
    bus: Bus,
    *,
    open_log: OpenLog | None = None,
    policy: StopPolicy | None = None,
) -> AsyncIterator[RunningStore]:
    """The store of `config`, drained and stopped on exit."""
    service = build(config, bus=bus, open_log=open_log)
    async with running(service, policy=policy) as life:
        address = str(life.facts["grpc_address"])
        yield RunningStore(config=config, service=service, running=life, address=address)
