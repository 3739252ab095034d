"""What commands print, of fixed data: no clock, no cluster, no colours."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from moonpool.cli.ask import Reply
from moonpool.cli.chat import footer, reply_json
from moonpool.cli.demo_text import QUESTION, demo_messages
from moonpool.cli.doctor import finding_lines, summary
from moonpool.cli.doctor_checks import Finding, Severity, Task, check_nats
from moonpool.cli.journey import Journey, group_layers, make_journey, summarize_gaps
from moonpool.cli.journey_view import journey_json, journey_lines
from moonpool.cli.pull import LineProgress
from moonpool.cli.status import ClusterStatus, print_status, status_json
from moonpool.cli.terminal import Glyphs, format_bytes, format_ms, rounded_parts
from moonpool.cli.up_view import Board, BoardView, ClusterFacts, LineView, how_to_talk
from moonpool.cli.waterfall import waterfall_lines, waterfall_rows
from moonpool.cluster.local_cluster import Endpoints
from moonpool.cluster.part import PartEvent, PartState
from moonpool.config.schema import ApiKeySettings, ClusterConfig, RouterSettings
from moonpool.core.protocol import BlockLedger
from moonpool.ids import Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.generation import GenerationDone, PlacementSummary, Timing, Usage
from moonpool.inference.output import FinishReason
from moonpool.routing.worker_view import WorkerRole
from moonpool.telemetry import names
from moonpool.wire.admin import RouterSnapshot, WorkerSnapshot
from moonpool.wire.spans import AttributeValue, Span, SpanEvent
from moonpool.wire.worker import LedgerReport, LoadReport

UNICODE = Glyphs(is_unicode=True)
ASCII = Glyphs(is_unicode=False)
ROOT_ID = "0" * 15 + "1"


def ms(value: float) -> int:
    """Unix nanoseconds `value` milliseconds after the request's arrival."""
    return 1_700_000_000_000_000_000 + round(value * 1e6)


def span(
    name: str,
    start_ms: float,
    end_ms: float,
    *,
    number: int,
    process: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    events: tuple[SpanEvent, ...] = (),
    parent: str = ROOT_ID,
    is_error: bool = False,
) -> Span:
    return Span(
        trace_id="a" * 32,
        span_id=f"{number:016x}",
        parent_span_id=parent,
        name=name,
        start_unix_ns=ms(start_ms),
        end_unix_ns=ms(end_ms),
        attributes={names.ATTR_PROCESS: process, **(attributes or {})},
        events=events,
        is_error=is_error,
    )


def verified(layer: int, started_ms: float, ended_ms: float, num_layers: int = 1) -> SpanEvent:
    return SpanEvent(
        name=names.EVENT_LAYERS_VERIFIED,
        unix_ns=ms(ended_ms),
        attributes={
            "started_unix_ns": ms(started_ms),
            "num_bytes": 1024 * num_layers,
            "num_bad_leaves": 0,
            "first_layer": layer,
            "end_layer": layer + num_layers,
            "num_blocks": 4,
        },
    )


def trace() -> tuple[Span, ...]:
    """Prefill from 10 to 112 ms, four layers; the last one arrives after the compute has ended."""
    attempt: dict[str, AttributeValue] = {names.ATTR_ATTEMPT: 1}
    return (
        span(
            "chat tiny", 0, 200, number=1, process="router-0", parent="",
            events=(SpanEvent(name=names.EVENT_FIRST_TOKEN, unix_ns=ms(115)),),
        ),
        span("queue", 5, 6, number=2, process="router-0"),
        span(
            "attempt", 6, 199, number=3, process="router-0",
            attributes={
                **attempt, names.ATTR_REASON: "above_threshold",
                "moonpool.num_uncached_tokens": 1100, "moonpool.threshold_tokens": 256,
            },
        ),
        span(
            "prefill", 10, 112, number=4, process="prefill-0@aa",
            attributes={
                **attempt, names.ATTR_INPUT_TOKENS: 1100, names.ATTR_CACHED_TOKENS: 0,
                "moonpool.num_chunks": 1, "moonpool.forward_ended_unix_ns": ms(110),
                "moonpool.outcome": "first_token",
            },
        ),
        span(
            "kv.transfer", 8, 114, number=5, process="decode-0@bb",
            attributes={
                **attempt, names.ATTR_BYTES: 4096, names.ATTR_BACKEND: "shm",
                "moonpool.num_reads": 4, "moonpool.num_bad_leaves": 0,
                "moonpool.source": "prefill-0@aa",
                "moonpool.source_last_layer_unix_ns": ms(109),
                "moonpool.source_first_token_unix_ns": ms(112),
                "moonpool.admitted_unix_ns": ms(114),
            },
            events=(
                verified(0, 30, 35), verified(1, 60, 62), verified(2, 85, 90),
                verified(3, 109, 111.5), verified(0, 36, 37),
            ),
        ),
        span(
            "decode", 114, 198, number=6, process="decode-0@bb",
            attributes={**attempt, names.ATTR_OUTPUT_TOKENS: 4, "moonpool.outcome": "stop"},
        ),
    )  # fmt: skip


DONE = GenerationDone(
    request_id=RequestId("r1"),
    model="tiny",
    finish_reason=FinishReason.STOP,
    usage=Usage(num_prompt_tokens=1100, num_completion_tokens=4, num_cached_tokens=0),
    timing=Timing(
        ttft_ms=115.0,
        ttft_parts_ms={
            "tokenize": 5.04,
            "queue": 1.04,
            "worker_queue": 3.94,
            "prefill": 101.96,
            "deliver": 3.02,
        },
    ),
    placement=PlacementSummary(
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        num_attempts=1,
        reason="above_threshold: 1100 uncached tokens, threshold 256, 1 prefill workers",
    ),
)
TOKEN_TIMES_S = (0.116, 0.140, 0.160, 0.190)


def journey() -> Journey:
    return make_journey(DONE, trace(), token_times_s=TOKEN_TIMES_S)


# -- numbers --


def test_numbers_are_short_and_keep_what_matters() -> None:
    assert [format_ms(value) for value in (0.1234, 12.34, 123.4, 1234.5)] == [
        "0.12 ms",
        "12.3 ms",
        "123.4 ms",
        "1,234 ms",
    ]
    assert [format_bytes(value) for value in (10, 2048, 26 * 2**20)] == [
        "10 B",
        "2.0 KiB",
        "26.0 MiB",
    ]


def test_rounded_parts_sum_to_the_rounded_sum() -> None:
    parts = {"a": 0.14, "b": 0.14, "c": 0.14}
    rounded = rounded_parts(parts)
    assert sum(rounded.values()) == pytest.approx(0.4)
    assert all(abs(rounded[name] - parts[name]) < 0.1 for name in parts)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_bars_have_the_width_that_was_asked(glyphs: Glyphs) -> None:
    for share in (-1.0, 0.0, 0.03, 0.5, 0.999, 1.0, 2.0):
        assert len(glyphs.bar(share, 10)) == 10
    for start, end in ((0.0, 1.0), (0.999, 1.0), (1.0, 1.0), (0.5, 0.5)):
        text = glyphs.interval(start, end, 10, mark=0.2)
        assert len(text) == 10
        assert text.strip()


# -- journey --


def test_a_layer_lies_there_when_its_last_read_is_verified() -> None:
    handoff = journey().handoff
    assert handoff is not None
    assert [layer.verified_ms for layer in handoff.layers] == [27.0, 52.0, 80.0, 101.5]
    assert handoff.layers[0].num_bytes == 2048
    assert handoff.prefill_ended_ms == 100.0
    assert handoff.exposed_ms == pytest.approx(2.0)
    assert handoff.share_before_end == pytest.approx(4 / 5)


def test_the_source_says_when_it_ended_if_its_own_span_is_missing() -> None:
    spans = [one for one in trace() if one.name != "prefill"]
    handoff = make_journey(DONE, spans, token_times_s=()).handoff
    assert handoff is not None
    assert handoff.prefill_ended_ms == pytest.approx(101.0)


def test_only_the_attempt_that_answered_counts() -> None:
    lost = span(
        "kv.transfer", 1, 2, number=9, process="decode-1", attributes={names.ATTR_ATTEMPT: 0}
    )
    with_lost = make_journey(DONE, (lost, *trace()), token_times_s=TOKEN_TIMES_S)
    assert with_lost == journey()


def test_a_journey_in_words_and_bars() -> None:
    text = "\n".join(journey_lines(journey(), UNICODE))
    assert "prefilled on    prefill-0, in one chunk" in text
    assert "decoded on      decode-0" in text
    assert "1,100 in the prompt (0 of them cached), 4 in the answer (stop)" in text
    assert "over shm in 4 reads from prefill-0" in text
    assert "73.0 ms before" in text
    assert "1.50 ms after" in text
    assert "80.0% of the bytes lay verified" in text
    assert "2.00 ms from token 1 drawn on prefill to ready on decode" in text
    assert "p50 24.0 ms, p99 30.0 ms, max 30.0 ms over 3 gaps" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_shown_parts_of_ttft_sum_to_what_is_shown() -> None:
    lines = journey_lines(journey(), ASCII)
    start = lines.index("Time to the first token") + 1
    shown = [float(line.split()[1]) for line in lines[start : start + 6]]
    assert sum(shown[:-1]) == pytest.approx(shown[-1])
    assert shown[-1] == 115.0


def test_a_local_prefill_has_no_handoff_to_show() -> None:
    spans = [one for one in trace() if one.name != "kv.transfer"]
    text = "\n".join(journey_lines(make_journey(DONE, spans, token_times_s=(0.1,)), ASCII))
    assert "KV:" not in text
    assert "one token: no gap" in text


def test_journey_for_programs() -> None:
    values = journey_json(journey())
    assert values["handoff"]["exposed_ms"] == pytest.approx(2.0)
    assert len(values["handoff"]["layers"]) == 4


def test_many_layers_are_grouped() -> None:
    handoff = journey().handoff
    assert handoff is not None
    assert [len(group) for group in group_layers(handoff.layers, max_rows=3)] == [2, 2]
    assert [len(group) for group in group_layers(handoff.layers, max_rows=9)] == [1] * 4


def test_gaps_are_pooled() -> None:
    assert summarize_gaps([]) is None
    gaps = summarize_gaps([5.0, *range(1, 101)])
    assert gaps is not None
    assert (gaps.first_ms, gaps.p50_ms, gaps.p99_ms, gaps.max_ms) == (5.0, 50, 99, 100)


# -- waterfall --


def test_a_waterfall() -> None:
    lines = waterfall_lines(waterfall_rows(trace()), ASCII, width=100)
    assert lines == [
        "chat tiny        router-0       0.00 ms  ############################################    200.0 ms",
        "  first_token    router-0      115.0 ms                           |",
        "  queue          router-0       5.00 ms   #                                               1.00 ms",
        "  attempt        router-0       6.00 ms   ###########################################    193.0 ms",
        "      above_threshold, 1100 uncached tokens, threshold 256",
        "    kv.transfer  decode-0       8.00 ms   ########################                       106.0 ms",
        "        4.0 KiB, over shm, 4 reads, from prefill-0, ready 2.00 ms after token 1 was drawn",
        "    prefill      prefill-0      10.0 ms    #######################                       102.0 ms",
        "        1100 tokens in, 0 cached, 1 chunk",
        "    decode       decode-0      114.0 ms                           ###################     84.0 ms",
        "        4 tokens out",
    ]  # fmt: skip


def test_a_waterfall_shows_errors_and_orphans() -> None:
    failed = span(
        "decode", 1, 2, number=7, process="decode-0", parent="f" * 16, is_error=True,
        attributes={names.ATTR_ERROR: "worker_lost", "moonpool.outcome": "refused",
                    names.ATTR_ATTEMPT: 2},
    )  # fmt: skip
    rows = waterfall_rows((failed,))
    assert [(row.depth, row.is_error) for row in rows] == [(0, True)]
    assert rows[0].details == "error worker_lost, outcome refused, attempt 2"
    assert waterfall_lines(rows, ASCII, width=20)[0].endswith(" x")
    assert waterfall_rows(()) == []


# -- status --


def cluster_status() -> ClusterStatus:
    books = BlockLedger(num_total=100, num_free=60, num_cached=30, num_referenced=10, num_running=2)
    key = WorkerKey(WorkerId("decode-0"), Incarnation("ab" * 8))
    return ClusterStatus(
        address="127.0.0.1:8001",
        router=RouterSnapshot(
            router_id="router-0",
            model="tiny",
            not_ready_because="",
            is_bus_connected=True,
            num_queued=0,
            num_running=2,
            workers=(
                WorkerSnapshot(
                    address="127.0.0.1:1", state="up", key=key, role=WorkerRole.DECODE,
                    load=LoadReport(ledger=books, num_queued_tokens=7), because="",
                ),
                WorkerSnapshot(
                    address="127.0.0.1:2", state="refused", key=None, role=None, load=None,
                    because="another model: a != b",
                ),
            ),
        ),
        ledgers={"decode-0": LedgerReport(worker=key, ledger=books, num_handoffs=1)},
    )  # fmt: skip


def printed(status: ClusterStatus) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    print_status(status, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_status_in_words() -> None:
    text = printed(cluster_status())
    assert "router-0 at 127.0.0.1:8001  ready" in text
    assert "model tiny, bus connected, 2 running, 0 queued" in text
    row = next(line for line in text.splitlines() if line.startswith("decode-0"))
    assert " ".join(row.split()) == ("decode-0 decode up 2 0 0 0 7 10 30 100 busy, 1 handoffs")
    assert "127.0.0.1:2: another model: a != b" in text
    assert "\x1b" not in text


def test_status_for_programs() -> None:
    values = status_json(cluster_status())
    assert values["is_ready"] is True
    assert values["workers"][0]["ledger"]["num_handoffs"] == 1
    assert values["workers"][1]["load"] is None


# -- up --


def facts(api_key: str | None = None) -> ClusterFacts:
    return ClusterFacts(
        config=ClusterConfig(router=RouterSettings(api_key=api_key)),
        model="tiny",
        endpoints=Endpoints(
            grpc_address="127.0.0.1:8001",
            http_url="http://127.0.0.1:8000",
            nats_url="nats://127.0.0.1:4222",
        ),
        run_dir="/data/run/x",
    )


def test_how_to_talk_to_a_cluster() -> None:
    rows = dict(how_to_talk(facts()))
    assert rows["curl"].startswith("curl -s http://127.0.0.1:8000/v1/chat/completions -H ")
    assert '"model": "tiny"' in rows["curl"]
    assert rows["metrics"] == "http://127.0.0.1:8000/metrics"
    assert "authorization" not in rows["curl"]
    assert "authorization: Bearer" in dict(how_to_talk(facts("long enough")))["curl"]
    keys = (ApiKeySettings(tenant="a", key="long enough"),)
    keyed = replace(facts(), config=ClusterConfig(router=RouterSettings(api_keys=keys)))
    assert "authorization: Bearer" in dict(how_to_talk(keyed))["curl"]


def test_up_line_by_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = LineView(console, clock=iter([0.0, 7.5]).__next__)
    view.on_part(PartEvent(part="nats", state=PartState.READY, detail="nats://127.0.0.1:1\nmore"))
    view.on_ready(facts())
    view.on_draining()
    view.on_stopped()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "nats: ready (nats://127.0.0.1:1)"
    assert lines[1] == "ready: smollm2-135m, bfloat16: 1 prefill + 1 decode"
    assert lines[-1] == "stopped after 7.5 s: nothing is left running"
    assert "\x1b" not in "".join(lines)


def test_the_board_names_every_part_and_how_long_it_has_taken() -> None:
    board = Board(ClusterConfig(), now=0.0)
    board.change(PartEvent(part="nats", state=PartState.READY, detail="nats://x"), now=1.0)
    board.change(PartEvent(part="decode-0", state=PartState.STARTING), now=2.0)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(board.render(UNICODE, now=5.0))
    board.change(PartEvent(part="decode-0", state=PartState.READY, detail="a=b"), now=5.5)
    board.all_ready(facts().endpoints, now=6.0)
    console.print(board.render(UNICODE, now=6.0))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0][:2] == ["moonpool", "smollm2-135m,"]
    assert lines[1] == ["✔", "nats", "ready", "nats://x"]
    assert ["·", "decode-0", "starting", "3.0", "s"] in lines
    assert ["✔", "decode-0", "ready", "a=b"] in lines
    assert ["✔", "router", "ready", "127.0.0.1:8001,", "http://127.0.0.1:8000"] in lines


def test_a_terminal_keeps_the_last_board_and_lines_follow() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    view = BoardView(console, ClusterConfig(), clock=lambda: 3.0)
    view.on_part(PartEvent(part="router", state=PartState.STARTING))
    view.on_ready(facts())
    view.on_part(PartEvent(part="router", state=PartState.CRASHED, detail="killed"))
    view.on_draining()
    view.on_forced()
    view.on_stopped()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "✔  router" in text
    assert "router: crashed (killed)" in text
    assert "forced: killing what is left" in text


# -- the rest --


def test_progress_in_lines() -> None:
    lines: list[str] = []
    clock = iter([0.0, 2.0, 2.0, 3.0, 4.5]).__next__
    progress = LineProgress(lines.append, "tiny", clock=clock)
    progress("download", 0, None)
    progress("download", 2**20, 2**20)
    progress("verify", 1, 2**21)
    progress("verify", 2, 2**21)
    progress("verify", 2**21, 2**21)
    assert lines == [
        "tiny: downloading ...",
        "tiny: download done, 1.0 MiB in 2.0 s",
        "tiny: verifying its SHA-256 (2.0 MiB) ...",
        "tiny: verify done, 2.0 MiB in 2.5 s",
    ]


def test_findings_and_their_sum() -> None:
    bad = Finding(
        check="nats", severity=Severity.ERROR, message="is not there", fix="pip install x"
    )
    assert list(finding_lines(bad, ASCII)) == [
        "x nats       is not there",
        "             fix: pip install x",
    ]
    warning = Finding(check="ulimit", severity=Severity.WARNING, message="low")
    assert summary([bad, warning, warning]).startswith("1 error, 2 warnings: this machine cannot")
    assert summary([warning]).endswith("can run the cluster.")
    assert summary([]) == "This machine can run the cluster."


def test_an_answers_footer() -> None:
    reply = Reply(text="hi", done=DONE, token_times_s=TOKEN_TIMES_S)
    assert footer(reply) == (
        "1100 tokens in (0 cached), 4 out, prefilled on prefill-0, decoded on decode-0, first token "
        "115.0 ms, 42 tokens/s; moonpool trace r1"
    )
    assert reply_json(reply)["usage"]["prompt_tokens"] == 1100


def test_the_demos_prompt_is_long_and_ends_with_a_question() -> None:
    messages = demo_messages()
    assert sum(len(message.content.split()) for message in messages) > 700
    assert [message.role for message in messages[-3:]] == ["user", "assistant", "user"]
    assert messages[-1].content == QUESTION


def test_doctor_shows_no_credentials() -> None:
    config = ClusterConfig.model_validate({"nats": {"url": "nats://ops:secret@broker:4222"}})
    (finding,) = check_nats(Task(config=config, is_deep=False))
    assert finding.message == "an own broker is used: nats://...@broker:4222 (not asked)"
