"""One worker's core for unit tests: small limits, and plans and replies in a form to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Decode, FetchReserved, Prefill, Reply, TokensReady
from moonpool.core.step import StepPlan
from moonpool.ids import AttemptId, BlockHash, BlockId, RequestId
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
from support.core_cluster import Worker, tenant_seed
from support.fake_runner import kv_values


def make_config(
    *,
    num_blocks: int = 16,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    local_prefill_tokens: int = 8,
    max_queued_steps: int = 4,
    headroom_tokens: int = 4,
    eos_token_ids: tuple[int, ...] = (),
) -> CoreConfig:
    return CoreConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        local_prefill_tokens=local_prefill_tokens,
        max_queued_steps=max_queued_steps,
        headroom_tokens=headroom_tokens,
        eos_token_ids=eos_token_ids,
        is_checked=True,
    )


def make_worker(**limits: int) -> Worker:
    return Worker(make_config(**limits))


def ident(request_id: str = "r1", attempt: int = 1) -> AttemptId:
    return AttemptId(RequestId(request_id), attempt)


def prefill(request: InferenceRequest, attempt: int = 1, *, peer: int = 0) -> Prefill:
    """`peer`: tokens that a peer is believed to hold."""
    return Prefill(request=request, attempt=attempt, num_peer_tokens=peer)


def decode_here(request: InferenceRequest, attempt: int = 1, *, peer: int = 0) -> Decode:
    return Decode(request=request, attempt=attempt, has_source=False, num_peer_tokens=peer)


def reserve(request: InferenceRequest, attempt: int = 1) -> Decode:
    return Decode(request=request, attempt=attempt, has_source=True)


class Row(NamedTuple):
    """A StepRow to compare."""

    slot: int
    start: int
    end: int
    tokens: list[int]
    blocks: list[int]
    position: int | None


def rows(plan: StepPlan) -> list[Row]:
    return [
        Row(
            row.slot,
            row.start,
            row.end,
            row.token_ids.tolist(),
            row.block_tables[0].tolist(),
            None if row.sample is None else row.sample.position,
        )
        for row in plan.rows
    ]


def tokens(
    request_id: str,
    first_position: int,
    *token_ids: int,
    cached: int | None = None,
    peer: int = 0,
    finish: FinishReason | None = None,
    attempt: int = 1,
) -> TokensReady:
    return TokensReady(
        attempt_id=ident(request_id, attempt),
        run=TokenRun(first_position=first_position, token_ids=token_ids, finish_reason=finish),
        num_cached_tokens=cached,
        num_peer_tokens=peer,
    )


def chain(request: InferenceRequest, num_blocks: int) -> tuple[BlockHash, ...]:
    """The hashes of the first blocks of a request's prompt."""
    return tuple(hash_blocks(tenant_seed(request), request.prompt_token_ids, 4)[:num_blocks])


def fetch(worker: Worker, reply: Reply, request: InferenceRequest, num_tokens: int) -> None:
    """The service reads: KV of [num_cached_tokens, num_tokens) as a peer has it comes into place."""
    assert isinstance(reply, FetchReserved), reply
    values = kv_values([], request.token_ids[:num_tokens])
    for position in range(reply.num_cached_tokens, num_tokens):
        block, slot = divmod(position, 4)
        worker.runner.pool[reply.block_ids[block], slot] = values[position]


def answers(replies: list[Reply]) -> dict[str, list[int]]:
    """All tokens by request, their positions checked to be without a gap."""
    answer: dict[str, list[int]] = {}
    for reply in replies:
        if isinstance(reply, TokensReady):
            of_request = answer.setdefault(reply.attempt_id.request_id, [])
            first = reply.run.first_position - len(of_request)
            assert first == 0 or not of_request, reply
            of_request += reply.run.token_ids
    return answer


def plant(core: Core, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
    """Have the cache hold blocks under these hashes, whatever lies in them. No request could do that."""
    cache = core._cache
    block_ids = cache.allocate(len(hashes))
    cache.insert(hashes, block_ids)
    cache.release(block_ids)
    return block_ids
