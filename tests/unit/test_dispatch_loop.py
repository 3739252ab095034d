"""The router's loop over its real machines: whose mistake costs whom what."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.clock import ManualClock
from moonpool.core.protocol import BlockLedger
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.dispatch.events import RequestArrived, RequestCancelled
from moonpool.dispatch.membership import Announcement, Membership, MembershipConfig
from moonpool.failpoints import Failpoints
from moonpool.handoff.messages import RouterMessage
from moonpool.ids import Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace
from moonpool.routing.worker_view import WorkerInfo
from moonpool.telemetry.spans import TraceRing
from moonpool.wire.session import WorkerFrame, router_message_to_pb
from moonpool.wire.worker import LoadReport, WorkerHello
from moonpool_router.compatibility import Compatibility
from moonpool_router.dispatch_loop import DispatchLoop
from support.fake_worker import make_hello
from support.requests import make_request

A, B = "127.0.0.1:1", "127.0.0.1:2"
HELLO = make_hello(WorkerKey(WorkerId("d0"), Incarnation("i1")))
IDLE = LoadReport(ledger=BlockLedger(num_total=100, num_free=100, num_cached=0, num_referenced=0))


class EncodingLinks:
    """Streams that encode as real ones do, and end there."""

    def __init__(self) -> None:
        self.sent: list[pb.RouterMessage] = []

    def open(self, address: str) -> None: ...

    def close(self, address: str) -> None: ...

    def send(self, address: str, message: RouterMessage) -> None:
        self.sent.append(router_message_to_pb(message))


class Watcher:
    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None]] = []
        self.bug: Exception | None = None

    def on_worker_joined(self, info: WorkerInfo, namespace: ModelNamespace) -> None: ...

    def on_worker_lost(self, key: WorkerKey) -> None: ...

    def on_placed(self, placement: Placement, request: InferenceRequest) -> None: ...

    def on_request_ended(self, end: EndRequest) -> None:
        if self.bug is not None:
            raise self.bug
        self.ended.append((end.request_id, end.error_code))


class Router:
    """A loop that one worker has joined."""

    def __init__(self) -> None:
        self.links = EncodingLinks()
        self.watcher = Watcher()
        self.loop = DispatchLoop(
            Dispatcher(DispatchConfig()),
            Membership(MembershipConfig()),
            links=self.links,
            watcher=self.watcher,
            compatibility=Compatibility(
                model_fingerprint=HELLO.namespace.model_fingerprint,
                secret_fingerprint=HELLO.secret_fingerprint,
            ),
            traces=TraceRing(max_traces=0),
            clock=ManualClock(),
            failpoints=Failpoints.off(),
        )
        self.hear(A, HELLO)
        self.loop.on_frame(A, HELLO.worker, WorkerFrame(reports=(), load=IDLE))

    def hear(self, address: str, hello: WorkerHello, *, sequence: int = 1) -> None:
        """A worker announces itself, and says hello where it is dialled."""
        self.loop.on_announced(
            Announcement(
                key=hello.worker,
                role=hello.role,
                address=address,
                sequence=sequence,
                valid_for_s=3.0,
            )
        )
        self.loop.on_hello(address, hello)

    def arrive(self, request: InferenceRequest) -> None:
        self.loop.handle(RequestArrived(request=request, deadline_s=60.0))

    @property
    def decoding(self) -> list[str]:
        """Requests that were sent to be decoded."""
        return [message.decode.request.request_id for message in self.links.sent]


async def test_a_message_that_fits_no_field_costs_its_request_only() -> None:
    router = Router()
    bad = make_request("bad")
    bad = replace(bad, sampling=replace(bad.sampling, top_k=2**32))
    router.arrive(bad)
    router.arrive(make_request("good"))
    assert router.watcher.ended == [("bad", "prompt_too_large_for_deployment")]
    assert router.decoding == ["good"]


async def test_a_bug_ends_the_loop_and_not_who_brought_the_event() -> None:
    router = Router()
    router.arrive(make_request("a"))
    router.watcher.bug = RuntimeError("a bug")
    router.loop.handle(RequestCancelled(request_id=RequestId("a")))
    router.arrive(make_request("b"))
    assert router.decoding == ["a"]
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(5):
            await router.loop.run()


async def test_a_hello_that_is_refused_says_nothing_about_the_worker_that_lives() -> None:
    router = Router()
    router.hear(B, replace(HELLO, max_model_len=7), sequence=2)
    assert router.loop.hellos == (HELLO,)
    assert router.loop.max_model_len == 512
    (lived, refused) = router.loop.members()
    assert (lived.because, refused.because) == ("", f"d0@i1 is already joined at {A}")
