"""What a slow peer costs those who could read from it: `python -m moonpool_loadtest.experiments.slow_peer`.

Each arm is a cluster of two workers that take turns: the first one holds a document, the second one is
asked about it, forgets it, and is asked again. So every question to the second worker is a hit on a peer.
The arms differ in that worker only, and take turns within one run:

    recompute       it never reads from peers: what all others are measured against
    well            it reads when that is believed to be faster, and its peer is well
    delayed         ... each read of its peer takes two seconds longer
    tenth           ... its peer has a tenth of the bandwidth that was measured when it is well
    hopeless        ... its peer has half of the bandwidth with which reading would take as long as computing

TTFT at the client, over all hits from the first one on: the first experience of a slow peer is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from moonpool.config.secret import load_or_create_secret
from moonpool.errors import InternalError
from moonpool.rpc.admin import clear_cache, fetch_trace
from moonpool.rpc.explanation import fetch_explanation
from moonpool.telemetry import names
from moonpool_loadtest.experiments.lab import (
    Answer,
    Asker,
    PeerReads,
    Setting,
    WorkerPlan,
    cluster_config,
    open_asker,
    progress,
    run,
)
from moonpool_loadtest.experiments.numbers import quantile
from moonpool_loadtest.experiments.report import Finding, print_findings, print_json

RECOMPUTE, WELL = "recompute", "well"
DELAYED, TENTH, HOPELESS = "delayed", "tenth", "hopeless"
SLOW = (DELAYED, TENTH, HOPELESS)
_READER = "decode-1"
_QUESTION_TOKENS = 64
_MAX_TOKENS = 2
#: A worker tells at most twenty times a second what it holds.
_SETTLE_S = 0.2
_BAR = 1.05
#: Fewer hits tell nothing of a 95th percentile.
_MIN_HITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One question about a document that only the peer held."""

    ttft_ms: float
    num_peer_tokens: int
    #: Of the read, if there was one.
    num_bytes: int
    fetch_ms: float
    #: FetchOutcome, or `not asked`.
    outcome: str


@dataclass(slots=True, kw_only=True)
class Arm:
    """One cluster."""

    name: str
    asker: Asker
    document: tuple[int, ...]
    hits: list[Hit] = field(default_factory=list)

    async def hit(self) -> Hit:
        """The holder finds the document in its pool, then the reader is asked."""
        await self._ask()
        answer = await self._ask()
        hit = await self._read(answer)
        await self._forget()
        return hit

    async def start(self) -> None:
        """The holder computes the document, the reader something else, so that it knows its own speed."""
        await self._ask(document=self.asker.new_prompt(len(self.document)))
        await self._ask(document=self.asker.new_prompt(len(self.document)))
        await self._forget()

    # -- parts --

    async def _ask(self, *, document: tuple[int, ...] | None = None) -> Answer:
        prompt = (*(document or self.document), *self.asker.new_prompt(_QUESTION_TOKENS))
        answer = Answer(sent_unix_ns=0)
        await self.asker.read_prompt(answer, prompt, _MAX_TOKENS)
        await self.asker.cluster.wait_quiet()
        await asyncio.sleep(_SETTLE_S)
        return answer

    async def _forget(self) -> None:
        cluster = self.asker.cluster
        address = str(cluster.part(_READER).fact("grpc_address"))
        key = load_or_create_secret(cluster.config.data_dir).rpc_key
        await clear_cache(address, key=key, deadline_s=5.0)
        await asyncio.sleep(_SETTLE_S)

    async def _read(self, answer: Answer) -> Hit:
        """Raises InternalError if it was no hit on a peer."""
        address = self.asker.cluster.endpoints.grpc_address
        assert answer.request_id is not None, answer
        assert answer.done is not None, answer
        placements = await fetch_explanation(address, answer.request_id, key=None, deadline_s=5.0)
        plan = placements[-1].plan
        peer_tokens = plan.peer.num_tokens if plan.peer is not None else 0
        if (
            plan.key.worker_id != _READER
            or plan.num_cached_tokens
            or peer_tokens < len(self.document)
        ):
            raise InternalError(f"{self.name}: not a hit on a peer: {plan}")
        spans = await fetch_trace(address, answer.request_id, key=None, deadline_s=5.0)
        fetch = next((span for span in spans if span.name == names.SPAN_KV_FETCH), None)
        return Hit(
            ttft_ms=answer.ttft_ms,
            num_peer_tokens=answer.done.usage.num_peer_tokens,
            num_bytes=int(fetch.attributes[names.ATTR_BYTES]) if fetch is not None else 0,
            fetch_ms=fetch.duration_ms if fetch is not None else 0.0,
            outcome=str(fetch.attributes[names.ATTR_REASON]) if fetch is not None else "not asked",
        )


def bandwidth(hits: Sequence[Hit]) -> float:
    """Bytes a second of the whole reads, the best of them.

    Raises:
        InternalError: There is none.
    """
    rates = [hit.num_bytes / hit.fetch_ms * 1e3 for hit in hits if hit.outcome == "whole"]
    if not rates:
        raise InternalError(f"Nothing was read: {Counter(hit.outcome for hit in hits)}")
    return max(rates)


def findings_of(hits: Mapping[str, Sequence[Hit]]) -> list[Finding]:
    """Bars hold for the slow arms."""
    base = [hit.ttft_ms for hit in hits[RECOMPUTE]]
    found = [
        Finding(
            what=f"{RECOMPUTE}: median TTFT",
            value=quantile(base, 0.5),
            unit="ms",
            detail=f"p95 {quantile(base, 0.95):.0f} ms, {len(base)} hits",
        )
    ]
    for name, own in hits.items():
        if name == RECOMPUTE:
            continue
        values = [hit.ttft_ms for hit in own]
        outcomes = Counter(hit.outcome for hit in own)
        told = ", ".join(f"{num} {outcome}" for outcome, num in sorted(outcomes.items()))
        for words, share in (("median", 0.5), ("p95", 0.95)):
            found.append(
                Finding(
                    what=f"{name}: {words} TTFT over recompute",
                    value=quantile(values, share) / quantile(base, share),
                    bar=_BAR if name in SLOW else None,
                    is_upper=True,
                    detail=f"{quantile(values, share):.0f} ms; {told}",
                )
            )
    return found


@asynccontextmanager
async def open_arm(
    setting: Setting,
    name: str,
    *,
    document_tokens: int,
    reads: PeerReads = "auto",
    failpoint: str = "",
) -> AsyncIterator[Arm]:
    """Both engines share a core: only one of them has work at a time."""
    worker = WorkerPlan(
        role="decode",
        engine_core=setting.cores.engine,
        chunk_tokens=2_048,
        pool_tokens=4 * (document_tokens + 2 * _QUESTION_TOKENS),
        count=2,
        peer_reads=reads,
    )
    config = cluster_config(
        setting, f"slow-peer-{name}", [worker], placement={"mode": "round_robin"}
    )
    failpoints = {_READER: failpoint} if failpoint else {}
    vocab_size = setting.model.config.vocab_size
    async with open_asker(config, seed=7, vocab_size=vocab_size, failpoints=failpoints) as asker:
        arm = Arm(name=name, asker=asker, document=asker.new_prompt(document_tokens))
        await arm.start()
        yield arm


async def measure(
    setting: Setting, *, document_tokens: int, num_hits: int, delay_ms: int, slow: Sequence[str]
) -> dict[str, list[Hit]]:
    """All arms; whose turn is first changes from round to round."""
    async with AsyncExitStack() as stack:

        async def opened(name: str, reads: PeerReads = "auto", failpoint: str = "") -> Arm:
            progress(f"{name}: {failpoint or 'no failpoint'}")
            return await stack.enter_async_context(
                open_arm(
                    setting,
                    name,
                    document_tokens=document_tokens,
                    reads=reads,
                    failpoint=failpoint,
                )
            )

        arms = [await opened(RECOMPUTE, "never"), await opened(WELL)]
        firsts = {arm.name: [await arm.hit() for _ in range(3)] for arm in arms}
        rate = bandwidth(firsts[WELL])
        recompute_s = min(hit.ttft_ms for hit in firsts[RECOMPUTE]) / 1e3
        num_bytes = max(hit.num_bytes for hit in firsts[WELL])
        rules = {
            DELAYED: f"fetch.read=delay:{delay_ms}",
            TENTH: f"fetch.read=limit:{round(rate / 10)}",
            HOPELESS: f"fetch.read=limit:{round(num_bytes / recompute_s / 2)}",
        }
        arms += [await opened(name, failpoint=rules[name]) for name in slow]
        for number in range(num_hits):
            turn = number % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                arm.hits.append(await arm.hit())
            progress(f"hit {number + 1} of {num_hits}")
        return {arm.name: arm.hits for arm in arms}


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    document_tokens = 256 if setting.is_quick else options.document
    num_hits = 3 if setting.is_quick else max(options.hits, _MIN_HITS)
    slow = (DELAYED,) if setting.is_quick else SLOW
    hits = await measure(
        setting,
        document_tokens=document_tokens,
        num_hits=num_hits,
        delay_ms=options.delay_ms,
        slow=slow,
    )
    findings = findings_of(hits)
    print_findings(findings)
    print_json(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "document_tokens": document_tokens,
            "question_tokens": _QUESTION_TOKENS,
            "num_hits": num_hits,
            "delay_ms": options.delay_ms,
            "cores": "engines on one, everything else on the other",
        },
        findings=findings,
        samples={
            name: {
                "ttft_ms": [hit.ttft_ms for hit in own],
                "fetch_ms": [hit.fetch_ms for hit in own],
                "outcomes": [hit.outcome for hit in own],
            }
            for name, own in hits.items()
        },
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.slow_peer")
    parser.add_argument("--document", type=int, default=384, help="tokens, a multiple of 16")
    parser.add_argument("--hits", type=int, default=30, help="of each arm")
    parser.add_argument(
        "--delay-ms", type=int, default=2_000, help="of each read, in arm `delayed`"
    )
    return run("slow-peer", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
