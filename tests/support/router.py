"""A router in this process: real doors on loopback, a bus in memory, a tiny model's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from moonpool.api.v1 import inference_pb2, inference_pb2_grpc
from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.config.process import RouterConfig, router_config
from moonpool.config.schema import ClusterConfig, RouterSettings
from moonpool.config.secret import load_or_create_secret
from moonpool.hub.model_dir import resolve
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
)
from moonpool.rpc.admin import fetch_status
from moonpool.rpc.calls import is_serving, replies
from moonpool.rpc.channel import open_channel
from moonpool.service.life import Running, StopPolicy, running
from moonpool.telemetry.names import Metric
from moonpool.wire.admin import RouterSnapshot
from moonpool.wire.inference import generation_event_from_pb, generation_request_to_pb
from moonpool_router.app import RouterService, build
from support.eventually import eventually
from support.fake_worker import FakeCluster
from support.tiny_llama import write_tiny_llama

_WAIT_S = 10.0


@dataclass(slots=True)
class Answered:
    """What a client got."""

    chunks: list[GenerationChunk] = field(default_factory=list)
    done: GenerationDone | None = None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """Checked on the way: positions join without gap or overlap."""
        ids: list[int] = []
        for chunk in self.chunks:
            assert chunk.first_position == len(ids), self.chunks
            ids += chunk.token_ids
        return ids


class Client:
    """A plain gRPC client of a router's door."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]  # generated
        self.channel = channel
        self.address = address

    def call(self, request: GenerationRequest, *, timeout_s: float | None = _WAIT_S) -> Any:
        return self._stub.Generate(generation_request_to_pb(request), timeout=timeout_s)

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = _WAIT_S
    ) -> Answered:
        """The whole answer; raises the MoonpoolError that the door sent."""
        answered = Answered()
        await self.read(self.call(request, timeout_s=timeout_s), answered)
        return answered

    async def read(self, call: Any, answered: Answered, *, num_tokens: int | None = None) -> None:
        """Read on, to the end or until so many tokens are there."""
        if num_tokens is None:
            async for message in replies(call, inference_pb2.GenerateReply, peer="router"):
                event = generation_event_from_pb(message)
                if isinstance(event, GenerationDone):
                    answered.done = event
                else:
                    answered.chunks.append(event)
            return
        while len(answered.token_ids) < num_tokens:
            event = generation_event_from_pb(await call.read())
            assert isinstance(event, GenerationChunk), event
            answered.chunks.append(event)

    async def status(self) -> RouterSnapshot:
        return await fetch_status(self.address, key=None, deadline_s=_WAIT_S)

    async def is_not_serving(self) -> bool:
        return not await self.is_serving()

    async def is_without_bus(self) -> bool:
        return not (await self.status()).is_bus_connected

    async def is_serving(self) -> bool:
        return await is_serving(self.channel, peer="router", deadline_s=_WAIT_S)


@dataclass(slots=True)
class RouterUnderTest:
    running: Running
    broker: MemoryBroker
    bus: MemoryBus
    cluster: FakeCluster
    client: Client
    service: RouterService

    def metric(self, metric: Metric, **labels: str) -> float:
        return self.service.metrics.value(metric, **labels)

    async def ready(self, num_workers: int = 1) -> None:
        """So many workers have joined, and the health service agrees."""

        async def is_ready() -> bool:
            status = await self.client.status()
            num_live = sum(worker.is_live for worker in status.workers)
            return num_live == num_workers and await self.client.is_serving() == status.is_ready

        await eventually(is_ready, timeout_s=_WAIT_S, what=f"{num_workers} workers joined")


def tiny_router_config(tmp_path: Path, **settings: Any) -> RouterConfig:
    model = write_tiny_llama(tmp_path / "tiny")
    cluster = ClusterConfig(
        data_dir=tmp_path / "data",
        model=str(model),
        dtype="float32",
        local_prefill_tokens=32,
        router=RouterSettings(http_port=0, grpc_port=0, **settings),
    )
    return router_config(cluster, nats_url="nats://127.0.0.1:1")


def fake_cluster(config: RouterConfig) -> FakeCluster:
    """What workers must have in common with a router of this configuration."""
    data_dir = config.common.data_dir
    return FakeCluster(
        secret=load_or_create_secret(data_dir),
        fingerprint=resolve(config.common.model, data_dir=data_dir).fingerprint,
    )


@asynccontextmanager
async def router(
    tmp_path: Path, *, policy: StopPolicy | None = None, **settings: Any
) -> AsyncIterator[RouterUnderTest]:
    """A started router without workers."""
    config = tiny_router_config(tmp_path, **settings)
    cluster = fake_cluster(config)
    broker = MemoryBroker()
    service = build(config, bus=MemoryBus(broker))
    assert isinstance(service, RouterService)
    async with running(service, policy=policy) as life, MemoryBus(broker) as bus:
        address = str(life.facts["grpc_address"])
        async with open_channel(address) as channel:
            yield RouterUnderTest(
                running=life,
                broker=broker,
                bus=bus,
                cluster=cluster,
                client=Client(channel, address),
                service=service,
            )


def ask(
    prompt: Prompt | str = "hello", *, stop: Sequence[str] = (), **options: Any
) -> GenerationRequest:
    """A request of 8 greedy tokens unless told otherwise."""
    options = {"max_tokens": 8, "temperature": 0.0, **options}
    return GenerationRequest(
        prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else prompt,
        options=SamplingOptions(stop=tuple(stop), **options),
    )
