"""What the demo and the experiments about prefixes make of answers; no cluster is started here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moonpool.cli.ask import Reply
from moonpool.cli.demo_asked import (
    Asked,
    PrefixPlan,
    Ratio,
    Source,
    asked_line,
    make_asked,
    ratio_lines,
    ratios,
    result_json,
    work_ratio,
)
from moonpool.cli.demo_document import make_document, make_prompt
from moonpool.errors import InternalError
from moonpool.hub.model_config import ModelConfig, read_model_config
from moonpool.hub.tokenizer import Tokenizer
from moonpool.ids import RequestId
from moonpool.inference.generation import GenerationDone, PlacementSummary, Timing, Usage
from moonpool.inference.output import FinishReason
from moonpool.telemetry import names
from moonpool.wire.spans import Span
from moonpool_loadtest.experiments.multi_turn import Turn, common_length
from moonpool_loadtest.experiments.multi_turn import findings_of as turn_findings
from moonpool_loadtest.experiments.slow_peer import (
    DELAYED,
    RECOMPUTE,
    WELL,
    Hit,
    bandwidth,
)
from moonpool_loadtest.experiments.slow_peer import findings_of as peer_findings
from support.tiny_llama import TinyLlama, write_tiny_llama

MS = 1_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", TinyLlama())


# -- the demo --


def test_documents_and_prompts_have_the_tokens_that_were_asked_for(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    documents = [make_document(tokenizer, number, num_tokens=800) for number in (1, 2)]
    assert documents[0][:3] != documents[1][:3]
    for document in documents:
        prefix = tokenizer.encode(document)
        prompts = [
            tokenizer.encode(make_prompt(tokenizer, document, number, num_tokens=880))
            for number in range(4)
        ]
        assert [len(ids) for ids in (prefix, *prompts)] == [800, 880, 880, 880, 880]
        assert all(prompt[:800] == prefix for prompt in prompts)
        # Not even one block of a question is found in another's.
        assert len({tuple(prompt[800:816]) for prompt in prompts}) == 4


def smollm2_shape(model: Path) -> ModelConfig:
    return dataclasses.replace(
        read_model_config(model),
        num_layers=30,
        hidden_size=576,
        intermediate_size=1_536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49_152,
    )


def test_the_bound_is_the_ratio_of_multiplications(model: Path) -> None:
    plan = PrefixPlan(prefix_tokens=6_144, question_tokens=64, num_rounds=1)
    assert work_ratio(smollm2_shape(model), plan) == pytest.approx(64.7, abs=0.1)
    nothing = PrefixPlan(prefix_tokens=0, question_tokens=64, num_rounds=1)
    assert work_ratio(smollm2_shape(model), nothing) == 1.0


def reply(*, cached: int, peer: int = 0, store: int = 0) -> Reply:
    return Reply(
        text="",
        done=GenerationDone(
            request_id=RequestId("r"),
            model="tiny",
            finish_reason=FinishReason.LENGTH,
            usage=Usage(
                num_prompt_tokens=880,
                num_completion_tokens=4,
                num_cached_tokens=cached,
                num_peer_tokens=peer,
                num_store_tokens=store,
            ),
            timing=Timing(ttft_ms=49.0, ttft_parts_ms={"tokenize": 1.0, "prefill": 48.0}),
            placement=PlacementSummary(
                prefill_worker="", decode_worker="decode-1", num_attempts=1, reason=""
            ),
        ),
        token_times_s=(0.05, 0.06, 0.07, 0.08),
    )


FETCH = Span(
    trace_id="0" * 32,
    span_id="0" * 16,
    parent_span_id="1" * 16,
    name=names.SPAN_KV_FETCH,
    start_unix_ns=0,
    end_unix_ns=20 * MS,
    attributes={
        "moonpool.source": "decode-0@1",
        names.ATTR_BACKEND: "shm",
        names.ATTR_BYTES: 40_000_000,
        names.ATTR_REASON: "whole",
    },
)


def test_a_question_is_told_by_where_its_document_came_from() -> None:
    cold, own, peer = (
        make_asked(reply(cached=cached, peer=peer), spans, number=1)
        for cached, peer, spans in ((0, 0, []), (800, 0, []), (800, 784, [FETCH]))
    )
    assert [one.source for one in (cold, own, peer)] == [Source.COLD, Source.OWN, Source.PEER]
    assert [one.fetched for one in (cold, own)] == [None, None]
    assert "880 tokens computed" in asked_line(cold)
    assert asked_line(own).endswith("80 tokens computed, 800 found there")
    assert asked_line(peer).endswith(
        "80 tokens computed, 16 found there, 784 read from decode-0: 38.1 MiB over shm in 20.0 ms "
        "(2.0 GB/s)"
    )


def test_what_came_from_a_store_is_told_as_read() -> None:
    fetch = dataclasses.replace(FETCH, attributes={**FETCH.attributes, "moonpool.source": "s@1"})
    one = make_asked(reply(cached=800, store=800), [fetch], number=1)
    assert (one.source, one.num_peer_tokens, one.num_store_tokens) == (Source.HOST, 0, 800)
    assert "80 tokens computed, 800 read from s: 38.1 MiB over shm" in asked_line(one)


def asked(number: int, source: Source, ttft_ms: float) -> Asked:
    one = make_asked(reply(cached=0, peer=0), [], number=number)
    return dataclasses.replace(one, source=source, ttft_ms=ttft_ms)


def test_ratios_are_of_waits_in_one_round() -> None:
    answered = [
        *(asked(1, Source.COLD, 900), asked(1, Source.OWN, 10), asked(1, Source.OWN, 20)),
        *(asked(2, Source.COLD, 600), asked(2, Source.OWN, 10), asked(2, Source.PEER, 30)),
    ]
    assert ratios(answered, Source.OWN) == Ratio(values=(60.0, 60.0))
    assert str(ratios(answered, Source.PEER)) == "20.0x  [20.0 .. 20.0]"
    assert ratios(answered[:3], Source.PEER) is None


def test_bars_hold_for_the_sizes_that_they_were_asked_for() -> None:
    answered = [asked(1, Source.COLD, 900), asked(1, Source.HOST, 20), asked(1, Source.DISK, 50)]
    plan = PrefixPlan(prefix_tokens=6_144, question_tokens=64, num_rounds=1)
    assert ratio_lines(answered, plan) == [
        "  peer      no question was answered so",
        "  own pool  no question was answered so",
        "  store     45.0x  [45.0 .. 45.0]  asked for: 40x",
        "  restarted no question was answered so",
        "  disk      18.0x  [18.0 .. 18.0]  asked for: 20x, MISSED",
    ]
    told = result_json(answered, plan, bound=64.7)
    assert told["cold_over_disk"] == {"median": 18.0, "values": [18.0]}
    assert told["cold_over_restarted"] is None
    assert told["bars"] == {
        **{"cold_over_own": 40.0, "cold_over_peer": 25.0},
        **{"cold_over_host": 40.0, "cold_over_disk": 20.0},
    }
    small = dataclasses.replace(plan, prefix_tokens=512)
    assert not any("asked for" in line for line in ratio_lines(answered, small))


# -- a chat of several turns --


def turn(number: int, *, computed: int, new: int, left: int, changed: int = 0) -> Turn:
    return Turn(
        number=number,
        num_prompt_tokens=1_000,
        num_new_tokens=new,
        num_device_tokens=1_000 - computed,
        num_peer_tokens=0,
        num_engine_tokens=computed,
        ttft_ms=100.0 / number,
        workers=("decode-0",),
        num_left=left,
        num_changed_tokens=changed,
    )


def test_a_turn_may_compute_what_is_new_and_a_block_for_each_worker_that_it_left() -> None:
    first = turn(1, computed=1_000, new=1_000, left=0)
    assert turn(2, computed=56, new=40, left=1).num_excess_tokens == 0
    assert turn(2, computed=57, new=40, left=1).num_excess_tokens == 1
    assert turn(2, computed=57, new=40, left=2).num_excess_tokens == -15
    within, beyond = (
        turn_findings({("placed", "text"): [first, turn(2, computed=computed, new=40, left=1)]})
        for computed in (56, 60)
    )
    assert [finding.is_met for finding in within] == [True, None, True, None, None]
    assert [finding.is_met for finding in beyond] == [False, None, True, None, None]
    assert within[3].value == 2.0


def test_what_engines_computed_is_held_against_what_is_told() -> None:
    wrong = dataclasses.replace(turn(2, computed=50, new=40, left=1), num_engine_tokens=66)
    unknown = dataclasses.replace(wrong, num_engine_tokens=None)
    first = turn(1, computed=1_000, new=1_000, left=0)
    for turns, value, is_met in (
        ([first, wrong], 16, False),
        ([first, unknown], 0, True),
        ([unknown, unknown], 0, None),
    ):
        finding = turn_findings({("placed", "tokens"): turns})[2]
        assert (finding.value, finding.is_met) == (value, is_met)


@pytest.mark.parametrize(
    ("before", "after", "common"),
    [((), (1, 2), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 5, 3), 1), ((4,), (5,), 0)],
)
def test_what_two_prompts_have_in_common(
    before: tuple[int, ...], after: tuple[int, ...], common: int
) -> None:
    assert common_length(before, after) == common


# -- a slow peer --


def hit(ttft_ms: float, outcome: str = "not asked", num_bytes: int = 0) -> Hit:
    return Hit(
        ttft_ms=ttft_ms, num_read_tokens=0, num_bytes=num_bytes, fetch_ms=10.0, outcome=outcome
    )


def test_slow_arms_are_held_to_recomputing_at_the_median_and_at_the_95th_percentile() -> None:
    base = [hit(100.0)] * 20
    # The first experience may cost: it is one of twenty, beyond the 95th percentile.
    slow = [hit(130.0, "slow"), *[hit(104.0)] * 19]
    well = [hit(20.0, "whole", 8_000_000)] * 20
    findings = {
        finding.what: finding
        for finding in peer_findings({RECOMPUTE: base, WELL: well, DELAYED: slow})
    }
    for words in ("median", "p95"):
        assert findings[f"{DELAYED}: {words} TTFT over recompute"].is_met is True
        assert findings[f"{WELL}: {words} TTFT over recompute"].is_met is None
    twice = peer_findings({RECOMPUTE: base, DELAYED: [*slow[:1], *slow[:1], *slow[2:]]})
    assert [finding.is_met for finding in twice] == [None, True, False]
    assert twice[2].detail == "[1.040 .. 1.300], 130 ms; 18 not asked, 2 slow"


def test_bandwidth_is_that_of_the_best_whole_read() -> None:
    hits = [hit(1.0, "whole", 1_000_000), hit(1.0, "whole", 3_000_000), hit(1.0, "slow", 9_000_000)]
    assert bandwidth(hits) == 3e8
    with pytest.raises(InternalError, match="not asked"):
        bandwidth([hit(1.0)])
