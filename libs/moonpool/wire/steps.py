"""What a worker tells of its engine's last steps <-> protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.wire.fields import finite

_MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of an engine, by its host's wall clock."""

    step: int
    #: The commands before it were taken and its plan made; its tokens were drawn.
    planned_unix_ns: int
    computed_unix_ns: int
    #: Tokens that it computed: one for each request that decodes, and those of chunks.
    num_tokens: int
    forward_s: float
    logits_s: float
    sample_s: float


def steps_to_pb(records: Iterable[StepRecord]) -> pb.StepsReply:
    return pb.StepsReply(
        steps=[
            pb.StepRecord(
                step=record.step,
                planned_unix_ns=record.planned_unix_ns,
                computed_unix_ns=record.computed_unix_ns,
                num_tokens=record.num_tokens,
                forward_s=record.forward_s,
                logits_s=record.logits_s,
                sample_s=record.sample_s,
            )
            for record in records
        ]
    )


def steps_from_pb(message: pb.StepsReply) -> tuple[StepRecord, ...]:
    """Raises InvalidMessageError."""
    return tuple(
        StepRecord(
            step=record.step,
            planned_unix_ns=record.planned_unix_ns,
            computed_unix_ns=record.computed_unix_ns,
            num_tokens=record.num_tokens,
            forward_s=_seconds(record.forward_s, f"steps[{index}].forward_s"),
            logits_s=_seconds(record.logits_s, f"steps[{index}].logits_s"),
            sample_s=_seconds(record.sample_s, f"steps[{index}].sample_s"),
        )
        for index, record in enumerate(message.steps)
    )


def _seconds(value: float, path: str) -> float:
    return finite(value, path, low=0.0, high=_MAX_SECONDS)
