"""Workers that read prefixes from each other, over real gRPC and every transport, engines in threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.config.secret import load_or_create_secret
from moonpool.core.protocol import Refused, RefuseReason, TokensReady
from moonpool.core.step import StepPlan
from moonpool.handoff.effects import FetchOutcome
from moonpool.handoff.messages import PeerPrefix
from moonpool.ids import Incarnation, RequestId, WorkerKey
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.block_key import block_keys
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.telemetry import names
from support.core_cases import plant
from support.eventually import eventually
from support.kv import colliding
from support.requests import make_request
from support.router_client import RouterClient
from support.thread_engine import ThreadEngines
from support.worker_pair import Workers, expected_answer, fake_workers
from support.workers import RunningWorker

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BLOCK_BYTES = 1024

#: 12 blocks and a bit; the next turn of the same chat.
FIRST = make_request("r1", prompt=range(200), max_tokens=3, ignore_eos=True)
SECOND = make_request("r2", prompt=[*range(192), *range(7, 40)], max_tokens=5, ignore_eos=True)
NUM_SHARED = 192


def outcomes(worker: RunningWorker) -> dict[str, int]:
    """Fetches of a worker by outcome."""
    metrics = worker.service.metrics
    counts = {o.value: int(metrics.value(names.KV_FETCHES, outcome=o.value)) for o in FetchOutcome}
    return {outcome: count for outcome, count in counts.items() if count}


def num_fetched_blocks(worker: RunningWorker) -> int:
    return int(worker.service.metrics.value(names.KV_FETCH_BLOCKS))


async def start(
    workers: Workers, worker_id: str, role: str = "both", **settings: object
) -> tuple[RunningWorker, RouterClient]:
    """A worker that reads whenever a peer is named."""
    return await workers.start(worker_id, role, **{"kv_peer_reads": "always"} | settings)


async def warm(client: RouterClient, request: InferenceRequest = FIRST) -> PeerPrefix:
    """Have the worker compute a request; what it holds of it then."""
    client.decode(request)
    assert await client.answer(request) == expected_answer(request)
    return client.peer(NUM_SHARED)


async def first_tokens(client: RouterClient, request: InferenceRequest) -> TokensReady:
    message = await client.until(request, TokensReady)
    assert isinstance(message, TokensReady)
    return message


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
async def test_a_prompt_is_served_from_a_peers_blocks(tmp_path: Path, transport: str) -> None:
    again = replace(SECOND, request_id=RequestId("r3"))
    async with fake_workers(tmp_path) as workers:
        # NIXL costs a process: it is offered by those that take it.
        offered = ("shm", transport, "grpc") if transport == "nixl" else ("shm", "grpc")
        _, to_holder = await start(workers, "h0", transports=offered)
        reader, to_reader = await start(
            workers, "r0", transports=(transport,), is_transport_strict=True
        )
        to_reader.decode(SECOND, peer=await warm(to_holder))
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        first = await first_tokens(to_reader, SECOND)
        assert (first.num_cached_tokens, first.num_peer_tokens) == (NUM_SHARED, NUM_SHARED)
        assert outcomes(reader) == {"whole": 1}
        assert num_fetched_blocks(reader) == NUM_SHARED // 16
        metrics = reader.service.metrics
        assert metrics.value(names.KV_FETCH_BYTES) == NUM_SHARED // 16 * BLOCK_BYTES
        # What it has read is its own now, and is read from it in turn.
        third, to_third = await start(workers, "r1")
        to_third.decode(again, peer=to_reader.peer(NUM_SHARED))
        assert await to_third.answer(again) == expected_answer(SECOND)
        assert outcomes(third) == {"whole": 1}


async def test_a_prefill_reads_and_is_read_from(tmp_path: Path) -> None:
    """The next turn: prefill reads from decode what decode had of the last, decode the rest from it."""
    async with fake_workers(tmp_path) as workers:
        prefill, to_prefill = await start(workers, "p0", "prefill")
        _, to_decode = await start(workers, "d0", "decode")
        _, to_other = await start(workers, "d1", "decode")
        peer = await warm(to_decode)
        to_prefill.prefill(SECOND, peer=peer)
        to_other.decode(SECOND, source=to_prefill.source)
        assert await to_other.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(prefill) == {"whole": 1}
        for client in (to_prefill, to_other):
            first = await first_tokens(client, SECOND)
            assert (first.num_cached_tokens, first.num_peer_tokens) == (NUM_SHARED, NUM_SHARED)
            assert first.num_peer_held_tokens is None


async def test_both_workers_tell_what_the_peer_of_the_prefill_held(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        prefill, to_prefill = await start(workers, "p0", "prefill")
        _, to_decode = await start(workers, "d0", "decode")
        _, to_other = await start(workers, "d1", "decode")
        to_prefill.prefill(SECOND, peer=to_decode.peer(NUM_SHARED))
        to_other.decode(SECOND, source=to_prefill.source)
        assert await to_other.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(prefill) == {"absent": 1}
        for client in (to_prefill, to_other):
            first = await first_tokens(client, SECOND)
            assert (first.num_cached_tokens, first.num_peer_held_tokens) == (0, 0)


async def test_only_what_is_lacking_is_read(tmp_path: Path) -> None:
    begin = make_request("r0", prompt=range(70), max_tokens=2, ignore_eos=True)
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0")
        peer = await warm(to_holder)
        to_reader.decode(begin)
        await to_reader.answer(begin)
        to_reader.decode(SECOND, peer=peer)
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert num_fetched_blocks(reader) == NUM_SHARED // 16 - 4
        first = await first_tokens(to_reader, SECOND)
        assert (first.num_cached_tokens, first.num_peer_tokens) == (NUM_SHARED, NUM_SHARED - 64)


async def test_a_false_hit_costs_a_recompute(tmp_path: Path) -> None:
    """The holder has nothing; is another life; is not there; or is not who reads."""
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0")
        empty = to_holder.peer(NUM_SHARED)
        ghost = replace(empty, key=WorkerKey(empty.key.worker_id, Incarnation("0" * 16)))
        nobody = replace(ghost, address="127.0.0.1:1")
        own = to_reader.peer(NUM_SHARED)
        for attempt, peer in enumerate((empty, ghost, nobody, own), start=1):
            request = make_request(
                f"q{attempt}", prompt=range(attempt, 200), max_tokens=3, ignore_eos=True
            )
            to_reader.decode(request, peer=peer)
            assert await to_reader.answer(request) == expected_answer(request)
            # Nobody is asked who it is itself: so nothing is known.
            held = (await first_tokens(to_reader, request)).num_peer_held_tokens
            assert held == (0 if peer is not own else None)
        assert outcomes(reader) == {"absent": 1, "lost": 2}


async def test_another_tenants_blocks_are_not_read(tmp_path: Path) -> None:
    other = replace(SECOND, tenant="other")
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0")
        to_reader.decode(other, peer=await warm(to_holder))
        assert await to_reader.answer(other) == expected_answer(other)
        assert outcomes(reader) == {"absent": 1}


async def test_blocks_that_only_share_their_keys_are_not_read(tmp_path: Path) -> None:
    """By 64 bits, which is what routers know, the holder has the prefix."""
    engines = ThreadEngines()
    async with fake_workers(tmp_path) as workers:
        holder, to_holder = await start(workers, "h0", engines=engines)
        reader, to_reader = await start(workers, "r0")
        secret = load_or_create_secret(holder.config.common.data_dir)
        seed = NamespaceSeeds(holder.service.shell.hello.namespace, secret.value)(SECOND)
        hashes = hash_blocks(seed, SECOND.prompt_token_ids[:NUM_SHARED], 16)
        # Nothing runs there: its core is the test's.
        plant(engines.engines[0].core, colliding(hashes))
        other = make_request("other", prompt=8, max_tokens=1)
        to_holder.decode(other)
        await to_holder.answer(other)
        kv = holder.service.shell.kv
        assert kv.num_held(block_keys(hashes)) == NUM_SHARED // 16
        for number, (client, peer) in enumerate(
            ((to_reader, to_holder.peer(NUM_SHARED)), (to_holder, None))
        ):
            request = replace(SECOND, request_id=RequestId(f"q{number}"))
            client.decode(request, peer=peer)
            assert await client.answer(request) == expected_answer(request)
            first = await first_tokens(client, request)
            assert (first.num_cached_tokens, first.num_peer_tokens) == (0, 0)
        assert outcomes(reader) == {"absent": 1}


async def test_a_holder_evicts_before_it_is_asked(tmp_path: Path) -> None:
    """A pool of 14 blocks: another prompt has taken most of the room."""
    filler = make_request("fill", prompt=range(500, 590), max_tokens=2, ignore_eos=True)
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0", num_blocks=14)
        reader, to_reader = await start(workers, "r0")
        peer = await warm(to_holder)
        to_holder.decode(filler)
        await to_holder.answer(filler)
        to_reader.decode(SECOND, peer=peer)
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(reader) == {"short": 1}
        assert 0 < num_fetched_blocks(reader) < NUM_SHARED // 16
        first = await first_tokens(to_reader, SECOND)
        assert first.num_peer_held_tokens == 16 * num_fetched_blocks(reader)
        assert first.num_peer_tokens == first.num_peer_held_tokens


async def test_a_holder_cannot_evict_what_is_read(tmp_path: Path) -> None:
    """The read takes its time, and the holder would need the room meanwhile."""
    filler = make_request("fill", prompt=range(500, 590), max_tokens=2, ignore_eos=True)
    async with fake_workers(tmp_path) as workers:
        holder, to_holder = await start(workers, "h0", num_blocks=14)
        reader, to_reader = await start(workers, "r0", failpoints="fetch.read=delay:1000")
        peer = await warm(to_holder)
        to_reader.decode(SECOND, peer=peer)

        async def is_locked() -> bool:
            return (await holder.ledger()).ledger.num_prefix_locks == 1

        await eventually(is_locked, timeout_s=5.0, what="the prefix is locked")
        to_holder.decode(filler)
        refused = await to_holder.until(filler, Refused)
        assert isinstance(refused, Refused)
        assert refused.reason is RefuseReason.NO_BLOCKS
        assert await is_locked(), "it was refused too late to tell"
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(reader) == {"whole": 1}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("flip", "damaged"), ("drop", "lost"), ("delay:20", "whole"), ("limit:100000", "whole")],
)
async def test_reads_that_suffer(tmp_path: Path, fault: str, outcome: str) -> None:
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0", failpoints=f"fetch.read={fault}")
        to_reader.decode(SECOND, peer=await warm(to_holder))
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(reader) == {outcome: 1}
        held = (await first_tokens(to_reader, SECOND)).num_peer_held_tokens
        assert held == (None if outcome == "whole" else 0)


async def test_a_block_that_was_damaged_in_the_holders_memory(tmp_path: Path) -> None:
    engines: list[ThreadEngines] = []

    def damage(plan: StepPlan, layer: int) -> None:
        """After layer 1 is marked, flip a byte of it in the third block of the prompt."""
        if layer == 2 and len(plan.rows[0].token_ids) > 1:
            memory = engines[0].engines[0].memory
            block = int(plan.rows[0].block_tables[0][2])
            memory.pool.bytes[block * BLOCK_BYTES + BLOCK_BYTES // 4] ^= 1

    engines.append(ThreadEngines(damage))
    async with fake_workers(tmp_path) as workers:
        # One chunk, so that the holder itself never computes with what was damaged.
        only_prefill = replace(
            FIRST, sampling=replace(FIRST.sampling, max_tokens=1, ignore_eos=True)
        )
        _, to_holder = await start(workers, "h0", engines=engines[0])
        reader, to_reader = await start(workers, "r0")
        to_holder.decode(only_prefill)
        await to_holder.answer(only_prefill)
        to_reader.decode(SECOND, peer=to_holder.peer(NUM_SHARED))
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(reader) == {"damaged": 1}
        assert num_fetched_blocks(reader) == 2
        assert reader.service.metrics.value(names.KV_CHECKSUM_MISMATCH, backend="shm") == 1


@pytest.mark.parametrize("place", ["hold.before_opened", "fetch.read"])
async def test_abort_during_a_fetch(tmp_path: Path, place: str) -> None:
    """Before it is opened, and while it is read: both sides let go, and the request can come again."""
    slow = f"{place}=delay:60000@1"
    async with fake_workers(tmp_path) as workers:
        holder, to_holder = await start(
            workers, "h0", failpoints=slow if place.startswith("hold") else ""
        )
        reader, to_reader = await start(
            workers, "r0", failpoints=slow if place.startswith("fetch") else ""
        )
        peer = await warm(to_holder)
        to_reader.decode(SECOND, peer=peer)

        async def is_locked() -> bool:
            return (await holder.ledger()).ledger.num_prefix_locks == 1

        await eventually(is_locked, timeout_s=5.0, what="the prefix is locked")
        if place == "fetch.read":

            async def is_reading() -> bool:
                return (await reader.ledger()).num_reads == 1

            await eventually(is_reading, timeout_s=5.0, what="it is read")
        to_reader.abort(SECOND)
        await workers.check_quiet()
        assert outcomes(reader) == {"cancelled": 1}
        to_reader.decode(SECOND, attempt=2, peer=peer)
        assert await to_reader.answer(SECOND, attempt=2) == expected_answer(SECOND)
        assert outcomes(reader) == {"cancelled": 1, "whole": 1}


async def test_a_holder_that_stops_while_it_is_read(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        _, to_reader = await start(workers, "r0", failpoints="fetch.read=delay:300")
        holder, to_holder = await start(workers, "h0", drain_timeout_s=0.0)
        to_reader.decode(SECOND, peer=await warm(to_holder))

        async def is_locked() -> bool:
            return (await holder.ledger()).ledger.num_prefix_locks == 1

        await eventually(is_locked, timeout_s=5.0, what="the prefix is locked")
        await workers.stop(holder)
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)


@pytest.mark.parametrize("fault", ["hold.before_opened=delay:2000", "fetch.read=delay:2000"])
async def test_a_slow_peer_is_given_up_and_not_asked_again(tmp_path: Path, fault: str) -> None:
    """Nothing is known of the worker's own speed: half a second, once."""
    at_holder = fault if fault.startswith("hold") else ""
    at_reader = fault if fault.startswith("fetch") else ""
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0", failpoints=at_holder)
        reader, to_reader = await start(workers, "r0", kv_peer_reads="auto", failpoints=at_reader)
        for n in range(3):
            prompt = range(n, 200)
            warming = make_request(f"w{n}", prompt=prompt, max_tokens=1)
            peer = await warm(to_holder, warming)
            request = make_request(f"q{n}", prompt=prompt, max_tokens=2, ignore_eos=True)
            to_reader.decode(request, peer=peer)
            assert await to_reader.answer(request) == expected_answer(request)
            first = await first_tokens(to_reader, request)
            assert (first.num_cached_tokens, first.num_peer_held_tokens) == (0, None)
        assert outcomes(reader) == {"slow": 1}


async def test_a_worker_that_computes_faster_asks_nobody(tmp_path: Path) -> None:
    """Its engine takes microseconds, and by the third prompt it knows."""
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0", kv_peer_reads="auto")
        peer = await warm(to_holder)
        for n in range(5):
            await warm(to_reader, make_request(f"w{n}", prompt=20 * (n + 1), max_tokens=1))
        to_reader.decode(SECOND, peer=peer)
        assert await to_reader.answer(SECOND) == expected_answer(SECOND)
        assert outcomes(reader) == {}
        first = await first_tokens(to_reader, SECOND)
        assert (first.num_cached_tokens, first.num_peer_tokens) == (0, 0)


async def test_requests_for_one_prefix_share_one_fetch(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        reader, to_reader = await start(workers, "r0", failpoints="fetch.read=delay:50")
        peer = await warm(to_holder)
        requests = [
            make_request(
                f"q{n}",
                prompt=[*range(192), 300 + n],
                max_tokens=2,
                arrival=float(n),
                ignore_eos=True,
            )
            for n in range(3)
        ]
        for request in requests:
            to_reader.decode(request, peer=peer)
        for request in requests:
            assert await to_reader.answer(request) == expected_answer(request)
        # The first reads, the others wait for it.
        assert outcomes(reader) == {"whole": 1}


async def test_the_span_of_a_fetch(tmp_path: Path) -> None:
    traced = replace(SECOND, traceparent=TRACEPARENT)
    async with fake_workers(tmp_path) as workers:
        _, to_holder = await start(workers, "h0")
        _, to_reader = await start(workers, "r0")
        to_reader.decode(traced, peer=await warm(to_holder))
        await to_reader.answer(traced)
        fetch, prefill, _ = to_reader.spans
    assert [fetch.name, prefill.name] == [names.SPAN_KV_FETCH, names.SPAN_PREFILL]
    assert fetch.parent_span_id == "b7ad6b7169203331"
    assert fetch.attributes[names.ATTR_REASON] == "whole"
    assert fetch.attributes[names.ATTR_BYTES] == NUM_SHARED // 16 * BLOCK_BYTES
    assert fetch.attributes[names.ATTR_BACKEND] == "shm"
    assert fetch.start_unix_ns <= fetch.events[0].unix_ns <= fetch.end_unix_ns
    assert fetch.end_unix_ns <= prefill.end_unix_ns
