"""RequestPipeline: from a client's request to its answer. Every door (gRPC, HTTP) stands on it.

    async with pipeline.submit(request, endpoint=...) as answer:     # raises before a byte is sent, if it will
        async for event in answer: ...                 # GenerationChunk ..., GenerationDone; or raises

Rules
- What can be known to fail, fails on entry: a door can still choose its status. A door that has yet to read
  a request's body takes a place for it first (`admitted`).
- Leaving the context ends the request, whatever state it is in: a door whose client went away just
  leaves. A door bounds each of its writes (`CLIENT_STALL_S`), so that a client that does not read is
  a client that went away.
- Templates, tokenization and the block keys of long prompts run in threads: the loop serves everyone's
  tokens. They have the request's own deadline.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import Protocol

import structlog

from moonpool.clock import Clock
from moonpool.dispatch.events import RequestArrived, RequestCancelled
from moonpool.errors import (
    CancelledByClientError,
    MoonpoolError,
    NotFoundError,
    OverloadedError,
    QueueDeadlineError,
    TenantLimitError,
    UnavailableError,
)
from moonpool.ids import RequestId
from moonpool.inference.answer_text import AnswerText
from moonpool.inference.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    check_cache_salt,
    check_stop,
    resolve_sampling,
)
from moonpool.inference.request import InferenceRequest
from moonpool.rpc.metadata import clean_label
from moonpool.telemetry import names
from moonpool.telemetry.spans import OpenSpan, Tracer, TraceRing
from moonpool_router.answer import Answer
from moonpool_router.answer_trace import AnswerTrace
from moonpool_router.books import RouterBooks
from moonpool_router.dispatch_loop import DispatchLoop
from moonpool_router.index_feed import IndexFeed
from moonpool_router.served_model import ServedModel

#: Requests that a router holds at once.
MAX_REQUESTS = 1_024
#: A client that takes nothing for this long is gone.
CLIENT_STALL_S = 30.0
#: What a client is told when nobody can serve it now.
_RETRY_AFTER_S = 2.0

log = structlog.get_logger("moonpool.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    max_requests: int = MAX_REQUESTS
    #: Of these, how many may be one tenant's; None: all.
    max_requests_per_tenant: int | None = None
    #: How long a request may wait for workers before it has a token.
    queue_timeout_s: float = 60.0
    #: Deadline of a request whose client sets none.
    request_timeout_s: float = 600.0


class Frontdoor(Protocol):
    """What a door needs: RequestPipeline, or a test's own."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def admitted(self, tenant: str) -> AbstractContextManager[None]: ...

    def submit(
        self,
        request: GenerationRequest,
        *,
        endpoint: str,
        request_id: RequestId | None = None,
        is_admitted: bool = False,
    ) -> AbstractAsyncContextManager[AnswerStream]: ...


class AnswerStream(Protocol):
    """One answer, read once."""

    @property
    def request_id(self) -> RequestId: ...

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...


class RequestPipeline:
    """See the file's head. Implements Frontdoor."""

    def __init__(
        self,
        model: ServedModel,
        loop: DispatchLoop,
        feed: IndexFeed,
        *,
        limits: PipelineLimits,
        tracer: Tracer,
        traces: TraceRing,
        books: RouterBooks,
        clock: Clock,
    ) -> None:
        self._model = model
        self._loop = loop
        self._feed = feed
        self._tracer = tracer
        self._traces = traces
        self._books = books
        self._limits = limits
        self._clock = clock
        self._is_draining = False
        #: Places taken: `max_requests` at most.
        self._num_admitted = 0
        #: Of these, by tenant; a tenant without any is not there.
        self._num_admitted_by_tenant: Counter[str] = Counter()
        #: Submitted, tokenizing ones included.
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self._model.facts.name

    @property
    def max_model_len(self) -> int:
        """The model's, or less if every worker that lives allows less."""
        own = self._model.facts.max_model_len
        return min(own, self._loop.max_model_len or own)

    def drain(self) -> None:
        """Refuse what is new from here on."""
        self._is_draining = True

    def abort(self, error: MoonpoolError) -> None:
        """End every answer with `error`; a request that is still being tokenized goes to no worker."""
        self._is_draining = True
        self._loop.drain()
        self._loop.fail_all(error)

    async def wait_idle(self) -> None:
        """Return when every door has left every answer."""
        await self._idle.wait()

    @contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """A place among the requests that the router holds; within it, `submit(is_admitted=True)`.

        Raises:
            TenantLimitError: It holds as many of this tenant's as one may have.
            OverloadedError: The router holds as many requests as it may.
            UnavailableError: Draining.
        """
        self._refuse_if_draining()
        max_own = self._limits.max_requests_per_tenant
        if max_own is not None and self._num_admitted_by_tenant[tenant] >= max_own:
            raise TenantLimitError(
                f"The server holds {max_own} requests of yours, as many as one may have.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._num_admitted >= self._limits.max_requests:
            raise OverloadedError(
                f"The server holds {self._limits.max_requests} requests, as many as it may.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_admitted += 1
        self._num_admitted_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._num_admitted -= 1
            self._num_admitted_by_tenant[tenant] -= 1
            if not self._num_admitted_by_tenant[tenant]:
                del self._num_admitted_by_tenant[tenant]

    @asynccontextmanager
    async def submit(
        self,
        request: GenerationRequest,
        *,
        endpoint: str,
        request_id: RequestId | None = None,
        is_admitted: bool = False,
    ) -> AsyncIterator[Answer]:
        """Check, tokenize and place one request; see the file's head.

        Args:
            endpoint: Which door it came through, for the books: one of few.
            request_id: Of a door that tells it even where this fails; minted here if None.
            is_admitted: It has its place (`admitted`); else it takes one here.

        Raises:
            InvalidRequestError, NotFoundError: It can never succeed as it is.
            QueueDeadlineError: Its deadline has passed, or does so before it is tokenized.
            TenantLimitError: It holds as many of this tenant's as one may have.
            OverloadedError: The router holds as many requests as it may.
            UnavailableError: Draining, or nobody can serve it.
        """
        arrived_s, arrived_unix_s = self._clock.now(), self._clock.unix()
        answer: Answer | None = None
        failure: MoonpoolError | None = None
        root = self._root_span(request)
        place = ExitStack()
        self._num_requests += 1
        self._idle.clear()
        try:
            if not is_admitted:
                place.enter_context(self.admitted(request.tenant))
            self._check(request)
            request_id = request_id or RequestId(uuid.uuid4().hex)
            log.info(
                "request.submitted",
                request_id=request_id,
                label=clean_label(request.client_request_id) or None,
                endpoint=endpoint,
            )
            self._traces.begin(request_id, root.context)
            deadline_at = arrived_s + self._timeout_s(request)
            async with self._in_time(deadline_at):
                answer = await self._prepare(request, request_id, root, arrived_unix_s)
            self._loop.begin(
                answer,
                RequestArrived(
                    request=answer.request,
                    deadline_s=max(deadline_at - self._clock.now(), 0.0),
                    queue_timeout_s=self._limits.queue_timeout_s,
                ),
            )
            yield answer
        except MoonpoolError as error:
            failure = error
            root.fail(error.code)
            raise
        finally:
            if answer is not None:
                if not answer.is_ended:
                    self._loop.handle(RequestCancelled(request_id=answer.request_id))
                self._loop.forget(answer.request_id)
            root.end()
            self._keep_books(answer, failure, endpoint, self._clock.now() - arrived_s)
            place.close()
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    def _timeout_s(self, request: GenerationRequest) -> float:
        """Raises QueueDeadlineError if the client's has passed."""
        if request.deadline_s is None:
            return self._limits.request_timeout_s
        if request.deadline_s <= 0:
            raise QueueDeadlineError("The deadline had passed when the request came.")
        return min(request.deadline_s, self._limits.request_timeout_s)

    @asynccontextmanager
    async def _in_time(self, deadline_at: float) -> AsyncIterator[None]:
        """For what comes before the dispatch, which then watches the deadline itself."""
        try:
            async with asyncio.timeout(deadline_at - self._clock.now()):
                yield
        except TimeoutError:
            raise QueueDeadlineError("The deadline passed before the prompt was read.") from None

    def _keep_books(
        self,
        answer: Answer | None,
        failure: MoonpoolError | None,
        endpoint: str,
        duration_s: float,
    ) -> None:
        if failure is not None and not isinstance(failure, CancelledByClientError):
            is_rejected = answer is None or not answer.is_placed
            self._books.failed(failure, endpoint=endpoint, is_rejected=is_rejected)
        elif answer is not None and answer.done is not None:
            self._books.done(answer.done, endpoint=endpoint, duration_s=duration_s)
        else:
            phase = "tokenize" if answer is None else "stream" if answer.num_tokens else "wait"
            self._books.cancelled(endpoint=endpoint, phase=phase)

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise UnavailableError(
                "The server is shutting down.", code="shutting_down", retry_after_s=_RETRY_AFTER_S
            )

    def _check(self, request: GenerationRequest) -> None:
        self._refuse_if_draining()
        if request.model not in ("", self.model_name):
            raise NotFoundError(
                f"The model {request.model[:64]!r} does not exist here; "
                f"available: {self.model_name!r}.",
                code="model_not_found",
                param="model",
            )
        reason = self._loop.why_not_ready()
        if reason:
            raise UnavailableError(reason, code="model_loading", retry_after_s=_RETRY_AFTER_S)

    async def _prepare(
        self,
        request: GenerationRequest,
        request_id: RequestId,
        root: OpenSpan,
        arrived_unix_s: float,
    ) -> Answer:
        check_stop(request.options.stop)
        check_cache_salt(request.cache_salt)
        with self._tracer.start(names.SPAN_TOKENIZE, parent=root.context):
            token_ids = await self._model.token_ids(
                request.prompt, max_model_len=self.max_model_len
            )
        facts = self._model.facts
        sampling = resolve_sampling(
            request.options,
            defaults=facts.defaults,
            num_prompt_tokens=len(token_ids),
            max_model_len=self.max_model_len,
            vocab_size=facts.vocab_size,
            minted_seed=secrets.randbits(64),
        )
        inference = InferenceRequest(
            request_id=request_id,
            model=facts.name,
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_unix_s=arrived_unix_s,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            traceparent=root.traceparent,
        )
        tokenized_unix_s = self._clock.unix()
        await self._feed.prepare(inference, self._model.executor)
        # From here to its dispatch nothing waits: what was prepared is forgotten when it ends.
        return Answer(
            inference,
            AnswerText(self._model.detokenizer(request.prompt, token_ids), request.options.stop),
            trace=AnswerTrace(self._tracer, root),
            books=self._books,
            arrived_unix_s=arrived_unix_s,
            tokenized_unix_s=tokenized_unix_s,
        )

    def _root_span(self, request: GenerationRequest) -> OpenSpan:
        is_chat = isinstance(request.prompt, ChatPrompt)
        operation = names.SPAN_CHAT if is_chat else names.SPAN_COMPLETION
        return self._tracer.start(
            f"{operation} {self.model_name}",
            parent=request.traceparent,
            attributes={
                names.ATTR_OPERATION: operation,
                names.ATTR_PROVIDER: "moonpool",
                names.ATTR_MODEL: self.model_name,
            },
        )
