"""`moonpool demo prefix`: a long document is computed once, and then asked about in every other way.

Life
  1. The model is pulled if it is not here.
  2. NATS, a router and two decode workers start on free ports of 127.0.0.1. Requests are placed in
     turns (`--router-mode round_robin`): the default policy would send every question to the worker
     that holds its document, and nothing would have to be read from a peer.
  3. Each round has a new document and eight questions about it, the same number of tokens each:
         worker 0 computes everything             cold
         worker 1 reads the document from 0       peer
         worker 0 finds it in its own pool        own pool
         worker 1 finds it in its own pool, too   own pool
     Then a store joins, and takes what the workers hold (demo_store.py). Before each of the other
     questions the workers forget it.
         worker 0 reads it from the store         store
         worker 1 reads it from the store         store
         worker 0 is killed, comes back, reads    restarted
         the store is killed, comes back with
         its disk alone, and worker 1 reads       disk
     And one round with a short document goes before, so that nothing is done for the first time.
  4. What happened is shown, and cold over hit: the ratio of two waits in one round.
  5. Everything stops; nothing is left running.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from moonpool.cli.ask import ask_prompt
from moonpool.cli.demo_asked import (
    Asked,
    PrefixPlan,
    Source,
    asked_line,
    make_asked,
    part_lines,
    ratio_lines,
    result_json,
    work_ratio,
)
from moonpool.cli.demo_cluster import DemoModel, DemoScreen, demo_config, whole_trace
from moonpool.cli.demo_document import make_document, make_prompt
from moonpool.cli.demo_store import STORE, DemoStore
from moonpool.cli.failure import EXIT_OK
from moonpool.cli.pull import resolve_shown
from moonpool.cli.up import with_worker_counts
from moonpool.cluster.local_cluster import ClusterOptions, LocalCluster
from moonpool.config.schema import ClusterConfig, StoreGroup
from moonpool.errors import ConfigError
from moonpool.hub.model_config import ModelConfig
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import SamplingOptions, TextPrompt

#: Before the store joins, and after it.
_QUESTIONS_TO_WORKERS = 4
_QUESTIONS_TO_STORE = 4
_WARM_UP_TOKENS = 512
#: Tokens of an answer: the first one is what is waited for.
_MAX_TOKENS = 4
_BLOCK_SIZE = 16


def run_demo_prefix(served: DemoModel, plan: PrefixPlan, *, is_json: bool) -> int:
    """Live through the five steps.

    Raises:
        MoonpoolError: A step failed; nothing is left running.
    """
    if plan.prefix_tokens % _BLOCK_SIZE:
        raise ConfigError(
            f"--prefix-tokens {plan.prefix_tokens}: allowed are multiples of {_BLOCK_SIZE}, since KV "
            "is kept in blocks of so many tokens"
        )
    config = with_worker_counts(
        demo_config(
            served,
            {
                "router.placement.mode": "round_robin",
                "worker.block_size": _BLOCK_SIZE,
                "worker.num_blocks": _num_blocks(plan),
                "worker.kv_peer_reads": plan.peer_reads,
            },
        ),
        num_prefill=0,
        num_decode=2,
    )
    model = resolve_shown(config.model, config.data_dir, is_json=is_json)
    longest = plan.num_tokens + _MAX_TOKENS
    if longest > model.config.max_positions:
        raise ConfigError(
            f"{longest} tokens of document, question and answer: {model.name} takes at most "
            f"{model.config.max_positions}"
        )
    screen = DemoScreen(is_json=is_json)
    tokenizer = Tokenizer.load(model.path)
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Beside the model rather than where temporary files are: that may be memory.
    with tempfile.TemporaryDirectory(prefix="demo-ssd-", dir=config.data_dir) as ssd_dir:
        config = _with_store(config, model.config, ssd_dir=Path(ssd_dir))
        asyncio.run(_demo(config, plan, model.config, tokenizer, screen))
    return EXIT_OK


def _num_blocks(plan: PrefixPlan) -> int:
    """A pool for two documents with their questions: older ones are evicted."""
    per_question = -(-(plan.question_tokens + _MAX_TOKENS) // _BLOCK_SIZE) + 1
    per_round = plan.prefix_tokens // _BLOCK_SIZE + _QUESTIONS_TO_WORKERS * per_question
    warm_up = _WARM_UP_TOKENS // _BLOCK_SIZE + _QUESTIONS_TO_WORKERS * per_question
    return 2 * per_round + warm_up


def _with_store(config: ClusterConfig, model: ModelConfig, *, ssd_dir: Path) -> ClusterConfig:
    """The same with a store that has as much memory as a worker, and a disk for twice that."""
    num_blocks = config.worker.num_blocks
    assert num_blocks is not None, "chosen by the demo"
    block_bytes = model.kv_layout(1, config.dtype, _BLOCK_SIZE).block_bytes
    store = config.store.model_copy(
        update={
            "host_bytes": num_blocks * block_bytes,
            "ssd_dir": ssd_dir,
            "ssd_bytes": 2 * num_blocks * block_bytes + 2**20,
            "ssd_admission": "all",
            "is_ssd_strict": True,
        }
    )
    return config.model_copy(update={"store": store, "stores": (StoreGroup(settings=store),)})


async def _demo(
    config: ClusterConfig,
    plan: PrefixPlan,
    model: ModelConfig,
    tokenizer: Tokenizer,
    screen: DemoScreen,
) -> None:
    asked: list[Asked] = []
    options = ClusterOptions(has_stores=False)
    async with LocalCluster(config, options=options, on_event=screen.on_part) as cluster:
        screen.on_ready(cluster)
        screen.say(
            f"Documents of {plan.prefix_tokens:,} tokens, questions of {plan.question_tokens}. Requests "
            "are placed in turns, so that\neach document is asked about on a worker that lacks it, too.",
            style="dim",
        )
        asker = _Asker(cluster, tokenizer, plan, screen)
        await asker.warm_up()
        for number in range(1, plan.num_rounds + 1):
            screen.say(f"\nDocument {number}", style="bold")
            asked += await asker.ask_round(number)
    _show(screen, asked, bound=work_ratio(model, plan), plan=plan)
    screen.on_stopped()


class _Asker:
    """Asks a cluster, one question after the other."""

    def __init__(
        self, cluster: LocalCluster, tokenizer: Tokenizer, plan: PrefixPlan, screen: DemoScreen
    ) -> None:
        self._cluster = cluster
        self._tokenizer = tokenizer
        self._plan = plan
        self._screen = screen
        ssd_dir = cluster.config.store.ssd_dir
        assert ssd_dir is not None, "chosen by the demo"
        self._store = DemoStore(
            cluster, ssd_dir=ssd_dir, num_blocks=plan.prefix_tokens // _BLOCK_SIZE
        )

    async def warm_up(self) -> None:
        """A short document, for each worker to have done everything once."""
        num_tokens = min(_WARM_UP_TOKENS, self._plan.prefix_tokens)
        document = make_document(self._tokenizer, 0, num_tokens=num_tokens)
        for question in range(_QUESTIONS_TO_WORKERS):
            await self._ask_quietly(self._prompt(document, question, num_tokens), 0)

    async def ask_round(self, number: int) -> list[Asked]:
        """A new document, and all questions about it; each is shown when it is answered."""
        num_tokens = self._plan.prefix_tokens
        document = make_document(self._tokenizer, number, num_tokens=num_tokens)
        prompts = [
            self._prompt(document, question, num_tokens)
            for question in range(_QUESTIONS_TO_WORKERS + _QUESTIONS_TO_STORE)
        ]
        # What is left of the document before would fill the store, too.
        await self._store.empty_workers()
        asked = [await self._ask(prompt, number) for prompt in prompts[:_QUESTIONS_TO_WORKERS]]
        victims = (None, None, asked[0].worker, STORE)
        async with self._store.joined(self._screen):
            for prompt, victim in zip(prompts[_QUESTIONS_TO_WORKERS:], victims, strict=True):
                await self._store.empty_workers()
                if victim is not None:
                    await self._store.restart(self._screen, victim)
                asked.append(await self._ask_store(prompt, number, victim=victim))
        return asked

    def _prompt(self, document: str, question: int, document_tokens: int) -> str:
        num_tokens = document_tokens + self._plan.question_tokens
        return make_prompt(self._tokenizer, document, question, num_tokens=num_tokens)

    async def _ask_store(self, prompt: str, number: int, *, victim: str | None) -> Asked:
        """After `victim` was killed; what the answer came from is what the store has lent."""
        before = await self._store.num_disk_blocks()
        one = await self._ask_quietly(prompt, number)
        if one.source is Source.HOST:
            if await self._store.num_disk_blocks() > before:
                one = replace(one, source=Source.DISK)
            elif victim == one.worker:
                one = replace(one, source=Source.RESTARTED)
        self._screen.say(asked_line(one))
        return one

    async def _ask(self, prompt: str, number: int) -> Asked:
        one = await self._ask_quietly(prompt, number)
        self._screen.say(asked_line(one))
        return one

    async def _ask_quietly(self, prompt: str, number: int) -> Asked:
        address = self._cluster.endpoints.grpc_address
        reply = await ask_prompt(
            TextPrompt(text=prompt),
            SamplingOptions(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True),
            address=address,
            api_key=None,
        )
        spans = await whole_trace(address, reply.done.request_id)
        await self._cluster.wait_quiet()
        await self._cluster.wait_followed()
        return make_asked(reply, spans, number=number)


def _show(screen: DemoScreen, asked: list[Asked], *, bound: float, plan: PrefixPlan) -> None:
    screen.result(result_json(asked, plan, bound=bound))
    screen.say("\nTime to the first token, cold over hit", style="bold")
    for line in ratio_lines(asked, plan):
        screen.say(line)
    screen.say(f"  {'bound':9} {bound:.1f}x, the ratio of what there is to multiply", style="dim")
    screen.say("\nIn parts, medians", style="bold")
    for line in part_lines(asked):
        screen.say(line)
