"""The pipeline in front of the request machine: places, deadlines and lengths, before anything is computed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.bus.subjects import Subjects
from moonpool.clock import SystemClock
from moonpool.config.schema import ApiKeySettings, RouterSettings
from moonpool.dispatch.index_follower import IndexFollower
from moonpool.dispatch.reuse_books import ReuseBooks
from moonpool.errors import (
    InvalidRequestError,
    MoonpoolError,
    OverloadedError,
    QueueDeadlineError,
    TenantLimitError,
    UnavailableError,
)
from moonpool.ids import RequestId
from moonpool.inference.generation import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt
from moonpool.kv.asked_keys import AskedKeys
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.routing.prefix_matcher import PrefixMatcher
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.spans import Tracer, TraceRing
from moonpool_router.books import ROUTER_METRICS, RouterBooks
from moonpool_router.index_feed import IndexFeed
from moonpool_router.limits import pipeline_limits, tenant_part
from moonpool_router.pipeline import MAX_REQUESTS, PipelineLimits, RequestPipeline
from moonpool_router.served_model import ServedModel
from support.router_loop import EncodingLinks, joined_loop
from support.tiny_llama import write_tiny_llama

ASK = GenerationRequest(prompt=TextPrompt(text="hello"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    path = tmp_path_factory.mktemp("pipeline")
    model = ServedModel.load(str(write_tiny_llama(path / "tiny")), data_dir=path)
    yield model
    model.close()


class Front:
    """A pipeline whose one worker takes everything and answers nothing."""

    def __init__(self, model: ServedModel, *, limits: PipelineLimits | None = None) -> None:
        clock = SystemClock()
        books = RouterBooks(Metrics(ROUTER_METRICS), model=model.facts.name)
        follower = IndexFollower(PrefixIndex())
        feed = IndexFeed(
            follower,
            PrefixMatcher(follower.index, b"secret"),
            ReuseBooks(AskedKeys()),
            bus=MemoryBus(MemoryBroker()),
            subjects=Subjects("test"),
            key="key",
            clock=clock,
            books=books,
        )
        self.links = EncodingLinks()
        traces = TraceRing(max_traces=4)
        self.pipeline = RequestPipeline(
            model,
            joined_loop(self.links, feed, clock=clock),
            feed,
            limits=limits or PipelineLimits(max_requests=4),
            tracer=Tracer(clock=clock, sink=traces.add, process="r", rng=random.Random(0)),
            traces=traces,
            books=books,
            clock=clock,
        )

    async def failure(self, request: GenerationRequest) -> MoonpoolError | None:
        """Read all of the answer; what it fails with."""
        try:
            async with self.pipeline.submit(request, endpoint="test") as answer:
                async for _ in answer:
                    pass
        except MoonpoolError as error:
            return error
        return None

    async def submit(self, request: GenerationRequest, **options: bool) -> RequestId:
        """Enter and leave at once; the request's id."""
        async with self.pipeline.submit(request, endpoint="test", **options) as answer:
            return answer.request_id


@contextlib.contextmanager
def busy_threads(model: ServedModel) -> Iterator[None]:
    """Nothing is tokenized meanwhile."""
    release = threading.Event()
    jobs = [model.executor.submit(release.wait, 60.0) for _ in range(64)]
    try:
        yield
    finally:
        release.set()
        wait(jobs)


@contextlib.asynccontextmanager
async def quiet(front: Front) -> AsyncIterator[None]:
    """No request was sent to a worker, and none is left."""
    yield
    assert front.links.decoding == []
    await front.pipeline.wait_idle()


async def test_a_request_whose_deadline_has_passed_is_refused_on_arrival(
    model: ServedModel,
) -> None:
    front = Front(model)
    async with quiet(front):
        for deadline_s in (0.0, -1.0):
            with pytest.raises(QueueDeadlineError, match="had passed"):
                await front.submit(GenerationRequest(prompt=ASK.prompt, deadline_s=deadline_s))


async def test_a_deadline_holds_while_the_prompt_waits_to_be_tokenized(model: ServedModel) -> None:
    front = Front(model)
    async with quiet(front):
        with busy_threads(model), pytest.raises(QueueDeadlineError):
            await front.submit(GenerationRequest(prompt=ASK.prompt, deadline_s=0.02))


async def test_a_request_that_is_tokenized_during_an_abort_goes_to_nobody(
    model: ServedModel,
) -> None:
    front = Front(model)
    async with quiet(front), asyncio.TaskGroup() as tasks:
        with busy_threads(model):
            asking = tasks.create_task(front.failure(ASK))
            await asyncio.sleep(0)
            front.pipeline.abort(UnavailableError("down"))
        assert type(await asking) is UnavailableError


async def test_a_text_that_cannot_fit_is_not_tokenized(model: ServedModel) -> None:
    front = Front(model)
    text = "a" * 10_000_000
    chat = ChatPrompt(messages=(ChatMessage(role="user", content=text),))
    async with quiet(front):
        with busy_threads(model):
            for prompt in (TextPrompt(text=text), chat):
                with pytest.raises(InvalidRequestError) as caught:
                    await front.submit(GenerationRequest(prompt=prompt))
                assert (caught.value.code, caught.value.param) == (
                    "context_length_exceeded",
                    "prompt",
                )


async def test_a_place_is_taken_before_the_request_is_known(model: ServedModel) -> None:
    front = Front(model, limits=PipelineLimits(max_requests=1))
    with front.pipeline.admitted("a"):
        with pytest.raises(OverloadedError), front.pipeline.admitted("b"):
            pass
        with pytest.raises(OverloadedError):
            await front.submit(ASK)
        # Who has a place takes no second one.
        request_id = await front.submit(ASK, is_admitted=True)
        # A place alone holds up no drain.
        await front.pipeline.wait_idle()
    assert front.links.decoding == [request_id]
    await front.submit(ASK)
    assert len(front.links.decoding) == 2


async def test_a_tenant_takes_no_more_than_its_share_of_the_places(model: ServedModel) -> None:
    front = Front(model, limits=PipelineLimits(max_requests=3, max_requests_per_tenant=2))
    pipeline = front.pipeline
    with pipeline.admitted("a"):
        with pipeline.admitted("a"):
            with pytest.raises(TenantLimitError) as caught, pipeline.admitted("a"):
                pass
            assert caught.value.is_retryable
            with pytest.raises(TenantLimitError):
                await front.submit(replace(ASK, tenant="a"))
            await front.submit(replace(ASK, tenant="b"))
            with pipeline.admitted("b"), pytest.raises(OverloadedError) as full:
                await front.submit(replace(ASK, tenant="b"))
            assert type(full.value) is OverloadedError
        await front.submit(replace(ASK, tenant="a"))


@pytest.mark.parametrize(
    ("number", "share", "part"),
    [(10, 1.0, None), (10, 0.5, 5), (10, 0.01, 1), (1, 0.5, None), (3, 0.99, 2)],
)
def test_a_tenants_part_is_none_where_it_would_be_all(
    number: int, share: float, part: int | None
) -> None:
    assert tenant_part(number, share) == part


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(),
        RouterSettings(api_key="of the operator"),
        RouterSettings(api_keys=(ApiKeySettings(tenant="a", key="key of a"),)),
    ],
    ids=["no keys", "one key", "one tenant"],
)
async def test_a_router_that_is_full_of_its_only_tenant_is_overloaded(
    model: ServedModel, settings: RouterSettings
) -> None:
    front = Front(model, limits=pipeline_limits(settings))
    with contextlib.ExitStack() as places:
        for _ in range(MAX_REQUESTS):
            places.enter_context(front.pipeline.admitted("a"))
        with pytest.raises(OverloadedError) as full, front.pipeline.admitted("a"):
            pass
    # Its client may go to another router; with 429 it would be told to ask less.
    assert full.value.code == "server_overloaded"


async def test_a_tenant_among_others_has_half_of_the_router(model: ServedModel) -> None:
    keys = tuple(ApiKeySettings(tenant=name, key=f"key of {name}") for name in ("a", "b"))
    front = Front(model, limits=pipeline_limits(RouterSettings(api_keys=keys)))
    with contextlib.ExitStack() as places:
        for _ in range(MAX_REQUESTS // 2):
            places.enter_context(front.pipeline.admitted("a"))
        with pytest.raises(TenantLimitError), front.pipeline.admitted("a"):
            pass


async def test_the_clients_own_name_of_a_request_is_logged_with_its_id(model: ServedModel) -> None:
    front = Front(model)
    with capture_logs() as logs:
        named = GenerationRequest(prompt=ASK.prompt, client_request_id="mine\n" + "x" * 200)
        request_id = await front.submit(named)
    (line,) = [entry for entry in logs if entry["event"] == "request.submitted"]
    assert (line["request_id"], line["endpoint"]) == (request_id, "test")
    assert line["label"] == "mine" + "x" * 123
