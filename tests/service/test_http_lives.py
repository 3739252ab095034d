"""The HTTP door in other lives: with a key, strict, not ready, draining; slow clients, long silences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from moonpool.client import AsyncClient
from moonpool.config.schema import ApiKeySettings
from moonpool.core.protocol import BlockLedger
from moonpool.errors import (
    MoonpoolError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from moonpool.handoff.messages import DecodeRequest
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    GenerationEvent,
    GenerationRequest,
    PlacementSummary,
    Timing,
    Usage,
)
from moonpool.inference.output import FinishReason
from moonpool.rpc.admin import fetch_status
from moonpool.service.http_server import HttpServer
from moonpool.wire.admin import RouterSnapshot
from moonpool_router.http_door import HttpDoor, HttpSettings
from support.eventually import eventually
from support.fake_worker import FakeWorker, fake_worker
from support.raw_http import post, raw_http
from support.router import RouterUnderTest, ask, router

TEXT = "/v1/completions"
CHUNK = GenerationChunk(
    request_id=RequestId("r"), text="x" * 65_536, token_ids=(), first_position=0
)
DONE = GenerationDone(
    request_id=RequestId("r"),
    model="m",
    finish_reason=FinishReason.LENGTH,
    usage=Usage(num_prompt_tokens=1, num_completion_tokens=1, num_cached_tokens=0),
    timing=Timing(ttft_ms=0.0),
    placement=PlacementSummary(prefill_worker="", decode_worker="", num_attempts=1, reason=""),
)


class ScriptedFront:
    """A pipeline whose answers a test writes: an event, an exception, or None to wait for ever."""

    model_name = "m"
    max_model_len = 16

    def __init__(self, script: Callable[[], AsyncIterator[GenerationEvent]]) -> None:
        self._script = script
        self.left = asyncio.Event()
        self.is_full = False

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        if self.is_full:
            raise OverloadedError("full")
        yield

    @asynccontextmanager
    async def submit(
        self,
        request: GenerationRequest,
        *,
        endpoint: str,
        request_id: RequestId | None = None,
        is_admitted: bool = False,
    ) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        assert is_admitted
        try:
            yield self._script()
        finally:
            self.left.set()


class Script:
    """An answer of the given events; None never comes. Bears that a wait is given up."""

    def __init__(
        self, *events: GenerationEvent | Exception | None, is_endless: bool = False
    ) -> None:
        self._events = list(events)
        self._is_endless = is_endless

    def __aiter__(self) -> Script:
        return self

    async def __anext__(self) -> GenerationEvent:
        if self._is_endless:
            await asyncio.sleep(0)
            return CHUNK
        if self._events[0] is None:
            await asyncio.Event().wait()
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        assert event is not None
        return event


@asynccontextmanager
async def serving(front: ScriptedFront, **settings: Any) -> AsyncIterator[HttpServer]:
    refused: list[tuple[MoonpoolError, str]] = []
    door = HttpDoor(
        front,  # type: ignore[arg-type]  # its answers have no request id
        settings=HttpSettings(**settings),
        not_ready_because=lambda: "",
        render_metrics=lambda: b"",
        on_refused=lambda error, endpoint: refused.append((error, endpoint)),
    )
    server = HttpServer(door)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.2)


async def test_a_client_that_takes_nothing_loses_its_request() -> None:
    front = ScriptedFront(lambda: Script(is_endless=True))
    async with serving(front, stall_s=0.2) as server, raw_http(server.port, limit=1_024) as raw:
        await raw.send(post(TEXT, b'{"prompt": "a", "stream": true}'))
        async with asyncio.timeout(10):
            await front.left.wait()
        await raw.until_cut()


async def test_a_full_router_does_not_read_the_body() -> None:
    front = ScriptedFront(lambda: Script())
    front.is_full = True
    async with serving(front) as server, raw_http(server.port) as raw:
        head, _ = post(TEXT, b"x" * 1_000).split(b"\r\n\r\n")
        await raw.send(head + b"\r\n\r\n")
        response = await raw.response()
        assert (response.status, response.error["code"]) == (503, "server_overloaded")


async def test_a_large_body_is_read_like_a_small_one() -> None:
    front = ScriptedFront(lambda: Script(DONE))
    async with serving(front) as server, httpx.AsyncClient(base_url=server.url) as client:
        for prompt in ("a", "a" * 100_000):
            body = {"prompt": prompt, "stream": True}
            assert (await client.post(TEXT, json=body)).text.endswith("data: [DONE]\n\n")
        response = await client.post(TEXT, json={"prompt": "a" * 100_000, "n": 2})
        assert response.json()["error"]["param"] == "n"


async def test_a_client_that_reads_keeps_its_request() -> None:
    front = ScriptedFront(lambda: Script(is_endless=True))
    async with serving(front, stall_s=0.2) as server, raw_http(server.port, limit=1_024) as raw:
        await raw.send(post(TEXT, b'{"prompt": "a", "stream": true}'))
        async with asyncio.timeout(20):
            # More than any buffer on the way holds.
            for _ in range(400):
                await raw.reader.readexactly(30_000)
        assert not front.left.is_set()


async def test_a_long_silence_is_broken_by_comments() -> None:
    front = ScriptedFront(lambda: Script(None, DONE))
    async with (
        serving(front, keep_alive_s=0.05) as server,
        raw_http(server.port) as raw,
        asyncio.timeout(10),
    ):
        await raw.send(post(TEXT, b'{"prompt": "a", "stream": true}'))
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        for _ in range(2):
            await raw.reader.readuntil(b": keep-alive\n\n")
        # It has begun, and its client leaves without a word: the comments find out.
        raw.writer.close()
        await front.left.wait()


async def test_a_failure_of_ours_is_hidden_before_and_within_a_stream() -> None:
    secret = RuntimeError("a path of the server")
    for script, is_stream in (((secret,), False), ((secret,), True), ((CHUNK, secret), True)):
        front = ScriptedFront(lambda script=script: Script(*script))  # type: ignore[misc]
        async with serving(front) as server, httpx.AsyncClient(base_url=server.url) as client:
            with capture_logs() as logs:
                response = await client.post(TEXT, json={"prompt": "a", "stream": is_stream})
            assert [entry["log_level"] for entry in logs].count("error") == 1
            assert response.status_code == (200 if len(script) > 1 else 500)
            assert "a path of the server" not in response.text
            assert response.headers["x-request-id"] in response.text
            assert ("[DONE]" in response.text) == (len(script) > 1)


async def nothing(*_: Any) -> None:
    """An application that answers nothing."""


async def test_a_port_that_is_taken_is_told() -> None:
    async with serving(ScriptedFront(lambda: Script())) as server:
        again = HttpServer(nothing, port=server.port)
        with pytest.raises(UnavailableError, match="Cannot listen"):
            await again.start()


def client_of(r: RouterUnderTest, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=str(r.running.facts["http_url"]), headers=headers, timeout=20)


Status = Callable[[], Coroutine[None, None, RouterSnapshot]]


async def without_room(worker: FakeWorker, status: Status) -> None:
    """The worker has no block left, and the router knows."""

    async def is_known() -> bool:
        loads = [one.load for one in (await status()).workers]
        return [load.ledger.num_free for load in loads if load is not None] == [0]

    full = BlockLedger(num_total=1000, num_free=0, num_cached=0, num_referenced=1000)
    worker.load = replace(worker.load, ledger=full)
    worker.send()
    await eventually(is_known, timeout_s=10, what="no room")


async def until_queued(number: int, status: Status) -> None:
    async def is_so() -> bool:
        return (await status()).num_queued == number

    await eventually(is_so, timeout_s=10, what=f"{number} wait")


async def test_with_a_key_only_livez_is_open(tmp_path: Path) -> None:
    key = "sesame-open"
    async with router(tmp_path, api_key=key) as r, client_of(r) as client:
        for headers, code in (
            ({}, "missing_api_key"),
            ({"authorization": "Bearer wrong"}, "invalid_api_key"),
            ({"authorization": "Bearer"}, "invalid_api_key"),
            ({"authorization": f"Basic {key}"}, "invalid_api_key"),
            ({"authorization": "Bearer \xe9"}, "invalid_api_key"),
        ):
            for path in ("/v1/models", "/metrics", "/health", "/nothing"):
                raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
                response = await client.get(path, headers=raw)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == code
                assert response.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/livez", headers=raw)).status_code == 200
        good = {"authorization": f"bearer {key}"}
        assert (await client.get("/v1/models", headers=good)).status_code == 200


async def test_a_request_is_its_keys_tenants_at_both_doors(tmp_path: Path) -> None:
    keys = (
        ApiKeySettings(tenant="a", key="key of a"),
        ApiKeySettings(tenant="b", key_sha256=sha256(b"key of b").hexdigest()),
    )
    body = {"prompt": "hello", "max_tokens": 1}
    async with (
        router(tmp_path, api_key="of nobody", api_keys=keys) as r,
        client_of(r) as client,
        fake_worker(r.cluster, r.bus) as worker,
    ):
        await worker.joined()
        await eventually(r.client.is_serving, timeout_s=10, what="serving")
        address = r.client.address
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            for key, tenant in (("key of a", "a"), ("key of b", "b"), ("of nobody", "default")):
                headers = {"authorization": f"Bearer {key}"}
                asking = tasks.create_task(client.post(TEXT, json=body, headers=headers))
                command = await worker.next(DecodeRequest)
                assert command.request.tenant == tenant
                worker.tokens(command, 0, [65], finish=FinishReason.LENGTH)
                assert (await asking).status_code == 200
                door = await stack.enter_async_context(AsyncClient(address, api_key=key))
                answering = tasks.create_task(door.complete("hello", max_tokens=1))
                command = await worker.next(DecodeRequest)
                assert command.request.tenant == tenant
                worker.tokens(command, 0, [65], finish=FinishReason.LENGTH)
                await answering
        refused = await client.post(TEXT, json=body, headers={"authorization": "Bearer of c"})
        assert refused.status_code == 401
        async with AsyncClient(address, api_key="key of c") as door:
            with pytest.raises(UnauthenticatedError):
                await door.complete("hello")


async def test_a_tenants_key_says_nothing_about_the_cluster(tmp_path: Path) -> None:
    keys = (ApiKeySettings(tenant="a", key="key of a"),)
    async with router(tmp_path, api_key="operator's", api_keys=keys) as r, client_of(r) as client:
        answers = {
            key: await client.get("/metrics", headers={"authorization": f"Bearer {key}"})
            for key in ("key of a", "operator's")
        }
        assert answers["operator's"].status_code == 200
        assert answers["key of a"].status_code == 403
        assert answers["key of a"].json()["error"]["type"] == "permission_error"
        with pytest.raises(PermissionDeniedError, match="runs the cluster") as caught:
            await fetch_status(r.client.address, key="key of a", deadline_s=10)
        assert caught.value.code == "permission_denied"
        status = await fetch_status(r.client.address, key="operator's", deadline_s=10)
        assert status.num_running == 0


async def test_a_tenant_that_floods_the_queue_leaves_the_others_their_part(tmp_path: Path) -> None:
    keys = tuple(ApiKeySettings(tenant=name, key=f"key of {name}") for name in ("a", "b"))
    body = {"prompt": "hello", "max_tokens": 1}
    async with (
        router(tmp_path, api_key="operator's", api_keys=keys, max_queued_requests=2) as r,
        client_of(r) as client,
        fake_worker(r.cluster, r.bus) as worker,
        asyncio.TaskGroup() as tasks,
    ):

        async def status() -> RouterSnapshot:
            return await fetch_status(r.client.address, key="operator's", deadline_s=10)

        def ask_as(tenant: str) -> Coroutine[None, None, httpx.Response]:
            headers = {"authorization": f"Bearer key of {tenant}"}
            return client.post(TEXT, json=body, headers=headers)

        await worker.joined()
        await without_room(worker, status)
        waiting = [tasks.create_task(ask_as("a"))]
        await until_queued(1, status)
        refused = await ask_as("a")
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "2"
        waiting.append(tasks.create_task(ask_as("b")))
        await until_queued(2, status)
        for task in waiting:
            task.cancel()


async def test_a_queue_that_is_full_of_its_only_tenant_is_overloaded(tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    async with (
        router(tmp_path, max_queued_requests=1) as r,
        client_of(r) as client,
        fake_worker(r.cluster, r.bus) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        await worker.joined()
        await without_room(worker, r.client.status)
        waiting = tasks.create_task(client.post(TEXT, json=body))
        await until_queued(1, r.client.status)
        # Not 429: a balancer may ask another router.
        refused = await client.post(TEXT, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_overloaded"
        with pytest.raises(OverloadedError) as caught:
            await r.client.generate(ask())
        assert caught.value.code == "server_overloaded"
        waiting.cancel()


async def test_a_strict_door_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    async with router(tmp_path, is_strict=True) as r, client_of(r) as client:
        for path, body, param in (
            (TEXT, {"prompt": "a", "foo": 1}, "foo"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "", "x": 1}]},
             "messages[0].x"),
        ):  # fmt: skip
            error = (await client.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", param)


async def test_without_a_worker_it_says_so_and_when_to_come_again(tmp_path: Path) -> None:
    async with router(tmp_path) as r, client_of(r) as client:
        for path in ("/readyz", "/health"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json() == {
                "status": "not_ready", "reasons": ["No worker has joined yet."],
            }  # fmt: skip
        response = await client.post(TEXT, json={"prompt": "a"})
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "model_loading")
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
        assert (await client.get("/livez")).status_code == 200


async def test_a_drain_refuses_what_is_new_and_ends_what_runs(tmp_path: Path) -> None:
    async with router(tmp_path) as r, fake_worker(r.cluster, r.bus) as worker:
        await r.ready()
        async with client_of(r) as client:
            asking = asyncio.create_task(client.post(TEXT, json={"prompt": "a"}))
            command = await worker.next(DecodeRequest)
            r.running.request_stop()

            async def is_refused() -> bool:
                response = await client.post(TEXT, json={"prompt": "a", "max_tokens": 0})
                return bool(response.json()["error"]["code"] == "shutting_down")

            await eventually(is_refused, timeout_s=10, what="the drain has begun")
            assert (await client.get("/readyz")).json()["reasons"] == ["The router is draining."]
            assert (await client.get("/livez")).status_code == 200
            worker.tokens(command, 0, [70], finish=FinishReason.LENGTH)
            assert (await asking).json()["choices"][0]["text"] == "d"
