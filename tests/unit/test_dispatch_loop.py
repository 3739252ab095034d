"""The router's loop over its real machines: whose mistake costs whom what."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.dispatch.events import RequestArrived, RequestCancelled
from moonpool.ids import RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import ModelNamespace
from moonpool.routing.worker_view import WorkerInfo
from support.requests import make_request
from support.router_loop import ADDRESS, HELLO, EncodingLinks, hear, joined_loop


class Watcher:
    """Remembers who has ended, or fails as a bug would."""

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
    def __init__(self) -> None:
        self.links = EncodingLinks()
        self.watcher = Watcher()
        self.loop = joined_loop(self.links, self.watcher)

    def arrive(self, request: InferenceRequest) -> None:
        self.loop.handle(RequestArrived(request=request, deadline_s=60.0))


async def test_a_message_that_fits_no_field_costs_its_request_only() -> None:
    router = Router()
    bad = make_request("bad")
    bad = replace(bad, sampling=replace(bad.sampling, top_k=2**32))
    router.arrive(bad)
    router.arrive(make_request("good"))
    assert router.watcher.ended == [("bad", "prompt_too_large_for_deployment")]
    assert router.links.decoding == ["good"]


async def test_a_bug_ends_the_loop_and_not_who_brought_the_event() -> None:
    router = Router()
    router.arrive(make_request("a"))
    router.watcher.bug = RuntimeError("a bug")
    router.loop.handle(RequestCancelled(request_id=RequestId("a")))
    router.arrive(make_request("b"))
    assert router.links.decoding == ["a"]
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(5):
            await router.loop.run()


async def test_a_hello_that_is_refused_says_nothing_about_the_worker_that_lives() -> None:
    router = Router()
    hear(router.loop, "127.0.0.1:2", replace(HELLO, max_model_len=7), sequence=2)
    assert router.loop.hellos == (HELLO,)
    assert router.loop.max_model_len == 512
    lived, refused = router.loop.members()
    assert (lived.because, refused.because) == ("", f"d0@i1 is already joined at {ADDRESS}")
