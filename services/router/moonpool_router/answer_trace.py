"""AnswerTrace: the router's own spans of one request: the wait in its queue, and each attempt."""

from __future__ import annotations

from moonpool.dispatch.effects import EndRequest, Placement
from moonpool.errors import MoonpoolError
from moonpool.telemetry import names
from moonpool.telemetry.spans import AttributeValue, OpenSpan, Tracer
from moonpool_router.placement_facts import candidates_json, placement_facts

#: Facts that have attributes of their own, or belong to the attempt before.
_OWN_NAMES = frozenset({"attempt", "reason", "after"})


class AnswerTrace:
    """Children of the request's root span. Workers' spans are children of the same root.

    Args:
        root: Ended by its owner, after `end`.
    """

    def __init__(self, tracer: Tracer, root: OpenSpan) -> None:
        self.root = root
        self._tracer = tracer
        #: The queue span or an attempt's: exactly one is open until the end.
        self._open = tracer.start(names.SPAN_QUEUE, parent=root.context)

    def on_placed(self, placement: Placement) -> None:
        """The wait, or the attempt before, is over; a new attempt begins."""
        if placement.previous_outcome:
            self._open.fail(placement.previous_outcome)
            self.root.event(names.EVENT_MIGRATED, reason=placement.previous_outcome)
        self._open.end()
        self._open = self._tracer.start(
            names.SPAN_ATTEMPT,
            parent=self.root.context,
            attributes=_placement_attributes(placement),
        )

    def on_first_token(self) -> None:
        self.root.event(names.EVENT_FIRST_TOKEN)

    def fail(self, error: MoonpoolError) -> None:
        """It ends for a reason that the request machine does not know."""
        self._open.fail(error.code)
        self.root.fail(error.code)
        self._open.end()

    def on_end(self, end: EndRequest) -> None:
        self.root.set_all(
            {
                names.ATTR_REQUEST_ID: end.request_id,
                names.ATTR_INPUT_TOKENS: end.usage.num_prompt_tokens,
                names.ATTR_OUTPUT_TOKENS: end.usage.num_completion_tokens,
                names.ATTR_CACHED_TOKENS: end.usage.num_cached_tokens,
                names.ATTR_PEER_TOKENS: end.usage.num_peer_tokens,
                names.ATTR_STORE_TOKENS: end.usage.num_store_tokens,
            }
        )
        if end.error_code is not None:
            self._open.fail(end.error_code)
            self.root.fail(end.error_code)
        self._open.end()


def _placement_attributes(placement: Placement) -> dict[str, AttributeValue]:
    """What was decided, and every term of the best candidates."""
    attributes: dict[str, AttributeValue] = {
        names.ATTR_REQUEST_ID: placement.request_id,
        names.ATTR_ATTEMPT: placement.attempt,
        names.ATTR_REASON: placement.decision.reason.value,
        **{
            f"moonpool.{name}": fact
            for name, fact in placement_facts(placement).items()
            if name not in _OWN_NAMES
        },
        names.ATTR_DECODE_CANDIDATES: candidates_json(placement.decode),
    }
    if placement.prefill is not None:
        attributes[names.ATTR_PREFILL_CANDIDATES] = candidates_json(placement.prefill)
    return attributes
