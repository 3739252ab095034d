"""How fast the prefix index is: `python tests/bench/bench_index.py TRACE [--rounds N]`.

TRACE is a Mooncake trace (jsonl with `hash_ids`); divided by 32, each of its 512-token blocks is one block
of 16 tokens, so that a hash id is a block. Its requests go round 8 workers; what a worker did not hold
yet becomes one batch of events. Beside the index, with its table in C and in Python, stands the RadixTree
of Dynamo's Python binding (extra `peers`); without it only ours is measured. Arms take turns within one
run. Two clocks, since neighbours on a shared machine get in between:

wait    how long the caller waits, by the wall clock: each call's best of all rounds, averaged over the
        calls. Each of Dynamo's trees lives in a thread of its own: its calls change threads twice.
cpu     what the calls cost, in CPU time of all threads: the median of the rounds

Prints a table, then JSON.

insert       all batches of the trace into an empty index; Dynamo's arrive as the JSON that it takes
match        all requests of the trace against the full index
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
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from moonpool import native
from moonpool.ids import BlockHash, Incarnation, WorkerId, WorkerKey
from moonpool.kv.block_key import KeyArray, block_key, block_keys
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

    def insert(self, insert: Insert) -> object: ...

    def match(self, query: Query) -> Mapping[Any, int]:
        """What each worker holds, as the arm says it."""
        ...

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

    def insert(self, insert: Insert) -> bool:
        return self._index.apply(self._workers[insert.worker], insert.batch)

    def match(self, query: Query) -> Mapping[WorkerKey, int]:
        return self._index.match(query.keys)

    def by_worker(self, answer: Mapping[Any, int]) -> dict[int, int]:
        return {self._workers.index(worker): length for worker, length in answer.items()}


class DynamoArm:
    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found]  # the extra `peers`

        self._tree = RadixTree()

    def insert(self, insert: Insert) -> None:
        self._tree.apply_event(insert.worker, insert.dynamo_event)

    def match(self, query: Query) -> Mapping[Any, int]:
        scores: Mapping[Any, int] = self._tree.find_matches(query.dynamo_hashes).scores
        return scores

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
            "parent_hash": None if parent is None else block_key(parent),
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
    #: What the workers store of them.
    inserts: list[Insert]
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
    stored = [
        publishers[place % NUM_TRACE_WORKERS].store(chain) for place, chain in enumerate(chains)
    ]
    inserts = [insert for insert in stored if insert is not None]
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
        num_stored=sum(insert.batch.num_keys for insert in inserts),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    #: int64[n]: nanoseconds by the wall clock, per call.
    wait_ns: npt.NDArray[np.int64]
    #: Nanoseconds of CPU time per call, on average.
    cpu_ns: float


Argument = TypeVar("Argument")
Result = TypeVar("Result")


def took(
    call: Callable[[Argument], Result], arguments: Sequence[Argument]
) -> tuple[Took, list[Result]]:
    results: list[Result] = []
    waits: list[int] = []
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    cpu = time.process_time_ns()
    for argument in arguments:
        started = clock()
        result = call(argument)
        waits.append(clock() - started)
        results.append(result)
    cpu = time.process_time_ns() - cpu
    gc.enable()
    return Took(wait_ns=np.array(waits, np.int64), cpu_ns=cpu / len(arguments)), results


def measure(make: Callable[[], Arm], work: Work) -> tuple[dict[str, Took], list[dict[int, int]]]:
    """By case; and all answers, to compare between arms."""
    arm = make()
    figures: dict[str, Took] = {}
    figures["insert"], _ = took(arm.insert, work.inserts)
    figures["match"], answers = took(arm.match, work.queries)
    for insert in work.place_inserts:
        arm.insert(insert)
    for case, prompt in work.prompts.items():
        figures[f"place {case}"], same = took(arm.match, [prompt] * PLACE_REPEATS)
        answers.append(same[0])
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
    rounds: list[dict[str, dict[str, Took]]] = []
    answers: dict[str, list[dict[int, int]]] = {}
    for _ in range(num_rounds):
        one: dict[str, dict[str, Took]] = {}
        for name, make in makers.items():
            one[name], answers[name] = measure(make, work)
        rounds.append(one)
    rows = []
    for case in rounds[0]["native"]:
        row: dict[str, Any] = {"case": case}
        for name in makers:
            times = [one[name][case] for one in rounds]
            waits = np.minimum.reduce([time.wait_ns for time in times])
            row[f"{name}_us"] = {
                "wait": round(float(waits.mean()) / 1e3, 2),
                "cpu": round(statistics.median(time.cpu_ns for time in times) / 1e3, 2),
            }
        if "dynamo" in makers:
            for name in ("native", "python"):
                ratios = [one["dynamo"][case].cpu_ns / one[name][case].cpu_ns for one in rounds]
                row[f"dynamo_over_{name}"] = {
                    "wait": round(row["dynamo_us"]["wait"] / row[f"{name}_us"]["wait"], 2),
                    "cpu": round(statistics.median(ratios), 2),
                    "cpu_range": [round(min(ratios), 2), round(max(ratios), 2)],
                }
        rows.append(row)
    index = OurArm(native.kernels().key_table())
    for insert in work.inserts:
        index.insert(insert)
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
    if not native.status().is_compiled:
        sys.exit(native.status().message)
    result = run(options.trace, options.rounds)
    for row in result["rows"]:
        sys.stdout.write(f"{row['case']:12}")
        for name, value in row.items():
            if name != "case":
                sys.stdout.write(f"  {name} {value['wait']} ({value['cpu']})")
        sys.stdout.write("\n")
    sys.stdout.write("microseconds a call and ratios: wait (cpu)\n")
    sys.stdout.write(json.dumps({"machine": machine(options.rounds), **result}) + "\n")


if __name__ == "__main__":
    main()
