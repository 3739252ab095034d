"""The wire structs of whole engine frames and their conversion: msgpack arrays, first element the tag."""

from __future__ import annotations

from moonpool.core.protocol import BlockLedger, CoreFrame
from moonpool.latency.step_shape import StepShape
from moonpool.wire.engine_base import Wire
from moonpool.wire.engine_cache_events import (
    WireCacheEvent,
    cache_event_from_wire,
    cache_event_to_wire,
)
from moonpool.wire.engine_commands import WireCommand
from moonpool.wire.engine_messages import EngineBoot, TimedFrame
from moonpool.wire.engine_replies import WireReply, reply_from_wire, reply_to_wire


class WireBoot(Wire, tag=1):
    boot: EngineBoot


class WireMapped(Wire, tag=2):
    pid: int


class WireReady(Wire, tag=3):
    load_s: float


class WireFailed(Wire, tag=4):
    code: str
    message: str


class WireCommands(Wire, tag=5):
    commands: list[WireCommand]


class WireLedger(Wire):
    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_prefills: int
    num_quarantined: int
    num_prefix_locks: int


class WireShape(Wire):
    num_prefill_tokens: int
    prefill_work: int
    num_decodes: int
    num_context_tokens: int


class WireFrame(Wire):
    planned_unix_ns: int
    last_layer_unix_ns: int
    computed_unix_ns: int
    shape: WireShape
    step: int
    replies: list[WireReply]
    ledger: WireLedger
    num_queued_tokens: int
    num_preemptions: int
    cache_events: list[WireCacheEvent]
    forward_s: float
    logits_s: float
    sample_s: float
    other_s: float
    num_step_tokens: int


class WireSteps(Wire, tag=6):
    frames: list[WireFrame]


WireToEngine = WireBoot | WireCommands
WireFromEngine = WireMapped | WireReady | WireFailed | WireSteps


def frame_to_wire(timed: TimedFrame) -> WireFrame:
    frame = timed.frame
    ledger = frame.ledger
    return WireFrame(
        timed.planned_unix_ns,
        timed.last_layer_unix_ns,
        timed.computed_unix_ns,
        WireShape(
            timed.shape.num_prefill_tokens,
            timed.shape.prefill_work,
            timed.shape.num_decodes,
            timed.shape.num_context_tokens,
        ),
        frame.step,
        [reply_to_wire(reply) for reply in frame.replies],
        WireLedger(
            ledger.num_total,
            ledger.num_free,
            ledger.num_cached,
            ledger.num_referenced,
            ledger.num_running,
            ledger.num_waiting,
            ledger.num_reserved,
            ledger.num_prefills,
            ledger.num_quarantined,
            ledger.num_prefix_locks,
        ),
        frame.num_queued_tokens,
        frame.num_preemptions,
        [cache_event_to_wire(event) for event in frame.cache_events],
        frame.forward_s,
        frame.logits_s,
        frame.sample_s,
        frame.other_s,
        frame.num_step_tokens,
    )


def frame_from_wire(wire: WireFrame) -> TimedFrame:
    ledger = wire.ledger
    frame = CoreFrame(
        step=wire.step,
        replies=tuple([reply_from_wire(reply) for reply in wire.replies]),
        ledger=BlockLedger(
            num_total=ledger.num_total,
            num_free=ledger.num_free,
            num_cached=ledger.num_cached,
            num_referenced=ledger.num_referenced,
            num_running=ledger.num_running,
            num_waiting=ledger.num_waiting,
            num_reserved=ledger.num_reserved,
            num_prefills=ledger.num_prefills,
            num_quarantined=ledger.num_quarantined,
            num_prefix_locks=ledger.num_prefix_locks,
        ),
        num_queued_tokens=wire.num_queued_tokens,
        num_preemptions=wire.num_preemptions,
        cache_events=tuple([cache_event_from_wire(event) for event in wire.cache_events]),
        forward_s=wire.forward_s,
        logits_s=wire.logits_s,
        sample_s=wire.sample_s,
        other_s=wire.other_s,
        num_step_tokens=wire.num_step_tokens,
    )
    return TimedFrame(
        frame=frame,
        planned_unix_ns=wire.planned_unix_ns,
        last_layer_unix_ns=wire.last_layer_unix_ns,
        computed_unix_ns=wire.computed_unix_ns,
        shape=StepShape(
            num_prefill_tokens=wire.shape.num_prefill_tokens,
            prefill_work=wire.shape.prefill_work,
            num_decodes=wire.shape.num_decodes,
            num_context_tokens=wire.shape.num_context_tokens,
        ),
    )
