"""How much of a handoff hides behind the prefill: `python -m moonpool_loadtest.experiments.overlap`.

A prompt is prefilled on P, whose engine has a core to itself; D reads its KV over shm or over gRPC and
draws the second token. A third cluster prefills and decodes on one worker, whose engine has P's core.
The three take turns.

overlap        bytes that lie verified in D's pool when the last layer's KV can be read on P, over all
               bytes, over what is possible: the last layer of the last chunk cannot be there yet
exposed        from the first token drawn on P to its request in D's running batch
first gap      from the first token drawn to the second
TTFT           at the client; disaggregated over local

All moments but the client's are of spans that the workers record anyway, by this host's wall clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from moonpool.config.schema import ClusterConfig, TransportName
from moonpool.errors import InternalError
from moonpool.telemetry import names
from moonpool.wire.spans import Span
from moonpool_loadtest.experiments.lab import (
    Answer,
    Setting,
    WorkerPlan,
    cluster_config,
    open_asker,
    progress,
    run,
    taking_turns,
)
from moonpool_loadtest.experiments.numbers import Sample
from moonpool_loadtest.experiments.report import Finding, publish

TRANSPORTS: tuple[TransportName, ...] = ("shm", "grpc")
LOCAL = "local"
_MAX_TOKENS = 8
_BLOCK_SIZE = 16
#: The workers', of a request that was handed off.
_SPANS = (names.SPAN_PREFILL, names.SPAN_KV_TRANSFER, names.SPAN_DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One disaggregated request, measured."""

    #: Share of the bytes verified when the last layer was readable on P, and when P was through with
    #: all layers; and the largest share that is possible at the first of these moments.
    share_at_last_layer: float
    share_at_forward_end: float
    bound: float
    #: From the last layer readable on P to all verified on D.
    last_layer_to_verified_ms: float
    #: From there to the first token drawn: the last layer's own compute, lm_head, sampling.
    last_layer_to_token_ms: float
    #: From the first token drawn on P: to the Commit at D, to D's service being through, to the
    #: request in D's batch, to D's first token.
    commit_ms: float
    admitted_ms: float
    exposed_ms: float
    first_gap_ms: float
    client_first_gap_ms: float
    ttft_ms: float

    @property
    def overlap(self) -> float:
        return self.share_at_last_layer / self.bound


def read_handoff(spans: Sequence[Span], answer: Answer, *, num_layers: int) -> Handoff:
    """The request's figures, from its trace.

    Raises:
        InternalError: It did not go as the experiment needs it (a retry, a bad leaf, no handoff).
    """
    by_name = {span.name: span for span in spans}
    try:
        prefill, transfer, decode = (by_name[name] for name in _SPANS)
    except KeyError as error:
        raise InternalError(f"The trace has no span {error}: {sorted(by_name)}") from error
    if len(spans) != len(by_name) or _number(transfer, "moonpool.num_bad_leaves"):
        raise InternalError(f"Not one clean attempt: {[span.name for span in spans]}")

    last_layer = _number(prefill, "moonpool.last_layer_unix_ns")
    forward_ended = _number(prefill, "moonpool.forward_ended_unix_ns")
    first_token = _number(prefill, "moonpool.first_token_unix_ns")
    reads = [(event.unix_ns, int(event.attributes["num_bytes"])) for event in transfer.events]
    total_bytes = _number(transfer, names.ATTR_BYTES)
    if sum(num_bytes for _, num_bytes in reads) != total_bytes:
        raise InternalError(f"{len(reads)} reads do not sum to {total_bytes} bytes")

    def share(moment: int) -> float:
        return sum(num_bytes for ended, num_bytes in reads if ended <= moment) / total_bytes

    return Handoff(
        share_at_last_layer=share(last_layer),
        share_at_forward_end=share(forward_ended),
        bound=1.0 - _last_chunk_share(prefill) / num_layers,
        last_layer_to_verified_ms=(max(ended for ended, _ in reads) - last_layer) / 1e6,
        last_layer_to_token_ms=(first_token - last_layer) / 1e6,
        commit_ms=(_number(transfer, "moonpool.commit_received_unix_ns") - first_token) / 1e6,
        admitted_ms=(_number(transfer, "moonpool.admitted_unix_ns") - first_token) / 1e6,
        exposed_ms=(_number(decode, "moonpool.joined_unix_ns") - first_token) / 1e6,
        first_gap_ms=(_number(decode, "moonpool.first_step_unix_ns") - first_token) / 1e6,
        client_first_gap_ms=(answer.token_unix_ns[1] - answer.token_unix_ns[0]) / 1e6,
        ttft_ms=answer.ttft_ms,
    )


def _last_chunk_share(prefill: Span) -> float:
    """Blocks that the last chunk writes, of all."""
    chunks = [
        (int(event.attributes["start"]), int(event.attributes["end"]))
        for event in prefill.events
        if event.name == "chunk"
    ]
    start, end = chunks[-1]
    num_blocks = -(-end // _BLOCK_SIZE)
    return (num_blocks - start // _BLOCK_SIZE) / num_blocks


def _number(span: Span, key: str) -> int:
    value = span.attributes[key]
    if not isinstance(value, int) or (key.endswith("_unix_ns") and value == 0):
        raise InternalError(f"Span {span.name} does not tell {key}: {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All repeats with one chunk size, in the order in which they were made."""

    chunk_tokens: int
    handoffs: Mapping[str, Sequence[Handoff]]
    local_ttft_ms: Sequence[float]

    def sample(self, transport: str, key: str) -> Sample:
        return Sample(values=tuple(getattr(handoff, key) for handoff in self.handoffs[transport]))

    def ttft_ratio(self, transport: str) -> Sample:
        """Of repeats made one after the other."""
        pairs = zip(self.handoffs[transport], self.local_ttft_ms, strict=True)
        return Sample(values=tuple(handoff.ttft_ms / local for handoff, local in pairs))

    def as_json(self) -> dict[str, object]:
        return {
            "local_ttft_ms": list(self.local_ttft_ms),
            **{
                transport: {
                    key: list(self.sample(transport, key).values)
                    for key in (*Handoff.__dataclass_fields__, "overlap")
                }
                for transport in self.handoffs
            },
        }


async def measure(
    setting: Setting, *, prompt_tokens: int, chunk_tokens: int, num_repeats: int
) -> Measured:
    """Start the three clusters and let them take turns; one turn each to warm up."""
    cores = setting.cores
    pool_tokens = 3 * (prompt_tokens + 64)

    def plan(role: str, core: int, transport: TransportName = "shm") -> WorkerPlan:
        return WorkerPlan(
            role="prefill" if role == "prefill" else "decode",
            engine_core=core,
            chunk_tokens=chunk_tokens,
            pool_tokens=pool_tokens,
            transport=transport,
        )

    configs: dict[str, ClusterConfig] = {
        transport: cluster_config(
            setting,
            f"overlap-{transport}",
            [plan("prefill", cores.engine), plan("decode", cores.others, transport)],
        )
        for transport in TRANSPORTS
    }
    configs[LOCAL] = cluster_config(setting, "overlap-local", [plan("decode", cores.engine)])
    handoffs: dict[str, list[Handoff]] = {transport: [] for transport in TRANSPORTS}
    local_ttft_ms: list[float] = []
    async with AsyncExitStack() as stack:
        askers = {
            name: await stack.enter_async_context(open_asker(config, seed=chunk_tokens + index))
            for index, (name, config) in enumerate(configs.items())
        }
        for turn, name in taking_turns(list(askers), 1 + num_repeats):
            answer = await askers[name].ask(prompt_tokens, _MAX_TOKENS)
            await askers[name].cluster.wait_quiet()
            progress(f"chunks of {chunk_tokens}: turn {turn + 1} of {1 + num_repeats}, {name}")
            if turn == 0:
                continue
            if name == LOCAL:
                local_ttft_ms.append(answer.ttft_ms)
                continue
            spans = await askers[name].trace(answer, *_SPANS)
            handoffs[name].append(
                read_handoff(
                    [span for span in spans if span.name in _SPANS],
                    answer,
                    num_layers=setting.model.config.num_layers,
                )
            )
    return Measured(chunk_tokens=chunk_tokens, handoffs=handoffs, local_ttft_ms=local_ttft_ms)


def findings_of(measured: Measured, *, is_one_chunk: bool) -> list[Finding]:
    """Bars hold for one chunk; smaller chunks are told beside it, against their own bound."""
    chunks = "one chunk" if is_one_chunk else f"chunks of {measured.chunk_tokens}"
    local = Sample(values=tuple(measured.local_ttft_ms))
    found = [
        Finding(what=f"{chunks}, local: TTFT", value=local.median, unit="ms", detail=str(local))
    ]
    for transport in TRANSPORTS:
        where = f"{chunks}, {transport}"
        samples = {
            key: measured.sample(transport, key)
            for key in (
                "overlap",
                "share_at_forward_end",
                "exposed_ms",
                "last_layer_to_verified_ms",
                "last_layer_to_token_ms",
                "first_gap_ms",
                "client_first_gap_ms",
                "ttft_ms",
            )
        }
        ratio = measured.ttft_ratio(transport)
        found += [
            Finding(
                what=f"{where}: overlap at the last layer",
                value=samples["overlap"].median,
                bar=0.95 if is_one_chunk else None,
                aim=0.99 if is_one_chunk else None,
                detail=f"{samples['overlap']}, bound {measured.handoffs[transport][0].bound:.4f}",
            ),
            Finding(
                what=f"{where}: share of bytes at the end of forward",
                value=samples["share_at_forward_end"].median,
                detail=str(samples["share_at_forward_end"]),
            ),
            Finding(
                what=f"{where}: exposed",
                value=samples["exposed_ms"].median,
                unit="ms",
                aim=2.0 if is_one_chunk and transport == "shm" else None,
                is_upper=True,
                detail=str(samples["exposed_ms"]),
            ),
            Finding(
                what=f"{where}: TTFT over local",
                value=ratio.median,
                bar=1.08 if is_one_chunk else None,
                aim=1.03 if is_one_chunk else None,
                is_upper=True,
                detail=str(ratio),
            ),
        ]
        found += [
            Finding(
                what=f"{where}: {words}",
                value=samples[key].median,
                unit="ms",
                detail=str(samples[key]),
            )
            for key, words in (
                ("last_layer_to_verified_ms", "last layer readable to verified"),
                ("last_layer_to_token_ms", "last layer readable to token drawn"),
                ("first_gap_ms", "first gap"),
                ("client_first_gap_ms", "first gap at the client"),
                ("ttft_ms", "TTFT"),
            )
        ]
    return found


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    prompt_tokens, num_repeats = options.prompt, options.repeats
    chunk_tokens = options.chunk
    if setting.is_quick:
        prompt_tokens, num_repeats, chunk_tokens = 320, 1, 128
    results = [
        await measure(
            setting, prompt_tokens=prompt_tokens, chunk_tokens=tokens, num_repeats=num_repeats
        )
        for tokens in (prompt_tokens, chunk_tokens)
    ]
    findings = [
        finding
        for measured in results
        for finding in findings_of(measured, is_one_chunk=measured.chunk_tokens == prompt_tokens)
    ]
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "prompt_tokens": prompt_tokens,
            "chunk_tokens": [prompt_tokens, chunk_tokens],
            "num_repeats": num_repeats,
            "cores": "P's and the local worker's engine on one, everything else on the other",
        },
        findings=findings,
        samples={f"chunk {measured.chunk_tokens}": measured.as_json() for measured in results},
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.overlap")
    parser.add_argument("--prompt", type=int, default=2_048, help="tokens")
    parser.add_argument("--chunk", type=int, default=512, help="of the second part, in tokens")
    parser.add_argument("--repeats", type=int, default=7)
    return run("overlap", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
