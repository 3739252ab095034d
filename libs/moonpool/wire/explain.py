"""Placements, with every term of every candidate <-> protobuf: what `moonpool explain` shows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from moonpool.api.v1 import admin_pb2 as pb
from moonpool.dispatch.effects import Placement
from moonpool.ids import RequestId
from moonpool.routing.config import PolicyName
from moonpool.routing.disagg_decider import DisaggDecision, DisaggReason, Prediction
from moonpool.routing.forecast import PlanKind
from moonpool.routing.selection import FILTER_NUMBER, FilterReason, Selection
from moonpool.routing.selector import PeerMatch, PlacementDecision, PrefillPlan
from moonpool.wire.fields import invalid, known, name, text
from moonpool.wire.request import attempt_from_pb, worker_key_from_pb, worker_key_to_pb

_POLICIES = {policy.value: policy for policy in PolicyName}
_REASONS = {reason.value: reason for reason in DisaggReason}
_KINDS = {kind.value: kind for kind in PlanKind}
_FILTERS: dict[str, FilterReason | None] = {
    "": None,
    **{reason.value: reason for reason in FilterReason},
}


def explanation_to_pb(
    request_id: str, placements: Iterable[Placement], *, now: float
) -> pb.ExplainReply:
    """Args: now: by the clock that `Placement.placed_at` is of."""
    return pb.ExplainReply(
        request_id=request_id,
        placements=[_placement_to_pb(placement, now) for placement in placements],
    )


def explanation_from_pb(message: pb.ExplainReply) -> tuple[Placement, ...]:
    """The placements; `placed_at` is negative: seconds before the reply.

    Raises:
        InvalidMessageError: A field is not what this version knows.
    """
    request_id = RequestId(name(message.request_id, "request_id"))
    return tuple(
        _placement_from_pb(request_id, item, f"placements[{index}]")
        for index, item in enumerate(message.placements)
    )


def _placement_to_pb(placement: Placement, now: float) -> pb.ExplainedPlacement:
    record, plan = placement.record, placement.plan
    return pb.ExplainedPlacement(
        attempt=placement.attempt,
        policy=record.policy.value,
        is_measured=record.is_measured,
        num_tokens=record.num_tokens,
        decode=_leg_to_pb(record.decode),
        disagg=_disagg_to_pb(placement.decision),
        prefill=_leg_to_pb(record.prefill) if record.prefill is not None else None,
        plan=pb.ExplainedPlan(
            worker=worker_key_to_pb(plan.key),
            kind=plan.kind.value,
            num_cached_tokens=plan.num_cached_tokens,
            num_read_tokens=plan.num_read_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            peer=worker_key_to_pb(plan.peer.key) if plan.peer is not None else None,
            num_peer_tokens=plan.peer.num_tokens if plan.peer is not None else 0,
            is_peer_store=plan.peer is not None and plan.peer.is_store,
            queue_s=plan.queue_s,
            load_s=plan.load_s,
            compute_s=plan.compute_s,
            exposed_s=plan.exposed_s,
        ),
        previous_outcome=placement.previous_outcome,
        age_s=max(now - placement.placed_at, 0.0),
    )


def _leg_to_pb(selection: Selection) -> pb.ExplainedLeg:
    return pb.ExplainedLeg(
        chosen=worker_key_to_pb(selection.key) if selection.key is not None else None,
        term_names=selection.term_names,
        candidates=[
            pb.ExplainedCandidate(
                worker=worker_key_to_pb(candidate.key),
                filtered=candidate.filtered.value if candidate.filtered is not None else "",
                score=candidate.score if candidate.score is not None else 0.0,
                terms=[value for _, value in candidate.terms],
            )
            for candidate in selection.candidates
        ],
        inputs=[pb.ExplainedInput(name=item, value=value) for item, value in selection.inputs],
    )


def _disagg_to_pb(decision: DisaggDecision) -> pb.ExplainedDisagg:
    prediction = decision.prediction
    return pb.ExplainedDisagg(
        is_remote=decision.is_remote,
        reason=decision.reason.value,
        num_uncached_tokens=decision.num_uncached_tokens,
        num_cached_tokens=decision.num_cached_tokens,
        threshold_tokens=decision.threshold_tokens,
        num_prefill_workers=decision.num_prefill_workers,
        least_queued_tokens=decision.least_queued_tokens,
        local_s=prediction.local_s if prediction is not None else None,
        remote_s=prediction.remote_s if prediction is not None else None,
        breaks_tpot=prediction is not None and prediction.breaks_tpot,
    )


def _placement_from_pb(
    request_id: RequestId, message: pb.ExplainedPlacement, path: str
) -> Placement:
    return Placement(
        request_id=request_id,
        attempt=attempt_from_pb(message.attempt, f"{path}.attempt"),
        record=PlacementDecision(
            policy=known(_POLICIES, message.policy, f"{path}.policy"),
            is_measured=message.is_measured,
            num_tokens=message.num_tokens,
            decode=_leg_from_pb(message.decode, f"{path}.decode"),
            disagg=_disagg_from_pb(message.disagg, f"{path}.disagg"),
            prefill=_leg_from_pb(message.prefill, f"{path}.prefill")
            if message.HasField("prefill")
            else None,
            plan=_plan_from_pb(message.plan, f"{path}.plan"),
        ),
        placed_at=-message.age_s,
        previous_outcome=text(message.previous_outcome, f"{path}.previous_outcome"),
    )


def _leg_from_pb(message: pb.ExplainedLeg, path: str) -> Selection:
    candidates, num_terms = message.candidates, len(message.term_names)
    for index, candidate in enumerate(candidates):
        if len(candidate.terms) != num_terms:
            raise invalid(f"{path}.candidates[{index}].terms", f"are not {num_terms}")
    return Selection(
        key=worker_key_from_pb(message.chosen, f"{path}.chosen")
        if message.HasField("chosen")
        else None,
        keys=tuple(
            worker_key_from_pb(candidate.worker, f"{path}.candidates[{index}].worker")
            for index, candidate in enumerate(candidates)
        ),
        filters=np.array(
            [
                FILTER_NUMBER[
                    known(_FILTERS, candidate.filtered, f"{path}.candidates[{index}].filtered")
                ]
                for index, candidate in enumerate(candidates)
            ],
            np.int8,
        ),
        term_names=tuple(name(term_name, f"{path}.term_names") for term_name in message.term_names),
        values=np.array(
            [[candidate.score, *candidate.terms] for candidate in candidates], np.float64
        )
        .reshape(len(candidates), 1 + num_terms)
        .T,
        inputs=tuple((name(item.name, f"{path}.inputs"), item.value) for item in message.inputs),
    )


def _disagg_from_pb(message: pb.ExplainedDisagg, path: str) -> DisaggDecision:
    prediction: Prediction | None = None
    if message.HasField("local_s") and message.HasField("remote_s"):
        if math.isnan(message.local_s) or math.isnan(message.remote_s):
            raise invalid(path, "predicts what is not a number")
        prediction = Prediction(
            local_s=message.local_s,
            remote_s=message.remote_s,
            breaks_tpot=message.breaks_tpot,
        )
    return DisaggDecision(
        is_remote=message.is_remote,
        reason=known(_REASONS, message.reason, f"{path}.reason"),
        num_uncached_tokens=message.num_uncached_tokens,
        num_cached_tokens=message.num_cached_tokens,
        threshold_tokens=message.threshold_tokens,
        num_prefill_workers=message.num_prefill_workers,
        least_queued_tokens=message.least_queued_tokens
        if message.HasField("least_queued_tokens")
        else None,
        prediction=prediction,
    )


def _plan_from_pb(message: pb.ExplainedPlan, path: str) -> PrefillPlan:
    return PrefillPlan(
        key=worker_key_from_pb(message.worker, f"{path}.worker"),
        kind=known(_KINDS, message.kind, f"{path}.kind"),
        num_cached_tokens=message.num_cached_tokens,
        num_read_tokens=message.num_read_tokens,
        num_computed_tokens=message.num_computed_tokens,
        peer=PeerMatch(
            key=worker_key_from_pb(message.peer, f"{path}.peer"),
            num_tokens=message.num_peer_tokens,
            is_store=message.is_peer_store,
        )
        if message.HasField("peer")
        else None,
        queue_s=message.queue_s,
        load_s=message.load_s,
        compute_s=message.compute_s,
        exposed_s=message.exposed_s,
    )
