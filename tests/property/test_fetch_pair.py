"""Both ends of prefix reads over real cores: whatever the order, and whatever breaks, no wrong token and
no block that stays held.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.core.config import CoreConfig
from moonpool.handoff.config import FetchConfig, FetchMode
from moonpool.handoff.effects import FetchOutcome
from moonpool.ids import RequestId
from moonpool.inference.request import InferenceRequest
from support.fetch_world import FetchWorld
from support.requests import make_request

BLOCK_SIZE = 4
#: Requests share the beginning of one chat, so that workers hold each other's prefixes.
CHAT = tuple(range(10, 40))

#: Beside what lies ready: requests, faults, and time.
ACTS = ("submit", "submit", "cut", "bad", "fail", "abort", "twice", "time", "delay 0", "delay 2")

#: A request, its worker, and how many tokens the other one is believed to hold.
Plan = tuple[InferenceRequest, int, int]


def make_world(
    num_blocks: int, mode: FetchMode = FetchMode.ALWAYS, always_s: float = 30.0
) -> FetchWorld:
    core = CoreConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        max_model_len=64,
        headroom_tokens=4,
        max_queued_steps=32,
        is_checked=True,
    )
    # Two blocks a piece, two pieces at once.
    fetch = FetchConfig(
        mode=mode,
        block_bytes=1,
        span_bytes=2,
        max_reads=2,
        max_locks_per_reader=2,
        always_s=always_s,
    )
    return FetchWorld(num_workers=2, core=core, fetch=fetch)


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    num_requests = draw(st.integers(1, 6))
    return [
        (
            make_request(
                f"r{n}",
                # Some begin as the chat that worker 1 holds, some push it out.
                prompt=[
                    *CHAT[: draw(st.sampled_from([0, 9, 18, 30]))],
                    *range(100 * n, 100 * n + 5),
                ],
                max_tokens=4,
                arrival=float(n),
            ),
            draw(st.integers(0, 1)),
            draw(st.sampled_from([0, 8, 28])),
        )
        for n in range(num_requests)
    ]


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=plans(),
    num_blocks=st.sampled_from([10, 12, 24]),
    mode=st.sampled_from([FetchMode.ALWAYS, FetchMode.AUTO]),
    choices=st.lists(st.integers(0, 12) | st.sampled_from(ACTS), max_size=120),
)
def test_any_order_with_any_fault_ends_well(
    requests: list[Plan], num_blocks: int, mode: FetchMode, choices: list[int | str]
) -> None:
    world = make_world(num_blocks, mode)
    world.submit(make_request("first", prompt=CHAT, max_tokens=2), 1, 0)
    world.settle()
    for choice in choices:
        act(world, choice, requests)
    for plan in requests:
        world.submit(*plan)
    world.settle()


def act(world: FetchWorld, choice: int | str, requests: list[Plan]) -> None:
    """One thing happens, if it can."""
    live = [t for t in world.requests.values() if t.is_placed and not t.is_over]
    match choice:
        case "submit" if requests:
            world.submit(*requests.pop(0))
        case "cut" if world.streams:
            world.cut(world.streams[0])
        case "bad" | "fail" if world.reads:
            world.end_read(world.reads[0], fault=str(choice))
        case "delay 0" | "delay 2":
            world.delay(int(str(choice)[-1]))
        case "abort" if live:
            world.abort(live[-1])
        case "twice" if live:
            world.place(live[0], is_twice=True)
        case "time":
            world.pass_time()
        case int():
            moves = world.moves()
            if moves:
                moves[choice % len(moves)]()
        case _:
            pass


def test_the_second_worker_reads_what_the_first_has_computed() -> None:
    world = make_world(40)
    prompt = [*CHAT, 1]
    world.submit(make_request("a", prompt=prompt, max_tokens=2), 1, 0)
    world.settle()
    world.submit(make_request("b", prompt=prompt, max_tokens=2), 0, 28)
    world.settle()
    assert [record.outcome for record in world.records] == [FetchOutcome.WHOLE]
    assert world.records[0].num_blocks == 7
    computed = world.nodes[0].worker.runner.plans[0].rows[0]
    assert computed.start == 28


@pytest.mark.parametrize(("is_late", "outcome"), [(False, "whole"), (True, "memory_only")])
def test_a_holder_that_goes_to_its_disk_first(is_late: bool, outcome: str) -> None:
    world = make_world(40, always_s=1.0)
    world.submit(make_request("a", prompt=CHAT, max_tokens=2), 1, 0)
    world.settle()
    world.submit(make_request("b", prompt=CHAT, max_tokens=2), 0, 28)
    while not world.delay(num_ready=3):
        world.moves()[0]()
    (stream,) = world.streams
    while stream.to_reader:
        world.moves()[-1]()
    if is_late:
        world.pass_time()
    world.settle()
    (record,) = world.records
    assert record.outcome.value == outcome
    num_read = 12 if is_late else 28
    assert world.nodes[0].worker.runner.plans[0].rows[0].start == num_read


def test_a_damaged_block_is_computed() -> None:
    world = make_world(40)
    world.submit(make_request("a", prompt=CHAT, max_tokens=2), 1, 0)
    world.settle()
    world.submit(make_request("b", prompt=CHAT, max_tokens=2), 0, 28)
    while not world.reads:
        world.moves()[0]()
    # The second piece: what comes before it stays.
    world.end_read(world.reads[1], fault="bad")
    world.settle()
    assert [record.outcome for record in world.records] == [FetchOutcome.DAMAGED]
    assert world.nodes[0].worker.runner.plans[0].rows[0].start == 8


def reading(world: FetchWorld) -> None:
    """Worker 1 holds the chat, worker 0 has begun to read it and has not ended."""
    world.submit(make_request("a", prompt=CHAT, max_tokens=2), 1, 0)
    world.settle()
    world.submit(make_request("b", prompt=CHAT, max_tokens=2), 0, 28)
    while not world.reads:
        world.moves()[0]()


def run_without_reads(world: FetchWorld, num_moves: int = 60) -> None:
    """Everything else goes on."""
    for _ in range(num_moves):
        moves = world.moves(with_reads=False)
        if moves:
            moves[0]()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_holder_and_a_reader_that_need_room_meanwhile(worker: int) -> None:
    """Neither the holder's blocks nor the reader's go to anybody else while they are read."""
    world = make_world(num_blocks=12)
    reading(world)
    for n in range(3):
        world.submit(make_request(f"c{n}", prompt=range(100 * n, 100 * n + 14)), worker, 0)
    run_without_reads(world)
    world.settle()
    assert FetchOutcome.WHOLE in world.outcomes


def test_room_that_is_needed_before_the_reads_of_an_aborted_attempt_have_ended() -> None:
    world = make_world(num_blocks=12)
    reading(world)
    world.abort(world.requests[RequestId("b")])
    for n in range(3):
        world.submit(make_request(f"c{n}", prompt=range(100 * n, 100 * n + 14)), 0, 0)
    run_without_reads(world)
    assert world.reads
    world.settle()
    assert world.outcomes == {FetchOutcome.CANCELLED}
