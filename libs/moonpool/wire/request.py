"""Requests, attempts, worker keys and token runs <-> protobuf."""

from __future__ import annotations

from moonpool.api.v1 import request_pb2 as pb
from moonpool.ids import AttemptId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.wire.fields import MAX_TOKENS, between, finite, invalid, name, text, tokens

#: Attempts of one request; the router allows a handful.
MAX_ATTEMPT = 1_000_000

#: vLLM's bound of a cache salt.
MAX_SALT_LENGTH = 1_024

_PB_BY_FINISH: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.INVALID_OUTPUT: pb.FINISH_REASON_INVALID_OUTPUT,
}
_FINISH_BY_PB: dict[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    **{value: reason for reason, value in _PB_BY_FINISH.items()},
}


def request_to_pb(request: InferenceRequest) -> pb.Request:
    sampling = request.sampling
    return pb.Request(
        request_id=request.request_id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        emitted_token_ids=request.emitted_token_ids,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
        ),
        arrival_unix_s=request.arrival_unix_s,
        tenant=request.tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        traceparent=request.traceparent,
    )


def request_from_pb(message: pb.Request, path: str = "request") -> InferenceRequest:
    """Raises InvalidMessageError."""
    request = InferenceRequest(
        request_id=RequestId(name(message.request_id, f"{path}.request_id")),
        model=text(message.model, f"{path}.model"),
        prompt_token_ids=tokens(
            message.prompt_token_ids, f"{path}.prompt_token_ids", is_required=True
        ),
        emitted_token_ids=tokens(message.emitted_token_ids, f"{path}.emitted_token_ids"),
        sampling=_sampling_from_pb(message.sampling, f"{path}.sampling"),
        arrival_unix_s=finite(message.arrival_unix_s, f"{path}.arrival_unix_s", low=0.0, high=1e12),
        tenant=name(message.tenant, f"{path}.tenant"),
        priority=message.priority,
        cache_salt=text(message.cache_salt, f"{path}.cache_salt", max_length=MAX_SALT_LENGTH),
        adapter=text(message.adapter, f"{path}.adapter"),
        traceparent=text(message.traceparent, f"{path}.traceparent"),
    )
    if request.num_remaining_tokens < 1:
        raise invalid(
            f"{path}.emitted_token_ids",
            f"has {len(request.emitted_token_ids)} tokens; allowed is less than max_tokens "
            f"= {request.sampling.max_tokens}",
        )
    return request


def attempt_id_to_pb(attempt_id: AttemptId) -> pb.AttemptId:
    return pb.AttemptId(request_id=attempt_id.request_id, attempt=attempt_id.attempt)


def attempt_id_from_pb(message: pb.AttemptId, path: str = "attempt_id") -> AttemptId:
    """Raises InvalidMessageError."""
    return AttemptId(
        RequestId(name(message.request_id, f"{path}.request_id")),
        attempt_from_pb(message.attempt, f"{path}.attempt"),
    )


def attempt_from_pb(attempt: int, path: str) -> int:
    """Attempts count from 1. Raises InvalidMessageError."""
    return between(attempt, path, low=1, high=MAX_ATTEMPT)


def worker_key_to_pb(key: WorkerKey) -> pb.WorkerKey:
    return pb.WorkerKey(worker_id=key.worker_id, incarnation=key.incarnation)


def worker_key_from_pb(message: pb.WorkerKey, path: str = "worker") -> WorkerKey:
    """Raises InvalidMessageError."""
    return WorkerKey(
        WorkerId(name(message.worker_id, f"{path}.worker_id")),
        Incarnation(name(message.incarnation, f"{path}.incarnation", max_length=64)),
    )


def token_run_to_pb(run: TokenRun) -> pb.TokenRun:
    return pb.TokenRun(
        choice=run.choice,
        first_position=run.first_position,
        token_ids=run.token_ids,
        finish_reason=finish_reason_to_pb(run.finish_reason),
    )


def token_run_from_pb(message: pb.TokenRun, path: str = "run") -> TokenRun:
    """Raises InvalidMessageError."""
    run = TokenRun(
        choice=between(message.choice, f"{path}.choice", low=0, high=1_023),
        first_position=between(
            message.first_position, f"{path}.first_position", low=0, high=MAX_TOKENS
        ),
        token_ids=tokens(message.token_ids, f"{path}.token_ids"),
        finish_reason=finish_reason_from_pb(message.finish_reason, f"{path}.finish_reason"),
    )
    if not run.token_ids and run.finish_reason is None:
        raise invalid(path, "has neither tokens nor a finish reason")
    return run


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _PB_BY_FINISH[reason]


def finish_reason_from_pb(value: int, path: str = "finish_reason") -> FinishReason | None:
    """Raises InvalidMessageError."""
    if value not in _FINISH_BY_PB:
        raise invalid(path, f"is {value}, which this version does not know")
    return _FINISH_BY_PB[value]


def _sampling_from_pb(message: pb.Sampling, path: str) -> SamplingParams:
    top_p = finite(message.top_p, f"{path}.top_p", low=0.0, high=1.0)
    if top_p == 0.0:
        raise invalid(f"{path}.top_p", "is 0; allowed is above 0 up to 1")
    return SamplingParams(
        temperature=finite(message.temperature, f"{path}.temperature", low=0.0, high=100.0),
        top_p=top_p,
        top_k=between(message.top_k, f"{path}.top_k", low=0, high=0x7FFF_FFFF),
        seed=message.seed,
        max_tokens=between(message.max_tokens, f"{path}.max_tokens", low=1, high=MAX_TOKENS),
        ignore_eos=message.ignore_eos,
        stop_token_ids=tokens(message.stop_token_ids, f"{path}.stop_token_ids"),
    )
