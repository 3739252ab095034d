"""What happens to the router's request machine. A shell turns IO into these."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moonpool.handoff.messages import WorkerMessage
from moonpool.ids import RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.routing.worker_view import WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """An admitted request: validated, tokenized, seeded; `emitted_token_ids` is empty."""

    request: InferenceRequest
    #: Time that is left, in seconds; without any it ends at once.
    deadline_s: float
    #: Of it, how much may have passed when it waits for workers and has no token; inf: all.
    queue_timeout_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The client went away."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStopped:
    """A stop string was found in the text: the answer ends here, whatever the workers go on to draw."""

    request_id: RequestId
    #: How many of the emitted tokens count: those up to the one that completed the stop string.
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """The router's stream to this worker stands. Also a change of role or address of a known one."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The router's stream to this worker was cut: what ran there is dead, there or here."""

    key: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessageReceived:
    key: WorkerKey
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """Load from a frame or a heartbeat; after the messages of the same frame."""

    key: WorkerKey
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Take no new request; finish those that are here."""


DispatchEvent = (
    RequestArrived
    | RequestCancelled
    | RequestStopped
    | WorkerJoined
    | WorkerLost
    | WorkerMessageReceived
    | LoadReported
    | DrainRequested
)
