"""The stream between a router and a worker: commands one way, frames the other <-> protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.core.protocol import HandBackReason, HandedBack, Refused, RefuseReason, TokensReady
from moonpool.handoff.messages import (
    AbortRequest,
    DecodeRequest,
    PeerPrefix,
    PrefillRequest,
    RouterMessage,
    SourceRef,
    WorkerMessage,
)
from moonpool.ids import AttemptId, RequestId
from moonpool.wire.fields import (
    MAX_TOKENS,
    InvalidMessageError,
    address,
    between,
    invalid,
    known,
    name,
    whole_milliseconds,
)
from moonpool.wire.request import (
    attempt_from_pb,
    attempt_id_from_pb,
    attempt_id_to_pb,
    request_from_pb,
    request_to_pb,
    token_run_from_pb,
    token_run_to_pb,
    worker_key_from_pb,
    worker_key_to_pb,
)
from moonpool.wire.spans import Span, span_from_pb, span_to_pb
from moonpool.wire.worker import (
    LoadReport,
    LoadValues,
    RouterHello,
    WorkerHello,
    load_from_pb,
    load_to_pb,
    router_hello_from_pb,
    router_hello_to_pb,
    worker_hello_from_pb,
    worker_hello_to_pb,
)

_MAX_DEADLINE_MS = 7 * 24 * 3_600 * 1_000
_MAX_REPORTS = 65_536

_REFUSE_REASONS = {reason.value: reason for reason in RefuseReason}
_HAND_BACK_REASONS = {reason.value: reason for reason in HandBackReason}


class ReportValues(Protocol):
    """One report and the role that made it, as a worker's outbox holds it."""

    @property
    def message(self) -> WorkerMessage: ...
    @property
    def is_prefill_side(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One report of a frame."""

    message: WorkerMessage
    #: True if the attempt's prefill side made it.
    is_prefill_side: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFrame:
    """One step's news. Token reports come before the ends of attempts."""

    reports: tuple[WorkerReport, ...]
    load: LoadReport
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    """The router is there and has nothing to say."""


# -- router -> worker --


def router_message_to_pb(message: RouterHello | RouterMessage | Ping) -> pb.RouterMessage:
    match message:
        case RouterHello():
            return pb.RouterMessage(hello=router_hello_to_pb(message))
        case Ping():
            return pb.RouterMessage(ping=pb.Ping())
        case PrefillRequest():
            prefill = pb.PrefillCommand(
                request=request_to_pb(message.request),
                attempt=message.attempt,
                deadline_ms=_deadline_ms(message.deadline_s),
                peer=_peer_to_pb(message.peer),
            )
            return pb.RouterMessage(prefill=prefill)
        case DecodeRequest():
            source = message.source
            decode = pb.DecodeCommand(
                request=request_to_pb(message.request),
                attempt=message.attempt,
                deadline_ms=_deadline_ms(message.deadline_s),
                source=pb.Source(worker=worker_key_to_pb(source.key), grpc_address=source.address)
                if source is not None
                else None,
                peer=_peer_to_pb(message.peer),
            )
            return pb.RouterMessage(decode=decode)
        case AbortRequest():
            abort = pb.AbortCommand(
                attempt_id=attempt_id_to_pb(message.attempt_id), choice=message.choice
            )
            return pb.RouterMessage(abort=abort)


def router_message_from_pb(message: pb.RouterMessage) -> RouterHello | RouterMessage | Ping:
    """Raises InvalidMessageError, and FailedPreconditionError for a hello of another protocol."""
    match message.WhichOneof("kind"):
        case "hello":
            return router_hello_from_pb(message.hello)
        case "prefill":
            prefill = message.prefill
            return PrefillRequest(
                request=request_from_pb(prefill.request, "prefill.request"),
                attempt=attempt_from_pb(prefill.attempt, "prefill.attempt"),
                deadline_s=_deadline_s(prefill.deadline_ms, "prefill.deadline_ms"),
                peer=_peer_from_pb(prefill.peer, "prefill.peer")
                if prefill.HasField("peer")
                else None,
            )
        case "decode":
            decode = message.decode
            return DecodeRequest(
                request=request_from_pb(decode.request, "decode.request"),
                attempt=attempt_from_pb(decode.attempt, "decode.attempt"),
                deadline_s=_deadline_s(decode.deadline_ms, "decode.deadline_ms"),
                source=_source_from_pb(decode.source, "decode.source")
                if decode.HasField("source")
                else None,
                peer=_peer_from_pb(decode.peer, "decode.peer") if decode.HasField("peer") else None,
            )
        case "abort":
            abort = message.abort
            return AbortRequest(
                attempt_id=attempt_id_from_pb(abort.attempt_id, "abort.attempt_id"),
                choice=between(abort.choice, "abort.choice", low=0, high=1_023)
                if abort.HasField("choice")
                else None,
            )
        case "ping":
            return Ping()
        case _:
            raise invalid("kind", "is not set, or is one that this version does not know")


def refusal_of(message: pb.RouterMessage) -> WorkerReport | None:
    """What a worker answers to a Prefill or Decode that `router_message_from_pb` does not take.

    None for other messages, and where it cannot be read whose attempt it is.
    """
    kind = message.WhichOneof("kind")
    if kind not in ("prefill", "decode"):
        return None
    command = message.prefill if kind == "prefill" else message.decode
    try:
        attempt_id = AttemptId(
            RequestId(name(command.request.request_id, f"{kind}.request.request_id")),
            attempt_from_pb(command.attempt, f"{kind}.attempt"),
        )
    except InvalidMessageError:
        return None
    return WorkerReport(
        message=Refused(attempt_id=attempt_id, reason=RefuseReason.NEVER_FITS),
        is_prefill_side=kind == "prefill",
    )


# -- worker -> router --


def hello_message_to_pb(hello: WorkerHello) -> pb.WorkerMessage:
    return pb.WorkerMessage(hello=worker_hello_to_pb(hello))


def frame_message_to_pb(
    reports: Iterable[ReportValues], load: LoadValues, spans: Iterable[Span] = ()
) -> pb.WorkerMessage:
    """One frame. Within each kind the order of `reports` is kept."""
    frame = pb.WorkerFrame(
        load=load_to_pb(load, tells_fits=True), spans=[span_to_pb(span) for span in spans]
    )
    for report in reports:
        message = report.message
        match message:
            case TokensReady():
                frame.tokens.append(
                    pb.TokenReport(
                        attempt_id=attempt_id_to_pb(message.attempt_id),
                        run=token_run_to_pb(message.run),
                        num_cached_tokens=message.num_cached_tokens,
                        num_peer_tokens=message.num_peer_tokens,
                        is_prefill_side=report.is_prefill_side,
                        num_peer_held_tokens=message.num_peer_held_tokens,
                    )
                )
            case Refused():
                frame.refused.append(
                    pb.RefusedReport(
                        attempt_id=attempt_id_to_pb(message.attempt_id),
                        reason=message.reason.value,
                        is_prefill_side=report.is_prefill_side,
                    )
                )
            case HandedBack():
                frame.handed_back.append(
                    pb.HandedBackReport(
                        attempt_id=attempt_id_to_pb(message.attempt_id),
                        reason=message.reason.value,
                        is_prefill_side=report.is_prefill_side,
                    )
                )
    return pb.WorkerMessage(frame=frame)


def worker_message_from_pb(message: pb.WorkerMessage) -> WorkerHello | WorkerFrame:
    """Raises InvalidMessageError, and FailedPreconditionError for a hello of another protocol."""
    match message.WhichOneof("kind"):
        case "hello":
            return worker_hello_from_pb(message.hello)
        case "frame":
            return _frame_from_pb(message.frame)
        case _:
            raise invalid("kind", "is not set, or is one that this version does not know")


def _frame_from_pb(frame: pb.WorkerFrame) -> WorkerFrame:
    num_reports = len(frame.tokens) + len(frame.refused) + len(frame.handed_back)
    if num_reports > _MAX_REPORTS:
        raise invalid("frame", f"has {num_reports} reports; at most {_MAX_REPORTS} are allowed")
    reports = [
        WorkerReport(
            message=TokensReady(
                attempt_id=attempt_id_from_pb(item.attempt_id, f"frame.tokens[{index}].attempt_id"),
                run=token_run_from_pb(item.run, f"frame.tokens[{index}].run"),
                num_cached_tokens=between(
                    item.num_cached_tokens,
                    f"frame.tokens[{index}].num_cached_tokens",
                    low=0,
                    high=2 * MAX_TOKENS,
                )
                if item.HasField("num_cached_tokens")
                else None,
                num_peer_tokens=between(
                    item.num_peer_tokens,
                    f"frame.tokens[{index}].num_peer_tokens",
                    low=0,
                    high=item.num_cached_tokens,
                ),
                num_peer_held_tokens=between(
                    item.num_peer_held_tokens,
                    f"frame.tokens[{index}].num_peer_held_tokens",
                    low=0,
                    high=2 * MAX_TOKENS,
                )
                if item.HasField("num_peer_held_tokens")
                else None,
            ),
            is_prefill_side=item.is_prefill_side,
        )
        for index, item in enumerate(frame.tokens)
    ]
    reports += [
        WorkerReport(
            message=Refused(
                attempt_id=attempt_id_from_pb(
                    item.attempt_id, f"frame.refused[{index}].attempt_id"
                ),
                reason=known(_REFUSE_REASONS, item.reason, f"frame.refused[{index}].reason"),
            ),
            is_prefill_side=item.is_prefill_side,
        )
        for index, item in enumerate(frame.refused)
    ]
    reports += [
        WorkerReport(
            message=HandedBack(
                attempt_id=attempt_id_from_pb(
                    back.attempt_id, f"frame.handed_back[{index}].attempt_id"
                ),
                reason=known(_HAND_BACK_REASONS, back.reason, f"frame.handed_back[{index}].reason"),
            ),
            is_prefill_side=back.is_prefill_side,
        )
        for index, back in enumerate(frame.handed_back)
    ]
    return WorkerFrame(
        reports=tuple(reports),
        load=load_from_pb(frame.load, "frame.load"),
        spans=tuple(
            span_from_pb(span, f"frame.spans[{index}]") for index, span in enumerate(frame.spans)
        ),
    )


def _source_from_pb(message: pb.Source, path: str) -> SourceRef:
    return SourceRef(
        key=worker_key_from_pb(message.worker, f"{path}.worker"),
        address=address(message.grpc_address, f"{path}.grpc_address"),
    )


def _peer_to_pb(peer: PeerPrefix | None) -> pb.Peer | None:
    if peer is None:
        return None
    return pb.Peer(
        worker=worker_key_to_pb(peer.key),
        grpc_address=peer.address,
        num_tokens=peer.num_tokens,
        is_store=peer.is_store,
    )


def _peer_from_pb(message: pb.Peer, path: str) -> PeerPrefix:
    return PeerPrefix(
        key=worker_key_from_pb(message.worker, f"{path}.worker"),
        address=address(message.grpc_address, f"{path}.grpc_address"),
        num_tokens=between(message.num_tokens, f"{path}.num_tokens", low=1, high=2 * MAX_TOKENS),
        is_store=message.is_store,
    )


def _deadline_ms(deadline_s: float) -> int:
    """Rounded up: a deadline that has not passed is never sent as passed."""
    return min(max(whole_milliseconds(deadline_s), 1), _MAX_DEADLINE_MS)


def _deadline_s(deadline_ms: int, path: str) -> float:
    return between(deadline_ms, path, low=1, high=_MAX_DEADLINE_MS) / 1_000
