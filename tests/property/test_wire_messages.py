"""Everything that crosses a process boundary comes back as it was; what a bad peer sends is named."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.api.v1 import control_pb2, request_pb2, worker_pb2
from moonpool.core.protocol import (
    BlockLedger,
    HandBackReason,
    HandedBack,
    Refused,
    RefuseReason,
    TokensReady,
)
from moonpool.errors import FailedPreconditionError, MoonpoolError
from moonpool.handoff.messages import (
    AbortRequest,
    Commit,
    CommitFailed,
    DecodeRequest,
    LayersReady,
    Open,
    Opened,
    PrefillRequest,
    Reset,
    ResetReason,
    SourceRef,
    Waiting,
)
from moonpool.ids import AttemptId, BlockId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvLayout
from moonpool.kv.region import DeviceAccess, KvRegion, NixlAccess
from moonpool.routing.worker_view import WorkerRole
from moonpool.wire.control import (
    Announce,
    Who,
    decode_announce,
    encode_announce,
    encode_who,
)
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.handoff import (
    open_from_pb,
    open_to_pb,
    source_message_from_pb,
    source_message_to_pb,
)
from moonpool.wire.layout import region_from_pb, region_to_pb
from moonpool.wire.request import request_from_pb, request_to_pb
from moonpool.wire.session import (
    Ping,
    WorkerFrame,
    WorkerReport,
    frame_message_to_pb,
    hello_message_to_pb,
    router_message_from_pb,
    router_message_to_pb,
    worker_message_from_pb,
)
from moonpool.wire.spans import Span, SpanEvent
from moonpool.wire.worker import (
    LedgerReport,
    LoadReport,
    RouterHello,
    WorkerHello,
    ledger_from_pb,
    ledger_to_pb,
)
from support.addresses import addresses
from support.announcements import make_announce

MessageT = TypeVar("MessageT", bound=Message)


def over_the_wire(message: MessageT) -> MessageT:
    return type(message).FromString(message.SerializeToString())


# -- strategies --

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,20}", fullmatch=True)
texts = st.text(max_size=20)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
counts = st.integers(0, 2**20)
attempt_ids = st.builds(AttemptId, request_id=names.map(RequestId), attempt=st.integers(1, 1_000))
worker_keys = st.builds(
    WorkerKey, worker_id=names.map(WorkerId), incarnation=names.map(Incarnation)
)
finish_reasons = st.none() | st.sampled_from(FinishReason)
block_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5, unique=True).map(
    lambda ids: tuple(map(BlockId, ids))
)

requests = st.builds(
    InferenceRequest,
    request_id=names.map(RequestId),
    model=texts,
    prompt_token_ids=token_ids.filter(bool),
    emitted_token_ids=token_ids,
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=counts,
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.integers(9, 1_000),
        ignore_eos=st.booleans(),
        stop_token_ids=token_ids,
    ),
    arrival_unix_s=st.floats(0, 1e10),
    tenant=names,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=texts,
    adapter=texts,
    traceparent=texts,
)
deadlines = st.integers(1, 10**8).map(lambda ms: ms / 1_000)
router_messages = st.one_of(
    st.just(Ping()),
    st.builds(PrefillRequest, request=requests, attempt=st.integers(1, 9), deadline_s=deadlines),
    st.builds(
        DecodeRequest,
        request=requests,
        attempt=st.integers(1, 9),
        deadline_s=deadlines,
        source=st.none() | st.builds(SourceRef, key=worker_keys, address=addresses),
    ),
    st.builds(AbortRequest, attempt_id=attempt_ids, choice=st.none() | st.integers(0, 1_023)),
)

runs = st.builds(
    TokenRun,
    first_position=counts,
    token_ids=token_ids,
    choice=st.integers(0, 1_023),
    finish_reason=finish_reasons,
).filter(lambda run: run.token_ids or run.finish_reason)
tokens_ready = st.builds(
    TokensReady,
    attempt_id=attempt_ids,
    run=runs,
    num_cached_tokens=st.none() | counts,
    num_peer_held_tokens=st.none() | counts,
)
refused = st.builds(Refused, attempt_id=attempt_ids, reason=st.sampled_from(RefuseReason))
handed_back = st.builds(HandedBack, attempt_id=attempt_ids, reason=st.sampled_from(HandBackReason))


def reports(messages: st.SearchStrategy[Any]) -> st.SearchStrategy[list[WorkerReport]]:
    return st.lists(
        st.builds(WorkerReport, message=messages, is_prefill_side=st.booleans()), max_size=3
    )


@st.composite
def ledgers(draw: st.DrawFn) -> BlockLedger:
    free, cached, referenced = (draw(counts) for _ in range(3))
    return BlockLedger(
        num_total=free + cached + referenced,
        num_free=free,
        num_cached=cached,
        num_referenced=referenced,
        num_running=draw(counts),
        num_waiting=draw(counts),
        num_reserved=draw(counts),
        num_prefills=draw(counts),
    )


loads = st.builds(
    LoadReport,
    ledger=ledgers(),
    num_queued_tokens=counts,
    step_age_ms=counts,
    is_draining=st.booleans(),
)
attributes = st.dictionaries(
    texts,
    texts | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
    max_size=3,
)
hex_digits = st.integers(1, 2**64 - 1)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, 2**62))
    return Span(
        trace_id=f"{draw(hex_digits):032x}",
        span_id=f"{draw(hex_digits):016x}",
        parent_span_id=draw(st.just("") | hex_digits.map(lambda value: f"{value:016x}")),
        name=draw(texts),
        start_unix_ns=start,
        end_unix_ns=start + draw(counts),
        attributes=draw(attributes),
        events=tuple(
            draw(
                st.lists(
                    st.builds(SpanEvent, name=texts, unix_ns=counts, attributes=attributes),
                    max_size=2,
                )
            )
        ),
        is_error=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    make = draw(st.sampled_from([KvLayout.block_major, KvLayout.layer_major]))
    return make(
        num_blocks=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 5)),
        num_kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 64])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        block_size=draw(st.sampled_from([8, 16])),
    )


nixl_accesses = st.builds(
    NixlAccess,
    agent_metadata=st.binary(min_size=1, max_size=50),
    base_address=st.integers(1, 2**62),
)

device_accesses = st.builds(
    DeviceAccess,
    gpu=names,
    ipc_handle=st.binary(min_size=1, max_size=64),
    num_bytes=st.integers(1, 2**40),
)


@st.composite
def regions(draw: st.DrawFn) -> KvRegion:
    layout = draw(layouts())
    return KvRegion(
        worker=draw(worker_keys),
        layout=layout,
        pool_bytes=layout.pool_bytes + draw(counts),
        digest_kind="xxh3-64",
        host_id=draw(texts),
        fd_socket=draw(texts),
        grpc_address=draw(addresses),
        nixl=draw(st.none() | nixl_accesses),
        device=draw(st.none() | device_accesses),
    )


namespaces = st.builds(
    ModelNamespace,
    model_fingerprint=names,
    compute_dtype=names,
    kv_dtype=names,
    kv_scales_digest=texts,
    block_size=st.integers(1, 128),
)
router_hellos = st.builds(
    RouterHello,
    router_id=names,
    namespace=st.none() | namespaces,
    secret_fingerprint=texts,
)
worker_hellos = st.builds(
    WorkerHello,
    worker=worker_keys,
    role=st.sampled_from(WorkerRole),
    model=texts,
    namespace=namespaces,
    secret_fingerprint=texts,
    regions=st.lists(regions(), min_size=1, max_size=2).map(tuple),
    max_model_len=st.integers(1, 2**20),
    max_num_seqs=st.integers(1, 2**20),
    max_num_batched_tokens=st.integers(1, 2**20),
    grpc_address=addresses,
    version=texts,
)

ATTEMPT = AttemptId(RequestId("r"), 1)


@st.composite
def source_messages(draw: st.DrawFn) -> Any:
    blocks = draw(block_ids)
    first_layer, num_layers = draw(st.integers(0, 30)), draw(st.integers(1, 4))
    start = draw(counts)
    return draw(
        st.sampled_from(
            [
                Waiting(attempt_id=ATTEMPT),
                Opened(attempt_id=ATTEMPT, num_cached_tokens=0, block_ids=()),
                Opened(
                    attempt_id=ATTEMPT,
                    num_cached_tokens=16 * len(blocks),
                    block_ids=blocks,
                    num_peer_tokens=16 * len(blocks) // 2,
                    num_peer_held_tokens=draw(st.none() | counts),
                    digests=bytes(8 * 30 * len(blocks)),
                ),
                LayersReady(
                    attempt_id=ATTEMPT,
                    start=start,
                    end=start + 1,
                    first_layer=first_layer,
                    end_layer=first_layer + num_layers,
                    block_ids=blocks,
                    digests=b"\x07" * (8 * num_layers * len(blocks)),
                ),
                Commit(
                    attempt_id=ATTEMPT,
                    first_token=draw(counts),
                    position=draw(counts),
                    finish_reason=draw(finish_reasons),
                    num_cached_tokens=draw(counts),
                ),
                CommitFailed(
                    attempt_id=ATTEMPT,
                    reason=draw(
                        st.sampled_from(HandBackReason) | st.just(FinishReason.INVALID_OUTPUT)
                    ),
                ),
                Reset(attempt_id=ATTEMPT, reason=draw(st.sampled_from(ResetReason))),
            ]
        )
    )


# -- round trips --


@given(requests)
@settings(max_examples=50)
def test_requests(request: InferenceRequest) -> None:
    back = request_from_pb(over_the_wire(request_to_pb(request)))
    assert back == request
    assert back.traceparent == request.traceparent


@given(router_messages | router_hellos)
@settings(max_examples=60)
def test_router_messages(message: Any) -> None:
    assert router_message_from_pb(over_the_wire(router_message_to_pb(message))) == message


@given(deadline_s=st.floats(-5, 1e9))
def test_a_deadline_is_never_shortened(deadline_s: float) -> None:
    request = InferenceRequest(
        request_id=RequestId("r"), model="m", prompt_token_ids=(1,), sampling=SamplingParams()
    )
    message = PrefillRequest(request=request, attempt=1, deadline_s=deadline_s)
    back = router_message_from_pb(router_message_to_pb(message))
    assert isinstance(back, PrefillRequest)
    assert back.deadline_s >= min(deadline_s, 7 * 86_400)
    assert back.deadline_s > 0


@given(
    reports(tokens_ready),
    reports(refused),
    reports(handed_back),
    loads,
    st.lists(spans(), max_size=2),
)
@settings(max_examples=50)
def test_frames(
    tokens: list[WorkerReport],
    refusals: list[WorkerReport],
    backs: list[WorkerReport],
    load: LoadReport,
    some_spans: list[Span],
) -> None:
    sent = (*tokens, *refusals, *backs)
    message = over_the_wire(frame_message_to_pb(sent, load, some_spans))
    assert worker_message_from_pb(message) == WorkerFrame(
        reports=sent, load=load, spans=tuple(some_spans)
    )


@given(worker_hellos)
@settings(max_examples=25)
def test_worker_hellos(hello: WorkerHello) -> None:
    assert worker_message_from_pb(over_the_wire(hello_message_to_pb(hello))) == hello


@given(regions())
@settings(max_examples=50)
def test_regions(region: KvRegion) -> None:
    assert region_from_pb(over_the_wire(region_to_pb(region))) == region


@given(source_messages())
def test_handoff_messages(message: Any) -> None:
    assert source_message_from_pb(over_the_wire(source_message_to_pb(message)), ATTEMPT) == message


@given(attempt_ids, worker_keys, worker_keys, names)
@settings(max_examples=50)
def test_handoff_open(
    attempt_id: AttemptId, reader: WorkerKey, source: WorkerKey, namespace: str
) -> None:
    message = Open(attempt_id=attempt_id, reader=reader, source=source, namespace=namespace)
    assert open_from_pb(over_the_wire(open_to_pb(message))) == message


@given(worker_keys, ledgers(), counts, counts)
@settings(max_examples=50)
def test_ledgers(key: WorkerKey, ledger: BlockLedger, handoffs: int, sessions: int) -> None:
    report = LedgerReport(
        worker=key, ledger=ledger, num_handoffs=handoffs, num_router_sessions=sessions
    )
    assert ledger_from_pb(over_the_wire(ledger_to_pb(report))) == report


@given(worker_keys, st.sampled_from(WorkerRole), addresses, loads, counts, st.booleans())
@settings(max_examples=50)
def test_announcements(
    key: WorkerKey,
    role: WorkerRole,
    address: str,
    load: LoadReport,
    sequence: int,
    is_leaving: bool,
) -> None:
    announce = Announce(
        worker=key,
        role=role,
        grpc_address=address,
        model="m",
        sequence=sequence,
        load=load,
        valid_for_s=3.0,
        is_leaving=is_leaving,
    )
    back = decode_announce(encode_announce(announce))
    assert all(getattr(back, field) == getattr(announce, field) for field in Announce.__slots__)
    who = encode_who(Who(router_id=key.worker_id))
    assert control_pb2.Who.FromString(who).router_id == key.worker_id


# -- bad peers --

_READERS: list[tuple[type[Message], Any]] = [
    (worker_pb2.RouterMessage, router_message_from_pb),
    (worker_pb2.WorkerMessage, worker_message_from_pb),
    (worker_pb2.FromDecode, open_from_pb),
    (worker_pb2.FromPrefill, lambda message: source_message_from_pb(message, ATTEMPT)),
    (worker_pb2.LedgerReply, ledger_from_pb),
    (request_pb2.Request, request_from_pb),
]


@given(st.binary(max_size=200), st.sampled_from(_READERS))
def test_junk_raises_nothing_but_our_errors(data: bytes, reader: tuple[type[Message], Any]) -> None:
    message_type, read = reader
    try:
        message = message_type.FromString(data)
    except DecodeError:
        return
    caught: MoonpoolError | None = None
    try:
        read(message)
    except MoonpoolError as error:
        caught = error
    assert caught is None or caught.param is not None


@given(
    st.sampled_from(["prefill", "decode"]),
    st.data(),
    st.builds(PrefillRequest, request=requests, attempt=st.just(1), deadline_s=st.just(1.0)),
)
def test_a_damaged_message_raises_nothing_but_our_errors(
    kind: str, data: st.DataObject, message: PrefillRequest
) -> None:
    raw = bytearray(router_message_to_pb(message).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError, MoonpoolError):
        router_message_from_pb(worker_pb2.RouterMessage.FromString(bytes(raw)))


@given(st.binary(max_size=100))
def test_junk_on_the_bus_is_a_typed_error(data: bytes) -> None:
    with contextlib.suppress(InvalidMessageError, FailedPreconditionError):
        decode_announce(data)


@pytest.mark.parametrize(
    "address", ["::1:80", "[::1]", "h", "h:", "h:123456", "[h]:1", "a b:1", ""]
)
def test_an_address_that_cannot_be_dialled_is_not_announced(address: str) -> None:
    message = control_pb2.Announce.FromString(encode_announce(make_announce("h:1")))
    message.grpc_address = address
    with pytest.raises(InvalidMessageError) as caught:
        decode_announce(message.SerializeToString())
    assert caught.value.param == "grpc_address"


def test_too_large_for_the_bus() -> None:
    with pytest.raises(InvalidMessageError, match="at most 16384"):
        decode_announce(bytes(20_000))


def request_message() -> request_pb2.Request:
    return request_to_pb(
        InferenceRequest(
            request_id=RequestId("r"),
            model="m",
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(max_tokens=4),
            arrival_unix_s=1.0,
        )
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda m: m.ClearField("request_id"), "request.request_id"),
        (lambda m: setattr(m, "request_id", "a b"), "request.request_id"),
        (lambda m: setattr(m, "request_id", "x" * 300), "request.request_id"),
        (lambda m: m.ClearField("prompt_token_ids"), "request.prompt_token_ids"),
        (lambda m: m.prompt_token_ids.append(2**32 - 1), "request.prompt_token_ids"),
        (lambda m: m.emitted_token_ids.extend([1] * 4), "request.emitted_token_ids"),
        (lambda m: setattr(m.sampling, "temperature", math.nan), "request.sampling.temperature"),
        (lambda m: setattr(m.sampling, "temperature", -1.0), "request.sampling.temperature"),
        (lambda m: setattr(m.sampling, "top_p", 0.0), "request.sampling.top_p"),
        (lambda m: setattr(m.sampling, "top_p", math.inf), "request.sampling.top_p"),
        (lambda m: setattr(m.sampling, "max_tokens", 0), "request.sampling.max_tokens"),
        (lambda m: setattr(m, "arrival_unix_s", math.nan), "request.arrival_unix_s"),
        (lambda m: setattr(m, "cache_salt", "x" * 2_000), "request.cache_salt"),
        (lambda m: setattr(m, "tenant", ""), "request.tenant"),
    ],
)
def test_a_bad_request_names_its_field(change: Any, param: str) -> None:
    message = request_message()
    change(message)
    with pytest.raises(InvalidMessageError) as caught:
        request_from_pb(message)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(protocol_major=2, router_id="r")),
        worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="r")),
    ],
)
def test_another_protocol_is_refused_in_words(message: worker_pb2.RouterMessage) -> None:
    with pytest.raises(FailedPreconditionError, match="speaks protocol") as caught:
        router_message_from_pb(message)
    assert caught.value.code == "incompatible_protocol"


def test_an_announcement_of_another_protocol_is_refused() -> None:
    data = control_pb2.Announce(protocol_major=2).SerializeToString()
    with pytest.raises(FailedPreconditionError, match="speaks protocol 2"):
        decode_announce(data)


def test_a_fact_of_the_namespace_that_is_unknown_is_not_ignored() -> None:
    hello = RouterHello(
        router_id="r",
        namespace=ModelNamespace(
            model_fingerprint="f", compute_dtype="float32", kv_dtype="float32", block_size=16
        ),
        secret_fingerprint="",
    )
    message = router_message_to_pb(hello)
    message.hello.namespace.extra["rope_scaling"] = "2"
    with pytest.raises(FailedPreconditionError, match="rope_scaling"):
        router_message_from_pb(message)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda r: setattr(r, "pool_bytes", 10), "region.pool_bytes"),
        (lambda r: setattr(r.layout, "block_size", 0), "region.layout.block_size"),
        (lambda r: setattr(r.layout, "num_blocks", 2**32 - 1), "region.layout.num_blocks"),
        (lambda r: setattr(r.layout.groups[0], "dtype", "fp4"), "region.layout.groups[0].dtype"),
        (lambda r: setattr(r.layout.groups[0], "block_stride_bytes", 8), "region.layout"),
        (lambda r: setattr(r.layout.groups[0], "layer_stride_bytes", 2**40), "region.layout"),
        (lambda r: r.layout.ClearField("groups"), "region.layout.groups"),
        (lambda r: r.worker.ClearField("incarnation"), "region.worker.incarnation"),
        (lambda r: r.nixl.ClearField("agent_metadata"), "region.nixl.agent_metadata"),
        (lambda r: setattr(r.nixl, "agent_metadata", bytes(70_000)), "region.nixl.agent_metadata"),
        (lambda r: setattr(r.nixl, "base_address", 2**64 - 1), "region.nixl.base_address"),
        (lambda r: r.device.ClearField("ipc_handle"), "region.device.ipc_handle"),
        (lambda r: setattr(r.device, "ipc_handle", bytes(300)), "region.device.ipc_handle"),
        (lambda r: r.device.ClearField("gpu"), "region.device.gpu"),
        (lambda r: setattr(r.device, "num_bytes", 2**60), "region.device.num_bytes"),
    ],
)
def test_a_region_that_lies_is_refused(change: Any, param: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32"
    )
    region = KvRegion(
        worker=WorkerKey(WorkerId("w"), Incarnation("i")),
        layout=layout,
        pool_bytes=layout.pool_bytes,
        digest_kind="xxh3-64",
        host_id="h",
        fd_socket="",
        grpc_address="127.0.0.1:1",
        nixl=NixlAccess(agent_metadata=b"agent", base_address=1 << 40),
        device=DeviceAccess(gpu="GPU-0", ipc_handle=bytes(64), num_bytes=1 << 30),
    )
    message = region_to_pb(region)
    change(message)
    with pytest.raises(InvalidMessageError) as caught:
        region_from_pb(message)
    assert caught.value.param == param


LAYERS = LayersReady(
    attempt_id=ATTEMPT,
    start=0,
    end=32,
    first_layer=2,
    end_layer=4,
    block_ids=(BlockId(3), BlockId(5)),
    digests=bytes(8 * 4),
)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (replace(LAYERS, digests=bytes(8 * 3)), "layers.leaves"),
        (replace(LAYERS, digests=b""), "layers.leaves"),
        (replace(LAYERS, block_ids=(BlockId(3), BlockId(3))), "layers.block_ids"),
        (replace(LAYERS, block_ids=()), "layers.block_ids"),
        (replace(LAYERS, first_layer=4), "layers.first_layer"),
        (replace(LAYERS, end=0), "layers.end"),
    ],
)
def test_layers_that_do_not_fit_are_refused(bad: LayersReady, param: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        source_message_from_pb(source_message_to_pb(bad), ATTEMPT)
    assert caught.value.param == param


def test_a_ledger_must_add_up() -> None:
    message = worker_pb2.LedgerReply(num_total=3, num_free=1)
    with pytest.raises(InvalidMessageError, match="sum"):
        ledger_from_pb(message)
