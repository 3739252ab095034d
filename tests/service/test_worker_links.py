"""The router's streams to workers, against a worker that only says hello."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from moonpool.api.v1 import worker_pb2_grpc
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.rpc.server import RpcServer
from moonpool.wire.session import WorkerFrame, hello_message_to_pb
from moonpool.wire.worker import RouterHello, WorkerHello
from moonpool_router.worker_links import WorkerLinks
from support.fake_worker import make_hello

KEY = "a key"


class SilentWorker(worker_pb2_grpc.WorkerServicer):
    """Says hello, and nothing more until its router leaves."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield hello_message_to_pb(make_hello(WorkerKey(WorkerId("d0"), Incarnation("i1"))))
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


class Refusing:
    """A listener that closes the link of whoever says hello."""

    def __init__(self, links: WorkerLinks) -> None:
        self._links = links
        self.ends: list[str] = []

    def on_hello(self, address: str, hello: WorkerHello) -> None:
        self._links.close(address)

    def on_frame(self, address: str, key: WorkerKey, frame: WorkerFrame) -> None:
        raise AssertionError(frame)

    def on_closed(self, address: str, reason: str) -> None:
        self.ends.append(reason)

    def on_refused(self, address: str, reason: str) -> None:
        self.ends.append(reason)


async def test_a_link_that_is_closed_at_the_hello_ends_without_another_word() -> None:
    worker = SilentWorker()
    server = RpcServer(key=KEY)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "moonpool.api.v1.Worker")
    await server.start()
    try:
        hello = RouterHello(router_id="r", namespace=None, secret_fingerprint="0" * 16)
        async with WorkerLinks(hello=lambda: hello, key=KEY) as links:
            listener = Refusing(links)
            links.listen(listener)
            links.open(server.address)
            async with asyncio.timeout(5):
                await worker.left.wait()
        assert listener.ends == []
    finally:
        await server.stop(grace_s=0)
