"""`moonpool demo prefix`: a long document is computed once, and then asked about on two workers.

Life
  1. The model is pulled if it is not here.
  2. NATS, a router and two decode workers start on free ports of 127.0.0.1. Requests are placed in
     turns (`--router-mode round_robin`): the default policy would send every question to the worker
     that holds its document, and nothing would have to be read from a peer.
  3. Each round has a new document and four questions about it, the same number of tokens each:
         worker 0 computes everything             cold
         worker 1 reads the document from 0       peer
         worker 0 finds it in its own pool        own
         worker 1 finds it in its own pool, too   own
     and one round with a short document goes before, so that nothing is done for the first time.
  4. What happened is shown, and cold over hit: the ratio of two waits in one round.
  5. Everything stops; nothing is left running.
"""

from __future__ import annotations

import asyncio
import enum
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moonpool.cli.ask import Reply, ask_prompt
from moonpool.cli.demo_cluster import DemoModel, DemoScreen, demo_config, whole_trace
from moonpool.cli.demo_document import make_document, make_prompt
from moonpool.cli.failure import EXIT_OK
from moonpool.cli.journey import TTFT_PARTS
from moonpool.cli.pull import resolve_shown
from moonpool.cli.terminal import format_bytes, format_ms, rounded_parts
from moonpool.cli.up import with_worker_counts
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.config.schema import ClusterConfig
from moonpool.errors import ConfigError
from moonpool.hub.model_config import ModelConfig
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import SamplingOptions, TextPrompt
from moonpool.telemetry import names
from moonpool.wire.spans import Span

_QUESTIONS_PER_ROUND = 4
_WARM_UP_TOKENS = 512
#: Tokens of an answer: the first one is what is waited for.
_MAX_TOKENS = 4
_BLOCK_SIZE = 16
#: A worker tells at most twenty times a second what it holds.
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """How much is asked."""

    #: Of a document, in whole blocks; and of a question.
    prefix_tokens: int
    question_tokens: int
    num_rounds: int

    @property
    def num_tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens


class Source(enum.StrEnum):
    """Where the KV of a question's document came from."""

    #: From nowhere: it was computed.
    COLD = "cold"
    PEER = "peer"
    OWN = "own pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A prefix that was read from another worker."""

    source: str
    transport: str
    num_bytes: int
    took_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question, as its client saw it and as it was accounted for."""

    request_id: str
    round: int
    worker: str
    source: Source
    num_prompt_tokens: int
    num_cached_tokens: int
    num_peer_tokens: int
    #: At the client.
    ttft_ms: float
    #: At the router.
    ttft_parts_ms: dict[str, float]
    fetched: Fetched | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Cold over hit, within each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.1f}x  [{min(self.values):.1f} .. {max(self.values):.1f}]"


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
    asyncio.run(_demo(config, plan, model.config, Tokenizer.load(model.path), screen))
    return EXIT_OK


def work_ratio(model: ModelConfig, plan: PrefixPlan) -> float:
    """Multiplications of a cold prompt over those of a hit's: what the ratio can be at most.

    Linear layers for every computed token, attention for every pair of a computed token and one that it
    sees, the vocabulary once.
    """
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)

    def work(num_tokens: int, num_cached_tokens: int) -> float:
        num_pairs = num_tokens * num_cached_tokens + num_tokens * (num_tokens + 1) / 2
        per_layer = num_tokens * layer + num_pairs * 2 * heads
        return model.num_layers * per_layer + model.hidden_size * model.vocab_size

    return work(plan.num_tokens, 0) / work(plan.question_tokens, plan.prefix_tokens)


def ratios(asked: Sequence[Asked], source: Source) -> Ratio | None:
    """Cold over the median hit from `source`, of each round that has both; None if no round has."""
    values = []
    for number in sorted({one.round for one in asked}):
        own = [one for one in asked if one.round == number]
        cold = [one.ttft_ms for one in own if one.source is Source.COLD]
        hits = [one.ttft_ms for one in own if one.source is source]
        if cold and hits:
            values.append(cold[0] / statistics.median(hits))
    return Ratio(values=tuple(values)) if values else None


def _num_blocks(plan: PrefixPlan) -> int:
    """A pool for two documents with their questions: older ones are evicted."""
    per_question = -(-(plan.question_tokens + _MAX_TOKENS) // _BLOCK_SIZE) + 1
    per_round = plan.prefix_tokens // _BLOCK_SIZE + _QUESTIONS_PER_ROUND * per_question
    warm_up = _WARM_UP_TOKENS // _BLOCK_SIZE + _QUESTIONS_PER_ROUND * per_question
    return 2 * per_round + warm_up


async def _demo(
    config: ClusterConfig,
    plan: PrefixPlan,
    model: ModelConfig,
    tokenizer: Tokenizer,
    screen: DemoScreen,
) -> None:
    asked: list[Asked] = []
    async with LocalCluster(config, on_event=screen.on_part) as cluster:
        screen.on_ready(cluster)
        screen.say(
            f"Documents of {plan.prefix_tokens:,} tokens, questions of {plan.question_tokens}. Requests "
            "are placed in turns, so that\neach document is asked about on a worker that lacks it, too.",
            style="dim",
        )
        asker = _Asker(cluster, tokenizer, question_tokens=plan.question_tokens)
        await asker.ask_round(0, prefix_tokens=min(_WARM_UP_TOKENS, plan.prefix_tokens))
        for number in range(1, plan.num_rounds + 1):
            screen.say(f"\nDocument {number}", style="bold")
            for one in await asker.ask_round(number, prefix_tokens=plan.prefix_tokens, on=screen):
                asked.append(one)
    _show(screen, asked, bound=work_ratio(model, plan), plan=plan)
    screen.on_stopped()


class _Asker:
    """Asks a cluster, one question after the other."""

    def __init__(
        self, cluster: LocalCluster, tokenizer: Tokenizer, *, question_tokens: int
    ) -> None:
        self._cluster = cluster
        self._tokenizer = tokenizer
        self._question_tokens = question_tokens

    async def ask_round(
        self, number: int, *, prefix_tokens: int, on: DemoScreen | None = None
    ) -> list[Asked]:
        """A new document, and all questions about it; each is shown when it is answered."""
        document = make_document(self._tokenizer, number, num_tokens=prefix_tokens)
        asked = []
        for question in range(_QUESTIONS_PER_ROUND):
            prompt = make_prompt(
                self._tokenizer,
                document,
                question,
                num_tokens=prefix_tokens + self._question_tokens,
            )
            one = await self._ask(prompt, number)
            asked.append(one)
            if on is not None:
                on.say(asked_line(one))
        return asked

    async def _ask(self, prompt: str, number: int) -> Asked:
        address = self._cluster.endpoints.grpc_address
        reply = await ask_prompt(
            TextPrompt(text=prompt),
            SamplingOptions(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True),
            address=address,
            api_key=None,
        )
        spans = await whole_trace(address, reply.done.request_id)
        await self._cluster.wait_quiet()
        await asyncio.sleep(_SETTLE_S)
        return make_asked(reply, spans, number=number)


def make_asked(reply: Reply, spans: Sequence[Span], *, number: int) -> Asked:
    """Put together what the client, the router and the workers say."""
    usage = reply.done.usage
    source = Source.OWN if usage.num_cached_tokens else Source.COLD
    fetch = next((span for span in spans if span.name == names.SPAN_KV_FETCH), None)
    return Asked(
        request_id=reply.done.request_id,
        round=number,
        worker=reply.done.placement.decode_worker,
        source=Source.PEER if usage.num_peer_tokens else source,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_peer_tokens=usage.num_peer_tokens,
        ttft_ms=reply.token_times_s[0] * 1_000,
        ttft_parts_ms=dict(reply.done.timing.ttft_parts_ms),
        fetched=_fetched(fetch) if fetch is not None and usage.num_peer_tokens else None,
    )


def _fetched(span: Span) -> Fetched:
    return Fetched(
        source=str(span.attributes.get("moonpool.source", "")).partition("@")[0],
        transport=str(span.attributes.get(names.ATTR_BACKEND, "")),
        num_bytes=int(span.attributes.get(names.ATTR_BYTES, 0)),
        took_ms=span.duration_ms,
    )


# -- what is shown --


def asked_line(one: Asked) -> str:
    """One question: where, how long, and what was not computed."""
    computed = f"{one.num_prompt_tokens - one.num_cached_tokens:,} tokens computed"
    parts = [computed]
    own = one.num_cached_tokens - one.num_peer_tokens
    if own:
        parts.append(f"{own:,} found there")
    if one.fetched is not None:
        rate = one.fetched.num_bytes / max(one.fetched.took_ms, 1e-3) / 1e6
        parts.append(
            f"{one.num_peer_tokens:,} read from {one.fetched.source}: "
            f"{format_bytes(one.fetched.num_bytes)} over {one.fetched.transport} in "
            f"{format_ms(one.fetched.took_ms)} ({rate:.1f} GB/s)"
        )
    return (
        f"  {one.source:9} on {one.worker}  first token after {format_ms(one.ttft_ms):>9}  "
        + ", ".join(parts)
    )


def _show(screen: DemoScreen, asked: Sequence[Asked], *, bound: float, plan: PrefixPlan) -> None:
    by_source = {source: ratios(asked, source) for source in (Source.OWN, Source.PEER)}
    screen.result(
        {
            "plan": asdict(plan),
            "asked": [asdict(one) for one in asked],
            "work_ratio": bound,
            "cold_over_own": _ratio_json(by_source[Source.OWN]),
            "cold_over_peer": _ratio_json(by_source[Source.PEER]),
        }
    )
    screen.say("\nTime to the first token, cold over hit", style="bold")
    for source, ratio in by_source.items():
        screen.say(f"  {source:9} {ratio if ratio is not None else 'no question was answered so'}")
    screen.say(f"  {'bound':9} {bound:.1f}x, the ratio of what there is to multiply", style="dim")
    screen.say("\nIn parts, medians", style="bold")
    for source in Source:
        line = _parts_line([one for one in asked if one.source is source])
        if line:
            screen.say(f"  {source:9} {line}")


def _parts_line(asked: Sequence[Asked]) -> str:
    if not asked:
        return ""
    medians = {
        name: statistics.median(one.ttft_parts_ms[name] for one in asked)
        for name in TTFT_PARTS
        if all(name in one.ttft_parts_ms for one in asked)
    }
    return ", ".join(f"{name} {part:,.1f} ms" for name, part in rounded_parts(medians).items())


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:  # Any: JSON
    return None if ratio is None else {"median": ratio.median, "values": list(ratio.values)}
