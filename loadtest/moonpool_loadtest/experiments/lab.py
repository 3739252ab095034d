"""Clusters on chosen cores, and a client that notes when each token arrives.

The experiment's own process and everything that it starts share one core; engines are moved from there
to the core that the experiment gives them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import grpc

from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.config.schema import ClusterConfig, Dtype, RoleName, TransportName, default_data_dir
from moonpool.errors import ConfigError, InternalError, MoonpoolError, NotFoundError
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.ids import RequestId
from moonpool.inference.generation import (
    GenerationDone,
    GenerationRequest,
    SamplingOptions,
    TokenPrompt,
)
from moonpool.rpc.admin import fetch_trace
from moonpool.rpc.channel import open_channel
from moonpool.rpc.generate import open_generation
from moonpool.wire.spans import Span

#: Prompts are of tokens in [FIRST_TOKEN_ID, END_TOKEN_ID): below lie SmolLM2's special tokens.
FIRST_TOKEN_ID = 100
END_TOKEN_ID = 40_000
#: WorkerSettings.kv_peer_reads.
PeerReads = Literal["auto", "always", "never"]
DEADLINE_S = 900.0
#: Prompts of requests that decode steadily, and tokens that each has before something is measured.
STEADY_TOKENS = 64
_WARM_TOKENS = 4
#: Spans travel with the last frame: they are there at once, or nearly.
_TRACE_TRIES = 50
_TRACE_PAUSE_S = 0.02

_Arm = TypeVar("_Arm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The two cores of an experiment."""

    #: Of the engine that is looked at, alone.
    engine: int
    #: Of everything else.
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every experiment is told."""

    model: ModelDir
    #: Runs and secrets of the clusters; removed at the end.
    home: Path
    dtype: Dtype
    cores: Cores
    is_quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The workers of one role in a cluster; their worker ids are `<role>-0` and so on."""

    role: RoleName
    engine_core: int
    #: Token budget of a step: how a prompt is cut into chunks.
    chunk_tokens: int
    pool_tokens: int
    transport: TransportName = "shm"
    max_num_seqs: int = 16
    #: They share the core.
    count: int = 1
    peer_reads: PeerReads = "auto"


def cluster_config(
    setting: Setting,
    name: str,
    workers: Sequence[WorkerPlan],
    *,
    local_prefill_tokens: int = 256,
    placement: Mapping[str, object] | None = None,
    store: Mapping[str, object] | None = None,
) -> ClusterConfig:
    """A cluster of these workers; everything but their engines runs on the other core.

    Args:
        placement: Instead of a threshold, which leaves it to the experiment which way a prompt takes.
        store: Settings of a store node, `store-0`; None: there is none.
    """
    others = [setting.cores.others]
    return ClusterConfig.model_validate(
        {
            **({"store": {"cpus": others, **store}, "stores": 1} if store is not None else {}),
            "name": name,
            "data_dir": setting.home,
            "model": str(setting.model.path),
            "dtype": setting.dtype,
            "local_prefill_tokens": local_prefill_tokens,
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "cpus": others,
                "placement": {"disagg": "threshold"} if placement is None else dict(placement),
            },
            "worker": {"is_transport_strict": True, "service_cpus": others},
            "workers": [
                {
                    "role": worker.role,
                    "count": worker.count,
                    "engine_cpus": [worker.engine_core],
                    "max_num_batched_tokens": worker.chunk_tokens,
                    "max_num_seqs": worker.max_num_seqs,
                    "num_blocks": worker.pool_tokens // 16,
                    "transports": [worker.transport],
                    "kv_peer_reads": worker.peer_reads,
                }
                for worker in workers
            ],
        }
    )


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client saw of one request, by the host's wall clock."""

    sent_unix_ns: int
    #: None before the first chunk.
    request_id: RequestId | None = None
    #: One for each token: when the chunk that brought it was read.
    token_unix_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    done: GenerationDone | None = None
    #: Set with each chunk.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_ms(self) -> float:
        return (self.token_unix_ns[0] - self.sent_unix_ns) / 1e6

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Until so many have come."""
        while len(self.token_unix_ns) < num_tokens:
            self.changed.clear()
            await self.changed.wait()

    def gaps_ms(self, *, start_ns: int, end_ns: int) -> list[float]:
        """Between tokens of which both arrived within [start_ns, end_ns)."""
        moments = [moment for moment in self.token_unix_ns if start_ns <= moment < end_ns]
        return [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(moments)]


class Asker:
    """A client of one cluster.

    Args:
        seed: Of the prompts: no two are alike, so nothing is found in a cache.
        vocab_size: Of the model, if it is smaller than the range that prompts are taken from.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        channel: grpc.aio.Channel,
        *,
        seed: int,
        vocab_size: int = END_TOKEN_ID,
    ) -> None:
        self.cluster = cluster
        self._channel = channel
        self._rng = random.Random(seed)
        self._end_token_id = min(END_TOKEN_ID, vocab_size)

    async def ask(self, num_tokens: int, max_tokens: int) -> Answer:
        """The whole answer to a random prompt of `num_tokens`, greedy.

        Raises:
            MoonpoolError: It failed.
        """
        answer = Answer(sent_unix_ns=time.time_ns())
        await self.read(answer, num_tokens, max_tokens)
        return answer

    async def read(self, answer: Answer, num_tokens: int, max_tokens: int) -> None:
        """Ask, and read into `answer` as it comes; being cancelled ends the request."""
        await self.read_prompt(answer, self.new_prompt(num_tokens), max_tokens)

    def new_prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Random tokens, none of them special."""
        end = self._end_token_id
        return tuple(self._rng.randrange(FIRST_TOKEN_ID, end) for _ in range(num_tokens))

    async def read_prompt(self, answer: Answer, prompt: tuple[int, ...], max_tokens: int) -> None:
        """The same for a prompt that the caller chose."""
        request = GenerationRequest(
            prompt=TokenPrompt(token_ids=prompt),
            options=SamplingOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            deadline_s=DEADLINE_S,
        )
        await self.read_request(answer, request)

    async def read_request(self, answer: Answer, request: GenerationRequest) -> None:
        """The same for a request that the caller made."""
        answer.sent_unix_ns = time.time_ns()
        async with open_generation(self._channel, request, peer="the router") as events:
            async for event in events:
                now_ns = time.time_ns()
                answer.request_id = event.request_id
                if isinstance(event, GenerationDone):
                    answer.done = event
                else:
                    answer.token_unix_ns += [now_ns] * len(event.token_ids)
                    answer.token_ids += event.token_ids
                    answer.text += event.text
                answer.changed.set()

    async def trace(self, answer: Answer, *wanted: str) -> tuple[Span, ...]:
        """The closed spans of a request that has ended, those that are `wanted` among them.

        Raises:
            InternalError: They did not come.
        """
        assert answer.request_id is not None, answer
        address = self.cluster.endpoints.grpc_address
        names: set[str] = set()
        for _ in range(_TRACE_TRIES):
            spans: tuple[Span, ...] = ()
            with contextlib.suppress(NotFoundError):
                spans = await fetch_trace(address, answer.request_id, key=None, deadline_s=5.0)
            names = {span.name for span in spans}
            if names.issuperset(wanted):
                return spans
            await asyncio.sleep(_TRACE_PAUSE_S)
        raise InternalError(f"The trace has no span {set(wanted) - names}: {sorted(names)}")


@asynccontextmanager
async def steady_decodes(
    asker: Asker,
    number: int,
    *,
    max_tokens: int,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> AsyncIterator[list[Answer]]:
    """So many requests that decode while the block runs; they have their first tokens when it begins.

    Args:
        max_tokens: More than any of them can draw meanwhile.
        beside: Runs from then on, until it is cancelled with them at the block's end.

    Raises:
        InternalError: One of them ended within the block.
    """
    answers = [Answer(sent_unix_ns=0) for _ in range(number)]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(asker.read(answer, STEADY_TOKENS, max_tokens)) for answer in answers
        ]
        for answer in answers:
            await answer.wait_for_tokens(_WARM_TOKENS)
        if beside is not None:
            running.append(tasks.create_task(beside()))
        yield answers
        have_ended = any(answer.done for answer in answers)
        for task in running:
            task.cancel()
    if have_ended:
        raise InternalError("A steady request ended within its window: use shorter windows.")


def taking_turns(arms: Sequence[_Arm], number: int) -> Iterator[tuple[int, _Arm]]:
    """(turn, arm) for each arm in each of so many turns. Whose is first changes from turn to turn."""
    for turn in range(number):
        first = turn % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield turn, arm


@asynccontextmanager
async def open_asker(
    config: ClusterConfig,
    *,
    seed: int,
    vocab_size: int = END_TOKEN_ID,
    failpoints: Mapping[str, str] | None = None,
) -> AsyncIterator[Asker]:
    """Start the cluster; it is quiet and ready inside the block.

    Args:
        failpoints: By worker id; those that are started again have none.
    """
    options = ClusterOptions(is_pinned=False, failpoints=failpoints or {})
    async with (
        LocalCluster(config, options=options) as cluster,
        open_channel(cluster.endpoints.grpc_address) as channel,
    ):
        yield Asker(cluster, channel, seed=seed, vocab_size=vocab_size)


def progress(text: str) -> None:
    """Tell whoever waits; the results alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def run(
    name: str,
    experiment: Callable[[Setting, argparse.Namespace], Awaitable[None]],
    parser: argparse.ArgumentParser,
) -> int:
    """Parse the command line, find model and cores, run `experiment`; the exit status."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, help="where models are")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="a smoke run: figures mean nothing")
    options = parser.parse_args()
    data_dir = (options.data_dir or default_data_dir(os.environ)).absolute()
    try:
        cores = _two_cores()
        os.sched_setaffinity(0, {cores.others})
        model = resolve(options.model, data_dir=data_dir, can_pull=True)
        with tempfile.TemporaryDirectory(prefix=f"moonpool-{name}-") as home:
            setting = Setting(
                model=model,
                home=Path(home),
                dtype=options.dtype,
                cores=cores,
                is_quick=options.quick,
            )
            asyncio.run(_awaited(experiment(setting, options)))
    except MoonpoolError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


async def _awaited(experiment: Awaitable[None]) -> None:
    await experiment


def _two_cores() -> Cores:
    """The last two that this process may use.

    Raises:
        ConfigError: There is only one.
    """
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise ConfigError("This experiment needs two cores: one engine has one to itself.")
    return Cores(engine=available[-1], others=available[-2])
