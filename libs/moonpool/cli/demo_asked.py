"""What `moonpool demo prefix` makes of answers: where each document's KV came from, and cold over hit."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from moonpool.cli.ask import Reply
from moonpool.cli.journey import TTFT_PARTS
from moonpool.cli.terminal import format_bytes, format_ms, rounded_parts
from moonpool.hub.model_config import ModelConfig
from moonpool.telemetry import names
from moonpool.wire.spans import Span


class Source(enum.StrEnum):
    """Where the KV of a question's document came from."""

    #: From nowhere: it was computed.
    COLD = "cold"
    PEER = "peer"
    OWN = "own pool"
    #: A store's memory; the same, read by a worker that had just been started again; its disk.
    HOST = "store"
    RESTARTED = "restarted"
    DISK = "disk"


_HITS = (Source.PEER, Source.OWN, Source.HOST, Source.RESTARTED, Source.DISK)
_BARS = {Source.OWN: 40.0, Source.PEER: 25.0, Source.HOST: 40.0, Source.DISK: 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """How much is asked."""

    #: Of a document, in whole blocks; and of a question.
    prefix_tokens: int
    question_tokens: int
    num_rounds: int
    #: `always`: also where a model is so small that computing would be faster.
    peer_reads: Literal["auto", "always"] = "auto"

    @property
    def num_tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens

    @property
    def bars(self) -> Mapping[Source, float]:
        """Cold over hit, at least; for the sizes that it was asked for, on the default model."""
        is_asked_for = (self.prefix_tokens, self.question_tokens) == (6_144, 64)
        return _BARS if is_asked_for else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A prefix that was read from another worker or a store."""

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
    num_store_tokens: int
    #: At the client.
    ttft_ms: float
    #: At the router.
    ttft_parts_ms: dict[str, float]
    fetched: Fetched | None

    @property
    def num_read_tokens(self) -> int:
        return self.num_peer_tokens + self.num_store_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Cold over hit, within each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.1f}x  [{min(self.values):.1f} .. {max(self.values):.1f}]"


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


def make_asked(reply: Reply, spans: Sequence[Span], *, number: int) -> Asked:
    """Put together what the client, the router and the workers say.

    None of them knows in which of its tiers a store had it: it is taken to be memory.
    """
    usage = reply.done.usage
    if usage.num_store_tokens:
        source = Source.HOST
    elif usage.num_peer_tokens:
        source = Source.PEER
    else:
        source = Source.OWN if usage.num_cached_tokens else Source.COLD
    fetch = next((span for span in spans if span.name == names.SPAN_KV_FETCH), None)
    is_read = usage.num_peer_tokens or usage.num_store_tokens
    return Asked(
        request_id=reply.done.request_id,
        round=number,
        worker=reply.done.placement.decode_worker,
        source=source,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_peer_tokens=usage.num_peer_tokens,
        num_store_tokens=usage.num_store_tokens,
        ttft_ms=reply.token_times_s[0] * 1_000,
        ttft_parts_ms=dict(reply.done.timing.ttft_parts_ms),
        fetched=_fetched(fetch) if fetch is not None and is_read else None,
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
    own = one.num_cached_tokens - one.num_read_tokens
    if own:
        parts.append(f"{own:,} found there")
    if one.fetched is not None:
        rate = one.fetched.num_bytes / max(one.fetched.took_ms, 1e-3) / 1e6
        parts.append(
            f"{one.num_read_tokens:,} read from {one.fetched.source}: "
            f"{format_bytes(one.fetched.num_bytes)} over {one.fetched.transport} in "
            f"{format_ms(one.fetched.took_ms)} ({rate:.1f} GB/s)"
        )
    return (
        f"  {one.source:9} on {one.worker}  first token after {format_ms(one.ttft_ms):>9}  "
        + ", ".join(parts)
    )


def ratio_lines(asked: Sequence[Asked], plan: PrefixPlan) -> list[str]:
    """Cold over hit of each source, and what was asked for."""
    lines = []
    for source in _HITS:
        ratio, bar = ratios(asked, source), plan.bars.get(source)
        line = f"  {source:9} {ratio if ratio is not None else 'no question was answered so'}"
        if ratio is not None and bar is not None:
            line += f"  asked for: {bar:g}x" + ("" if ratio.median >= bar else ", MISSED")
        lines.append(line)
    return lines


def part_lines(asked: Sequence[Asked]) -> list[str]:
    """What the wait for a first token is made of, by source."""
    lines = ((source, [one for one in asked if one.source is source]) for source in Source)
    return [f"  {source:9} {_parts_line(own)}" for source, own in lines if own]


def result_json(
    asked: Sequence[Asked], plan: PrefixPlan, *, bound: float
) -> dict[str, Any]:  # Any: JSON
    """All of it; None for a ratio of which there is none."""
    keys: dict[Source, str] = {source: f"cold_over_{source.name.lower()}" for source in _HITS}
    return {
        "plan": asdict(plan),
        "asked": [asdict(one) for one in asked],
        "work_ratio": bound,
        **{key: _ratio_json(ratios(asked, source)) for source, key in keys.items()},
        "bars": {keys[source]: bar for source, bar in plan.bars.items()},
    }


def _parts_line(asked: Sequence[Asked]) -> str:
    medians = {
        name: statistics.median(one.ttft_parts_ms[name] for one in asked)
        for name in TTFT_PARTS
        if all(name in one.ttft_parts_ms for one in asked)
    }
    return ", ".join(f"{name} {part:,.1f} ms" for name, part in rounded_parts(medians).items())


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:  # Any: JSON
    return None if ratio is None else {"median": ratio.median, "values": list(ratio.values)}
