"""Names follow the rules; spans nest, travel and are bounded; export reaches a collector's exporter."""

from __future__ import annotations

import random
import re

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.clock import ManualClock
from moonpool.ids import WorkerId
from moonpool.telemetry import names
from moonpool.telemetry.metrics import Metrics
from moonpool.telemetry.names import MetricKind
from moonpool.telemetry.otlp import OtlpExport
from moonpool.telemetry.spans import Span, SpanContext, Tracer, TraceRing
from moonpool.tiering.breaker import BreakerState
from moonpool.wire.spans import span_from_pb, span_to_pb
from moonpool.worker.books import WORKER_METRICS, WorkerBooks


def make_tracer(sink: list[Span], clock: ManualClock | None = None) -> Tracer:
    return Tracer(
        clock=clock or ManualClock(), sink=sink.append, process="router", rng=random.Random(1)
    )


def test_metric_names_follow_the_rules() -> None:
    assert len({metric.name for metric in names.METRICS}) == len(names.METRICS)
    for metric in names.METRICS:
        assert re.fullmatch(r"moonpool_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith(".")


def test_metrics_are_counted_and_rendered() -> None:
    metrics = Metrics()
    metrics.count(names.RETRIES, reason="worker_lost")
    metrics.count(names.RETRIES, 2, reason="worker_lost")
    metrics.set(names.NATS_CONNECTED, 1)
    metrics.observe(names.TTFT, 0.03, model="m")
    assert metrics.value(names.RETRIES, reason="worker_lost") == 3
    assert metrics.value(names.RETRIES, reason="other") == 0
    assert metrics.value(names.TTFT, model="m") == 1
    text = metrics.render().decode()
    assert 'moonpool_retries_total{reason="worker_lost"} 3.0' in text
    assert "process_resident_memory_bytes" in text
    assert Metrics().value(names.NATS_CONNECTED) == 0


def test_label_values_can_be_forgotten() -> None:
    metrics = Metrics()
    for store in ("a", "b"):
        metrics.set(names.KV_OFFLOAD_BREAKER, 1, store=store)
    metrics.forget(names.KV_OFFLOAD_BREAKER, store="a")
    text = metrics.render().decode()
    assert 'store="b"' in text
    assert 'store="a"' not in text
    metrics.set(names.KV_OFFLOAD_BREAKER, 0, store="a")
    assert 'store="a"} 0.0' in metrics.render().decode()


def test_a_worker_tells_of_the_stores_that_there_are() -> None:
    books = WorkerBooks(Metrics(WORKER_METRICS))
    for number in range(3):
        store = WorkerId(f"store-{number}")
        books.offload(num_waiting=0, num_puts=0, breakers={store: BreakerState.OPEN})
    lines = books.metrics.render().decode().splitlines()
    told = [line for line in lines if line.startswith(names.KV_OFFLOAD_BREAKER.name)]
    assert told == [f'{names.KV_OFFLOAD_BREAKER.name}{{store="store-2"}} 1.0']


def test_spans_nest_and_keep_their_times() -> None:
    ended: list[Span] = []
    clock = ManualClock(unix=100.0)
    tracer = make_tracer(ended, clock)
    root = tracer.start("chat m", attributes={"gen_ai.request.model": "m"})
    clock.advance(1)
    with tracer.start("prefill", parent=root.traceparent) as child:
        child.set(tokens=3)
        child.event("first_token", layer=1)
        clock.advance(1)
    root.end()
    prefill, chat = ended
    assert (prefill.trace_id, prefill.parent_span_id) == (chat.trace_id, chat.span_id)
    assert chat.parent_span_id == ""
    assert (prefill.start_unix_ns, prefill.duration_ms, chat.duration_ms) == (
        101 * 10**9, 1_000.0, 2_000.0,
    )  # fmt: skip
    assert prefill.attributes == {"moonpool.process": "router", "tokens": 3}
    assert [(event.name, event.attributes) for event in prefill.events] == [
        ("first_token", {"layer": 1})
    ]
    assert root.end() is chat


def test_an_exception_marks_the_span() -> None:
    ended: list[Span] = []
    with pytest.raises(ValueError, match="x"), make_tracer(ended).start("route"):
        raise ValueError("x")
    assert ended[0].is_error
    assert ended[0].attributes["error.type"] == "ValueError"


@pytest.mark.parametrize(
    "traceparent",
    ["", "junk", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", "01-a-b-00"],
)
def test_a_wrong_traceparent_begins_a_new_trace(traceparent: str) -> None:
    assert SpanContext.parse(traceparent) is None
    span = make_tracer([]).start("chat", parent=traceparent)
    assert SpanContext.parse(span.traceparent) == span.context


def test_a_span_survives_the_wire() -> None:
    ended: list[Span] = []
    span = make_tracer(ended).start("decode", attributes={"a": 1, "b": "x", "c": True, "d": 0.5})
    span.event("preempted", 5, reason="growth")
    span.fail("worker_lost")
    span.end()
    wire = pb.SpanReport.FromString(span_to_pb(ended[0]).SerializeToString())
    assert span_from_pb(wire) == ended[0]


def test_a_ring_keeps_the_last_requests() -> None:
    exported: list[Span] = []
    ring = TraceRing(max_traces=2, export=exported.append)
    clock = ManualClock()
    tracer = Tracer(clock=clock, sink=ring.add, process="router", rng=random.Random(1))
    for number in range(3):
        root = tracer.start("chat")
        ring.begin(f"r{number}", root.context)
        clock.advance(1)
        tracer.start("route", parent=root.context).end()
        root.end()
    assert ring.get("r0") == ()
    assert [span.name for span in ring.get("r2")] == ["chat", "route"]
    assert len(ring) == 2
    assert len(exported) == 6


def test_a_trace_that_a_client_uses_twice_belongs_to_the_last_request() -> None:
    ring = TraceRing(max_traces=4)
    tracer = Tracer(clock=ManualClock(), sink=ring.add, process="r", rng=random.Random(1))
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    for name in ("a", "b"):
        root = tracer.start("chat", parent=parent)
        ring.begin(name, root.context)
        root.end()
    assert ring.get("a") == ()
    assert len(ring.get("b")) == 1


def test_spans_are_exported_as_they_are() -> None:
    exporter = InMemorySpanExporter()
    export = OtlpExport("http://127.0.0.1:1", version="1", exporter=exporter)
    tracer = Tracer(clock=ManualClock(), sink=export, process="r", rng=random.Random(1))
    root = tracer.start("chat")
    child = tracer.start("route", parent=root.context)
    child.event("first_token", 7, n=1)
    child.fail("worker_lost")
    child.end()
    root.end()
    export.close()
    route, chat = exporter.get_finished_spans()
    assert route.parent is not None
    assert route.parent.span_id == chat.context.span_id == int(root.context.span_id, 16)
    assert not route.status.is_ok
    assert [(event.name, event.timestamp) for event in route.events] == [("first_token", 7)]
    assert chat.attributes == {"moonpool.process": "r"}
