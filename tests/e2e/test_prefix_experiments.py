"""The experiments about prefixes, small: the same path through real processes on a tiny model."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from moonpool.cli.demo_asked import PrefixPlan, Source
from moonpool.cli.demo_cluster import DemoModel
from moonpool.cli.demo_prefix import run_demo_prefix
from moonpool.hub.model_dir import resolve
from moonpool_loadtest.experiments.lab import Cores, Setting
from moonpool_loadtest.experiments.multi_turn import IN_TURNS, Chat, Turn, open_runner
from moonpool_loadtest.experiments.slow_peer import Holder, open_arm
from support.tiny_llama import TinyLlama, write_tiny_llama


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    cores = sorted(os.sched_getaffinity(0))
    (tmp_path / "data").mkdir()
    model = write_tiny_llama(tmp_path / "tiny", TinyLlama())
    return Setting(
        model=resolve(str(model), data_dir=tmp_path / "data"),
        home=tmp_path / "data",
        dtype="float32",
        cores=Cores(engine=cores[-1], others=cores[0]),
        is_quick=True,
    )


def check(turns: list[Turn]) -> None:
    """Nothing is computed twice, and what is told is what was computed."""
    assert max(turn.num_excess_tokens for turn in turns) <= 0, turns
    # A worker may have forgotten a step of a turn; of most it has not.
    told = [turn for turn in turns if turn.num_engine_tokens is not None]
    assert len(told) >= len(turns) / 2, turns
    assert [turn for turn in told if turn.num_engine_tokens != turn.num_computed_tokens] == []
    assert turns[-1].num_peer_tokens > 0, turns


async def test_a_chat_that_changes_its_workers_each_turn_computes_what_is_new(
    setting: Setting,
) -> None:
    chat = Chat(num_turns=4, opening_tokens=200, question_tokens=40, answer_tokens=8)
    async with open_runner(setting, IN_TURNS, chat, peer_reads="always") as runner:
        by_tokens = await runner.by_tokens()
        by_text = await runner.by_text()
    check(by_tokens)
    check(by_text)
    assert [turn.num_changed_tokens for turn in by_tokens] == [0] * 4
    assert [turn.num_new_tokens for turn in by_tokens] == [200, 40, 40, 40]
    pairs = [turn.workers for turn in by_tokens]
    assert all(one != other for one, other in itertools.pairwise(pairs)), pairs


async def test_a_question_to_the_reader_is_a_hit_on_the_disk_each_time(setting: Setting) -> None:
    async with open_arm(
        setting,
        "delayed",
        document_tokens=160,
        holder=Holder.DISK,
        reads="always",
        fault="delay:50",
    ) as arm:
        hits = [await arm.hit() for _ in range(2)]
        stats = (await arm.asker.cluster.store_report("store-0")).stats
    # Its memory has room for one of the two: most of each lies on the disk alone.
    assert stats.num_hit_disk_blocks > 10
    for hit in hits:
        assert (hit.outcome, hit.num_read_tokens) == ("whole", 160)
        assert hit.fetch_ms > 50


def test_the_demo_finds_a_document_wherever_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", TinyLlama())
    data_dir = tmp_path / "data"
    status = run_demo_prefix(
        DemoModel(model=str(model), dtype="float32", data_dir=data_dir),
        PrefixPlan(prefix_tokens=512, question_tokens=64, num_rounds=1, peer_reads="always"),
        is_json=True,
    )
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [one["source"] for one in told["asked"]] == [
        Source.COLD,
        Source.PEER,
        *[Source.OWN] * 2,
        *[Source.HOST] * 2,
        Source.RESTARTED,
        Source.DISK,
    ]
    own, peer, store = (
        [one[f"num_{key}_tokens"] for one in told["asked"]] for key in ("cached", "peer", "store")
    )
    assert own == [0, *[512] * 7]
    assert peer == [0, 512, *[0] * 6]
    assert store == [*[0] * 4, *[512] * 4]
    assert told["asked"][1]["fetched"]["num_bytes"] == 512 // 16 * 12_288
    # Its disk is gone with it.
    assert [path.name for path in data_dir.iterdir() if path.name.startswith("demo")] == []
