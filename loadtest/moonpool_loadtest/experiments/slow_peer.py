"""What a slow peer costs those who could read from it: `python -m moonpool_loadtest.experiments.slow_peer`.

Each arm is a cluster of two workers that take turns: the first one holds a document, the second one is
asked about it, forgets it, and is asked again. So every question to the second worker is a hit on a peer.
With `--holder store` an arm is one worker, and a store that has taken the document from it: every question
is a hit on the store's memory. With `--holder disk` it is asked about two documents in turn, and the store's
memory has room for one: every question is a hit on its disk. The arms take turns within one run:

    recompute       the reader never reads from peers: what all others are measured against
    well            it reads when that is believed to be faster, and its peer is well
    delayed         ... each read of its peer (each load from the disk) takes two seconds longer
    tenth           ... its peer (the disk) has a tenth of the bandwidth that was measured when it is well
    hopeless        ... it has half of the bandwidth with which reading would take as long as computing

TTFT at the client, over all hits from the first one on: the first experience of a slow peer is in it. Beside
each ratio stands what chance may make of it (ratio_interval).
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from moonpool.errors import InternalError, UnavailableError
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
    taking_turns,
)
from moonpool_loadtest.experiments.numbers import quantile, ratio_interval
from moonpool_loadtest.experiments.report import Finding, publish

RECOMPUTE, WELL = "recompute", "well"
DELAYED, TENTH, HOPELESS = "delayed", "tenth", "hopeless"
SLOW = (DELAYED, TENTH, HOPELESS)
_STORE = "store-0"
_QUESTION_TOKENS = 64
_MAX_TOKENS = 2
_BAR = 1.05
_BLOCK_SIZE = 16
#: Of a store: for the document, and all that is asked about it.
_STORE_BYTES = 256 * 2**20
_TAKE_S = 30.0
_POLL_S = 0.02
#: Fewer hits tell nothing of a 95th percentile.
_MIN_HITS = 20


class Holder(enum.StrEnum):
    """Who holds the document when its reader does not."""

    PEER = "peer"
    STORE = "store"
    #: A store, which must read it from its disk first.
    DISK = "disk"

    @property
    def num_workers(self) -> int:
        return 2 if self is Holder.PEER else 1

    @property
    def num_documents(self) -> int:
        return 2 if self is Holder.DISK else 1

    @property
    def reader(self) -> str:
        """The worker that is asked about it, the last one."""
        return f"decode-{self.num_workers - 1}"

    def failpoints(self, fault: str) -> dict[str, str]:
        """By part: what makes it slow, for a fault like `delay:2000`; none if empty."""
        if not fault:
            return {}
        if self is Holder.DISK:
            return {_STORE: f"store.load={fault}"}
        return {self.reader: f"fetch.read={fault}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One question about a document that only its holder held."""

    ttft_ms: float
    #: Of the prompt, not computed.
    num_read_tokens: int
    #: Of the read, if there was one.
    num_bytes: int
    fetch_ms: float
    #: FetchOutcome, or `not asked`.
    outcome: str


@dataclass(slots=True, kw_only=True)
class Arm:
    """One cluster."""

    name: str
    holder: Holder
    asker: Asker
    #: Asked about in turn.
    documents: deque[tuple[int, ...]]
    hits: list[Hit] = field(default_factory=list)

    @property
    def document(self) -> tuple[int, ...]:
        """The one whose turn it is."""
        return self.documents[0]

    async def hit(self) -> Hit:
        """The reader is asked; before it a peer, in its turn, which finds the document in its pool."""
        if self.holder is Holder.PEER:
            await self._ask()
        answer = await self._ask()
        hit = await self._read(answer)
        await self.asker.cluster.clear_worker(self.holder.reader)
        self.documents.rotate()
        return hit

    async def start(self) -> None:
        """The holder has all documents, the reader has computed as much, so that it knows its own speed."""
        for number in range(1, len(self.documents) + 1):
            await self._ask()
            if self.holder is not Holder.PEER:
                await self._taken(number)
            self.documents.rotate()
        await self._ask(document=self.asker.new_prompt(len(self.document)))
        await self.asker.cluster.clear_worker(self.holder.reader)

    # -- parts --

    async def _ask(self, *, document: tuple[int, ...] | None = None) -> Answer:
        prompt = (*(document or self.document), *self.asker.new_prompt(_QUESTION_TOKENS))
        answer = Answer(sent_unix_ns=0)
        await self.asker.read_prompt(answer, prompt, _MAX_TOKENS)
        await self.asker.cluster.wait_quiet()
        await self.asker.cluster.wait_followed()
        return answer

    async def _taken(self, num_documents: int) -> None:
        """Until the store has so many, and the router knows; raises UnavailableError."""
        cluster = self.asker.cluster
        num_blocks = num_documents * len(self.document) // _BLOCK_SIZE
        deadline = time.monotonic() + _TAKE_S
        while True:
            caches = (await cluster.cache_stats()).workers
            told = [one.num_published_blocks for one in caches if one.worker_id == _STORE]
            stats = (await cluster.store_report(_STORE)).stats
            if told and told[0] >= num_blocks and not stats.num_unwritten_blocks:
                return
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{self.name}: not {num_blocks} blocks stored: {stats}")
            await asyncio.sleep(_POLL_S)

    async def _read(self, answer: Answer) -> Hit:
        """Raises InternalError if it was no hit on the holder."""
        address = self.asker.cluster.endpoints.grpc_address
        assert answer.request_id is not None, answer
        assert answer.done is not None, answer
        placements = await fetch_explanation(address, answer.request_id, key=None, deadline_s=5.0)
        plan = placements[-1].plan
        if (
            plan.key.worker_id != self.holder.reader
            or plan.num_cached_tokens
            or plan.peer is None
            or plan.peer.num_tokens < len(self.document)
            or plan.peer.is_store is (self.holder is Holder.PEER)
        ):
            raise InternalError(f"{self.name}: not a hit on a {self.holder}: {plan}")
        spans = await self.asker.trace(answer, names.SPAN_DECODE)
        fetch = next((span for span in spans if span.name == names.SPAN_KV_FETCH), None)
        usage = answer.done.usage
        return Hit(
            ttft_ms=answer.ttft_ms,
            num_read_tokens=usage.num_peer_tokens + usage.num_store_tokens,
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
            low, high = ratio_interval(values, base, share)
            found.append(
                Finding(
                    what=f"{name}: {words} TTFT over recompute",
                    value=quantile(values, share) / quantile(base, share),
                    bar=_BAR if name in SLOW else None,
                    is_upper=True,
                    detail=f"[{low:.3f} .. {high:.3f}], {quantile(values, share):.0f} ms; {told}",
                )
            )
    return found


@asynccontextmanager
async def open_arm(
    setting: Setting,
    name: str,
    *,
    document_tokens: int,
    holder: Holder = Holder.PEER,
    reads: PeerReads = "auto",
    fault: str = "",
) -> AsyncIterator[Arm]:
    """Engines share a core: only one of them has work at a time."""
    worker = WorkerPlan(
        role="decode",
        engine_core=setting.cores.engine,
        chunk_tokens=2_048,
        pool_tokens=4 * (document_tokens + 2 * _QUESTION_TOKENS),
        count=holder.num_workers,
        peer_reads=reads,
    )
    vocab_size = setting.model.config.vocab_size
    with tempfile.TemporaryDirectory(prefix="ssd-", dir=setting.home) as ssd_dir:
        config = cluster_config(
            setting,
            f"slow-{holder}-{name}",
            [worker],
            placement={"mode": "round_robin"},
            store=_store_settings(setting, holder, document_tokens, ssd_dir),
        )
        async with open_asker(
            config, seed=7, vocab_size=vocab_size, failpoints=holder.failpoints(fault)
        ) as asker:
            documents = deque(
                asker.new_prompt(document_tokens) for _ in range(holder.num_documents)
            )
            arm = Arm(name=name, holder=holder, asker=asker, documents=documents)
            await arm.start()
            yield arm


def _store_settings(
    setting: Setting, holder: Holder, document_tokens: int, ssd_dir: str
) -> dict[str, object] | None:
    if holder is Holder.PEER:
        return None
    if holder is Holder.STORE:
        return {"host_bytes": _STORE_BYTES}
    block_bytes = setting.model.config.kv_layout(1, setting.dtype, _BLOCK_SIZE).block_bytes
    # A document with its question; the least recently used goes, which is the other one.
    num_blocks = (document_tokens + _QUESTION_TOKENS) // _BLOCK_SIZE + 1
    return {
        "host_bytes": num_blocks * block_bytes,
        "kv_eviction_policy": "lru",
        "ssd_dir": ssd_dir,
        "ssd_bytes": _STORE_BYTES,
        "ssd_admission": "all",
        "is_ssd_strict": True,
    }


async def measure(
    setting: Setting,
    *,
    holder: Holder,
    document_tokens: int,
    num_hits: int,
    delay_ms: int,
    slow: Sequence[str],
) -> dict[str, list[Hit]]:
    """All arms; whose turn is first changes from round to round."""
    async with AsyncExitStack() as stack:

        async def opened(name: str, reads: PeerReads = "auto", fault: str = "") -> Arm:
            progress(f"{name}: {holder.failpoints(fault) or 'no failpoint'}")
            return await stack.enter_async_context(
                open_arm(
                    setting,
                    name,
                    document_tokens=document_tokens,
                    holder=holder,
                    reads=reads,
                    fault=fault,
                )
            )

        arms = [await opened(RECOMPUTE, "never"), await opened(WELL)]
        firsts = {arm.name: [await arm.hit() for _ in range(3)] for arm in arms}
        rate = bandwidth(firsts[WELL])
        recompute_s = min(hit.ttft_ms for hit in firsts[RECOMPUTE]) / 1e3
        num_bytes = max(hit.num_bytes for hit in firsts[WELL])
        faults = {
            DELAYED: f"delay:{delay_ms}",
            TENTH: f"limit:{round(rate / 10)}",
            HOPELESS: f"limit:{round(num_bytes / recompute_s / 2)}",
        }
        arms += [await opened(name, fault=faults[name]) for name in slow]
        for turn, arm in taking_turns(arms, num_hits):
            arm.hits.append(await arm.hit())
            progress(f"hit {turn + 1} of {num_hits}, {arm.name}")
        return {arm.name: arm.hits for arm in arms}


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    document_tokens = 256 if setting.is_quick else options.document
    num_hits = 3 if setting.is_quick else max(options.hits, _MIN_HITS)
    slow = (DELAYED,) if setting.is_quick else SLOW
    hits = await measure(
        setting,
        holder=options.holder,
        document_tokens=document_tokens,
        num_hits=num_hits,
        delay_ms=options.delay_ms,
        slow=slow,
    )
    findings = findings_of(hits)
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "holder": options.holder,
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
    parser.add_argument("--holder", type=Holder, choices=tuple(Holder), default=Holder.PEER)
    parser.add_argument("--document", type=int, default=384, help="tokens, a multiple of 16")
    parser.add_argument("--hits", type=int, default=120, help="of each arm")
    parser.add_argument(
        "--delay-ms", type=int, default=2_000, help="of each read, in arm `delayed`"
    )
    return run("slow-peer", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
