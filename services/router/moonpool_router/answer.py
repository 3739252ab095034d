"""Answer: one request between the loop that hears workers and the coroutine that writes to a client.

It is not a queue: what a slow client has not taken yet merges into one chunk, so that it never holds
more than the answer itself. One writer (the dispatch loop, synchronously) and one reader (`events`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.errors import InternalError, MoonpoolError
from moonpool.ids import RequestId
from moonpool.inference.answer_text import AnswerText
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    GenerationEvent,
    PlacementSummary,
)
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.ttft import FirstTokenMoments, split_ttft
from moonpool.routing.disagg_decider import DisaggDecision
from moonpool_router.answer_trace import AnswerTrace
from moonpool_router.books import RouterBooks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """When a worker computed the prompt, by that worker's wall clock."""

    started_unix_s: float
    ended_unix_s: float


class Answer:
    """Read it once with `async for`; the last event is GenerationDone, a failure raises instead.

    Args:
        arrived_unix_s, tokenized_unix_s: The router's wall clock.
    """

    def __init__(
        self,
        request: InferenceRequest,
        text: AnswerText,
        *,
        trace: AnswerTrace,
        books: RouterBooks,
        arrived_unix_s: float,
        tokenized_unix_s: float,
    ) -> None:
        self.request = request
        self.trace = trace
        self._books = books
        self._text = text
        self._moments = FirstTokenMoments(
            arrived=arrived_unix_s,
            tokenized=tokenized_unix_s,
            placed=tokenized_unix_s,
            prefill_started=None,
            prefill_ended=None,
            first_token=tokenized_unix_s,
        )
        #: When the last tokens came; None before the first.
        self._last_token_unix_s: float | None = None
        self._placement: Placement | None = None
        self._num_attempts = 0
        self._pending_text: list[str] = []
        self._pending_ids: list[int] = []
        self._num_taken = 0
        self._end: GenerationDone | MoonpoolError | None = None
        #: The reader has had GenerationDone.
        self._is_read = False
        self._wakeup = asyncio.Event()

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._text.num_tokens

    @property
    def is_placed(self) -> bool:
        """A worker has been given it, if only for a moment."""
        return self._placement is not None

    @property
    def done(self) -> GenerationDone | None:
        """How it ended, if it ended well; the client may not have read it."""
        return self._end if isinstance(self._end, GenerationDone) else None

    @property
    def is_ended(self) -> bool:
        """The request machine is through with it; the client may not be."""
        return self._end is not None

    # -- the writer's side: never blocks --

    def on_placed(self, placement: Placement, unix_s: float) -> None:
        if self._end is not None:
            # Failed from outside; its reader is about to leave.
            return
        self._placement = placement
        self._num_attempts = placement.attempt
        self.trace.on_placed(placement)
        self._books.placed(placement, num_emitted=self._text.num_tokens)
        if self._last_token_unix_s is None:
            self._moments = replace(self._moments, placed=unix_s)

    def on_prefilled(self, times: PrefillTimes) -> None:
        """The prefill of the attempt that drew the first token; later ones do not count."""
        if self._moments.prefill_started is None:
            self._moments = replace(
                self._moments,
                prefill_started=times.started_unix_s,
                prefill_ended=times.ended_unix_s,
            )

    def on_tokens(self, run: TokenRun, unix_s: float) -> bool:
        """More of the answer. True if its text is complete: a stop string was found."""
        if self._text.is_stopped_by_text:
            return False
        if run.token_ids and self._last_token_unix_s is None:
            self.trace.on_first_token()
            self._moments = replace(self._moments, first_token=unix_s)
        piece = self._text.push(run)
        if piece.token_ids:
            last = self._last_token_unix_s
            self._books.tokens(
                len(piece.token_ids), gap_s=None if last is None else max(unix_s - last, 0.0)
            )
            self._last_token_unix_s = unix_s
        if piece.text:
            self._pending_text.append(piece.text)
        self._pending_ids += piece.token_ids
        if piece.text or piece.token_ids:
            self._wakeup.set()
        return self._text.is_stopped_by_text

    def on_end(self, end: EndRequest) -> None:
        if self._end is not None:
            # Failed from outside before the request machine was through with it.
            return
        self.trace.on_end(end)
        self._end = self._ended(end)
        self._wakeup.set()

    def fail(self, error: MoonpoolError) -> None:
        """End it from outside the request machine (the router goes down)."""
        if self._end is None:
            self.trace.fail(error)
            self._end = error
            self._wakeup.set()

    # -- the reader's side --

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self

    async def __anext__(self) -> GenerationEvent:
        """The next event; giving up the wait for it (a timeout) loses nothing."""
        while True:
            if self._pending_text or self._pending_ids:
                return self._take()
            if isinstance(self._end, MoonpoolError):
                raise self._end
            if self._end is not None and self._is_read:
                raise StopAsyncIteration
            if self._end is not None:
                self._is_read = True
                return self._end
            self._wakeup.clear()
            await self._wakeup.wait()

    def _take(self) -> GenerationChunk:
        chunk = GenerationChunk(
            request_id=self.request_id,
            text="".join(self._pending_text),
            token_ids=tuple(self._pending_ids),
            first_position=self._num_taken,
        )
        self._num_taken += len(self._pending_ids)
        self._pending_text.clear()
        self._pending_ids.clear()
        return chunk

    def _ended(self, end: EndRequest) -> GenerationDone | MoonpoolError:
        if end.error is not None:
            return end.error
        finish_reason = FinishReason.STOP if self._text.is_stopped_by_text else end.finish_reason
        if finish_reason is None or finish_reason is FinishReason.INVALID_OUTPUT:
            return InternalError(
                "The model's output was not finite for this request.", code="model_output_invalid"
            )
        return GenerationDone(
            request_id=self.request_id,
            model=self.request.model,
            finish_reason=finish_reason,
            usage=replace(end.usage, num_completion_tokens=self._text.num_tokens),
            timing=split_ttft(self._moments),
            placement=self._summary(),
        )

    def _summary(self) -> PlacementSummary:
        placement = self._placement
        if placement is None:
            return PlacementSummary(
                prefill_worker="", decode_worker="", num_attempts=0, reason="never placed"
            )
        decision = placement.decision
        decode_key = placement.decode.key
        prefill_key = placement.prefill.key if placement.prefill is not None else None
        return PlacementSummary(
            prefill_worker=prefill_key.worker_id if prefill_key is not None else "",
            decode_worker=decode_key.worker_id if decode_key is not None else "",
            num_attempts=self._num_attempts,
            reason=_reason(decision),
        )


def _reason(decision: DisaggDecision) -> str:
    """Why it was prefilled where it was, in words."""
    words = (
        f"{decision.reason}: {decision.num_uncached_tokens} uncached tokens, threshold "
        f"{decision.threshold_tokens}, {decision.num_prefill_workers} prefill workers"
    )
    if (prediction := decision.prediction) is None:
        return words
    return (
        f"{words}, {prediction.local_s * 1e3:.0f} ms on the decode worker, "
        f"{prediction.remote_s * 1e3:.0f} ms elsewhere"
    )
