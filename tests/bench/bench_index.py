"""How fast the prefix index is: `python tests/bench/bench_index.py TRACE [--rounds N]`.

TRACE is a Mooncake trace (jsonl with `hash_ids`); divided by 32, each of its 512-token blocks is one block
of 16 tokens, so that a hash id is a block. Its requests go round 8 workers; what a worker did not hold
yet becomes one batch of events. Beside the index, with its table in C and in Python, stands the RadixTree
of Dynamo's Python binding (extra `peers`); without it only ours is measured. Times are CPU seconds of the
process, all threads: on a shared machine the wall clock counts the neighbours too. All arms take turns
within one run, and ratios are medians over the rounds. Prints a table, then JSON.

insert       all batches of the trace into an empty index; Dynamo's arrive as the JSON that it takes
match        all requests of the trace against the full index
replay       both in the trace's order: match, then insert
place        a prompt of 750 blocks (12k tokens) among 64 workers that hold, beside the whole trace:
  equal      all of it, each of them          steps      each 1/64 of it more than the one before
  usual      a common start of 64 blocks, eight of them half, one all           cold     nothing

Everything that is an argument is made before the clock runs: keys as arrays for ours, lists of ints for
Dynamo's. Every arm answers with a dict by worker.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moonpool import native
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_key import KeyArray, block_keys
from moonpool.kv.events import BlockStored
from moonpool.kv.key_table import KeyTable
from moonpool.kv.prefix_index import PrefixIndex
from moonpool.kv.published_set import EventBatch, PublishedSet

NUM_TRACE_WORKERS = 8
NUM_PLACE_WORKERS = 64
PROMPT_BLOCKS = 750
PLACE_REPEATS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """Blocks that a worker has stored, in the forms that the arms take."""

    worker: int
    batch: EventBatch
    dynamo_event: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    keys: KeyArray
    dynamo_hashes: list[int]


class Arm(Protocol):
    """One index, empty when made, for workers 0 to 63."""

    def insert(self, inserts: Sequence[Insert]) -> None: ...

    def match(self, queries: Sequence[Query]) -> list[Mapping[Any, int]]:
        """Per query: what each worker holds, as the arm says it."""
        ...

    def replay(self, queries: Sequence[Query], inserts: Sequence[Insert | None]) -> None: ...

    def by_worker(self, answer: Mapping[Any, int]) -> dict[int, int]:
        """The same with the workers' numbers."""
        ...


def worker_key(worker: int) -> WorkerKey:
    return WorkerKey(WorkerId(f"worker-{worker}"), Incarnation(f"{worker:016x}"))


class OurArm:
    def __init__(self, table: KeyTable | None) -> None:
        self._index = PrefixIndex(table)
        self._workers = [worker_key(worker) for worker in range(NUM_PLACE_WORKERS)]
        for worker in self._workers:
            self._index.join(worker)

    @property
    def bytes_per_block(self) -> float:
        return self._index.num_bytes / self._index.num_blocks

    def insert(self, inserts: Sequence[Insert]) -> None:
        apply, workers = self._index.apply, self._workers
        for insert in inserts:
            assert not apply(workers[insert.worker], insert.batch)

    def match(self, queries: Sequence[Query]) -> list[Mapping[Any, int]]:
        match = self._index.match
        return [match(query.keys) for query in queries]

    def replay(self, queries: Sequence[Query], inserts: Sequence[Insert | None]) -> None:
        apply, match, workers = self._index.apply, self._index.match, self._workers
        for query, insert in zip(queries, inserts, strict=True):
            match(query.keys)
            if insert is not None:
                apply(workers[insert.worker], insert.batch)

    def by_worker(self, answer: Mapping[Any, int]) -> dict[int, int]:
        return {self._workers.index(worker): length for worker, length in answer.items()}


class DynamoArm:
    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self._tree = RadixTree()

    def insert(self, inserts: Sequence[Insert]) -> None:
        apply = self._tree.apply_event
        for insert in inserts:
            apply(insert.worker, insert.dynamo_event)

    def match(self, queries: Sequence[Query]) -> list[Mapping[Any, int]]:
        find = self._tree.find_matches
        return [find(query.dynamo_hashes).scores for query in queries]

    def replay(self, queries: Sequence[Query], inserts: Sequence[Insert | None]) -> None:
        apply, find = self._tree.apply_event, self._tree.find_matches
        for query, insert in zip(queries, inserts, strict=True):
            _ = find(query.dynamo_hashes).scores
            if insert is not None:
                apply(insert.worker, insert.dynamo_event)

    def by_worker(self, answer: Mapping[Any, int]) -> dict[int, int]:
        return {
            worker[0] if isinstance(worker, tuple) else worker: length
            for worker, length in answer.items()
        }


# -- what is inserted and asked for --


def block_hash(number: int) -> BlockHash:
    """A hash for a block of the trace: uniform in all its bytes."""
    words = np.array([number + 1 + (part << 40) for part in range(4)], np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return BlockHash((words ^ (words >> np.uint64(31))).tobytes())


class Publisher:
    """A worker that never evicts: what it is given and does not hold yet becomes an event."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._published = PublishedSet()
        self._held: set[BlockHash] = set()

    def store(self, chain: Sequence[BlockHash]) -> Insert | None:
        start = next((n for n, one in enumerate(chain) if one not in self._held), len(chain))
        if start == len(chain):
            return None
        self._held.update(chain)
        parent = chain[start - 1] if start else None
        event = BlockStored(hashes=tuple(chain[start:]), parent_hash=parent)
        batch = self._published.apply([event])
        assert batch is not None
        keys = batch.stored_keys.tolist()
        stored = {
            "parent_hash": int(batch.stored_parents[0]) if start else None,
            "blocks": [{"block_hash": key, "tokens_hash": key} for key in keys],
        }
        event_json = {"event_id": batch.head.sequence, "data": {"stored": stored}}
        return Insert(
            worker=self._worker, batch=batch, dynamo_event=json.dumps(event_json).encode()
        )


def query(chain: Sequence[BlockHash]) -> Query:
    keys = block_keys(chain)
    return Query(keys=keys, dynamo_hashes=keys.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    queries: list[Query]
    #: Per query: what its worker stores afterwards.
    inserts: list[Insert | None]
    #: After those: what the workers store of the prompts that are placed.
    place_inserts: list[Insert]
    #: The prompt to place, by case.
    prompts: dict[str, Query]
    num_stored: int
    num_distinct: int


def make_work(trace: Path) -> Work:
    with trace.open(encoding="utf-8") as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    hash_by_id = {number: block_hash(number) for number in {n for ids in requests for n in ids}}
    publishers = [Publisher(worker) for worker in range(NUM_PLACE_WORKERS)]
    chains = [[hash_by_id[number] for number in ids] for ids in requests]
    inserts = [
        publishers[place % NUM_TRACE_WORKERS].store(chain) for place, chain in enumerate(chains)
    ]
    place_inserts: list[Insert | None] = []
    prompts: dict[str, Query] = {}
    for number, (case, lengths) in enumerate(held_lengths().items(), start=1):
        first = number << 32
        prompt = [block_hash(block) for block in range(first, first + PROMPT_BLOCKS)]
        prompts[case] = query(prompt)
        for publisher, length in zip(publishers, lengths, strict=True):
            place_inserts.append(publisher.store(prompt[:length]))
    return Work(
        queries=[query(chain) for chain in chains],
        inserts=inserts,
        place_inserts=[insert for insert in place_inserts if insert is not None],
        prompts=prompts,
        num_stored=sum(insert.batch.num_keys for insert in inserts if insert is not None),
        num_distinct=len(hash_by_id),
    )


def held_lengths() -> dict[str, list[int]]:
    """By case: how many blocks of its prompt each of the 64 workers holds."""
    num = NUM_PLACE_WORKERS
    return {
        "equal": [PROMPT_BLOCKS] * num,
        "steps": [PROMPT_BLOCKS * (worker + 1) // num for worker in range(num)],
        "usual": [PROMPT_BLOCKS] + [PROMPT_BLOCKS // 2] * 8 + [64] * (num - 9),
        "cold": [0] * num,
    }


# -- measuring --


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    started = time.process_time()
    work()
    ended = time.process_time()
    gc.enable()
    return ended - started


def measure(make: Callable[[], Arm], work: Work) -> tuple[dict[str, float], list[dict[int, int]]]:
    """Seconds per case; and all answers, to compare between arms."""
    arm, other = make(), make()
    inserts = [insert for insert in work.inserts if insert is not None]
    answers: list[Mapping[Any, int]] = []
    figures = {
        "insert": seconds(lambda: arm.insert(inserts)),
        "match": seconds(lambda: answers.extend(arm.match(work.queries))),
        "replay": seconds(lambda: other.replay(work.queries, work.inserts)),
    }
    arm.insert(work.place_inserts)
    for case, prompt in work.prompts.items():
        prompts = [prompt] * PLACE_REPEATS
        answers += arm.match([prompt])
        figures[f"place {case}"] = seconds(lambda: arm.match(prompts)) / PLACE_REPEATS  # noqa: B023
    return figures, [arm.by_worker(answer) for answer in answers]


def arms() -> dict[str, Callable[[], Arm]]:
    found: dict[str, Callable[[], Arm]] = {
        "native": lambda: OurArm(native.kernels().key_table()),
        "python": lambda: OurArm(None),
    }
    if importlib.util.find_spec("dynamo") is not None:
        found["dynamo"] = DynamoArm
    return found


def run(trace: Path, num_rounds: int) -> dict[str, Any]:
    work = make_work(trace)
    makers = arms()
    rounds: list[dict[str, dict[str, float]]] = []
    answers: dict[str, list[dict[int, int]]] = {}
    for _ in range(num_rounds):
        one: dict[str, dict[str, float]] = {}
        for name, make in makers.items():
            one[name], answers[name] = measure(make, work)
        rounds.append(one)
    rows = []
    for case in rounds[0]["native"]:
        row: dict[str, Any] = {"case": case}
        for name in makers:
            row[f"{name}_s"] = statistics.median(one[name][case] for one in rounds)
        if "dynamo" in makers:
            for name in ("native", "python"):
                ratios = [one["dynamo"][case] / one[name][case] for one in rounds]
                row[f"dynamo_over_{name}"] = [
                    round(value, 2)
                    for value in (statistics.median(ratios), min(ratios), max(ratios))
                ]
        rows.append(row)
    index = OurArm(native.kernels().key_table())
    index.insert([insert for insert in work.inserts if insert is not None])
    return {
        "trace": trace.name,
        "requests": len(work.queries),
        "blocks_asked": sum(len(one.keys) for one in work.queries),
        "blocks_stored": work.num_stored,
        "blocks_distinct": work.num_distinct,
        "native_bytes_per_block": round(index.bytes_per_block, 1),
        "answers_compared": len(answers["native"]),
        "answers_equal": {
            name: sum(a == b for a, b in zip(given, answers["native"], strict=True))
            for name, given in answers.items()
        },
        "rows": rows,
    }


def machine(num_rounds: int) -> dict[str, Any]:
    git = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    peer = "not installed: pip install -e '.[peers]'"
    if importlib.util.find_spec("dynamo") is not None:
        peer = f"ai-dynamo-runtime {importlib.metadata.version('ai-dynamo-runtime')}"
    return {
        "commit": git.stdout.strip(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "native": native.status().message,
        "peer": peer,
        "rounds": num_rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = run(options.trace, options.rounds)
    for row in result["rows"]:
        times = "  ".join(
            f"{name[:-2]} {value * 1e6:12,.1f} us"
            for name, value in row.items()
            if name.endswith("_s")
        )
        ratios = "  ".join(
            f"{name} {value[0]} [{value[1]} .. {value[2]}]"
            for name, value in row.items()
            if name.startswith("dynamo_over")
        )
        sys.stdout.write(f"{row['case']:12} {times}  {ratios}\n")
    sys.stdout.write(json.dumps({"machine": machine(options.rounds), **result}) + "\n")


if __name__ == "__main__":
    main()
