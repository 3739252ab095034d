"""CopyQueue in both forms: order, cancellation, and what close does."""

from __future__ import annotations

import select

import numpy as np
import pytest

from moonpool import native
from moonpool.kv.layout import KvLayout
from moonpool.native.fallback import FallbackKernels
from moonpool.native.geometry import LeafGeometry, RangeError
from moonpool.native.kernels import (
    CopyCancelledError,
    CopyQueue,
    CopyStream,
    CopyTicket,
    Kernels,
    StreamRead,
)

forms = pytest.mark.parametrize(
    "kernels", [native.kernels(), FallbackKernels()], ids=lambda form: type(form).__name__
)
LAYOUT = KvLayout.block_major(
    num_blocks=8, num_layers=1, num_kv_heads=4, head_dim=64, dtype="float32"
)
GEOMETRY = LeafGeometry.of_layout(LAYOUT)
NO_CHECKS = native.leaf_checks([], [], np.array([], np.uint64))


def wait_for(queue: CopyQueue, count: int) -> list[CopyTicket]:
    tickets: list[CopyTicket] = []
    while len(tickets) < count:
        assert select.select([queue.fileno()], [], [], 10)[0], "no job finished"
        tickets += queue.finished()
    return tickets


def random_source() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, LAYOUT.pool_bytes, np.uint8)


@forms
def test_jobs_finish_in_order_with_their_own_results(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    try:
        route = queue.route(source, target, GEOMETRY)
        block = LAYOUT.block_bytes
        submitted = []
        for index in range(8):
            expected = kernels.digest(source[index * block : (index + 1) * block])
            checks = native.leaf_checks([index], [0], np.uint64(expected ^ (index == 5)), 0)
            spans = np.array([[index * block, index * block, block]], np.int64)
            submitted.append(queue.submit(route, spans, checks))
        finished = wait_for(queue, 8)
        assert finished == submitted
        for index, ticket in enumerate(finished):
            is_bad = ticket.result()
            assert (is_bad is not None and is_bad.tolist() == [True]) == (index == 5)
            assert not ticket.cancel()
        assert np.array_equal(source, target)
        assert queue.finished() == []
    finally:
        assert queue.close() == []
        assert queue.close() == []


@forms
def test_a_job_out_of_bounds_says_so_and_the_next_one_runs(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    try:
        route = queue.route(source, target, GEOMETRY)
        queue.submit(route, np.array([[0, 1, LAYOUT.pool_bytes]]), NO_CHECKS)
        queue.submit(route, np.array([[0, 0, 10]]), NO_CHECKS)
        bad, good = wait_for(queue, 2)
        with pytest.raises(RangeError):
            bad.result()
        assert good.result() is None
        assert np.array_equal(target[:10], source[:10])
        assert not target[10:].any()
    finally:
        queue.close()


@forms
def test_a_cancelled_job_never_writes_and_is_told(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    try:
        route = queue.route(source, target, GEOMETRY)
        long = np.tile(np.array([[0, 0, LAYOUT.pool_bytes // 2]]), (400, 1))
        first = queue.submit(route, long, NO_CHECKS)
        half = LAYOUT.pool_bytes // 2
        second = queue.submit(route, np.array([[0, half, half]]), NO_CHECKS)
        was_dropped = second.cancel()
        assert wait_for(queue, 2) == [first, second]
        assert first.result() is None
        assert target[half:].any() != was_dropped
        if was_dropped:
            with pytest.raises(CopyCancelledError):
                second.result()
    finally:
        queue.close()


@forms
def test_close_ends_every_job(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    route = queue.route(source, target, GEOMETRY)
    spans = np.tile(np.array([[0, 0, LAYOUT.pool_bytes]]), (50, 1))
    submitted = [queue.submit(route, spans, NO_CHECKS) for _ in range(20)]
    told = queue.close()
    assert told == submitted
    outcomes = []
    for ticket in told:
        try:
            outcomes.append(ticket.result() is None)
        except CopyCancelledError:
            outcomes.append(False)
    assert outcomes == sorted(outcomes, reverse=True)
    target[:] = 0
    assert not target.any()
    with pytest.raises(RuntimeError):
        queue.submit(route, spans, NO_CHECKS)


@forms
def test_a_read_only_target_is_refused(kernels: Kernels) -> None:
    target = np.zeros(LAYOUT.pool_bytes, np.uint8)
    target.flags.writeable = False
    queue = kernels.copy_queue()
    try:
        with pytest.raises(ValueError, match="read-only"):
            queue.route(random_source(), target, GEOMETRY)
    finally:
        queue.close()


def whole_blocks(
    stream: CopyStream, source: np.ndarray, kernels: Kernels, *blocks: int
) -> StreamRead:
    """A read of these blocks to where they lie in the source, expected."""
    size = LAYOUT.block_bytes
    digests = [kernels.digest(source[block * size : (block + 1) * size]) for block in blocks]
    spans = np.array([[0, block * size, size] for block in blocks], np.int64)
    checks = native.leaf_checks(blocks, 0, np.array(digests, np.uint64), range(len(blocks)))
    read = stream.plan(spans, checks)
    stream.expect(read)
    return read


@forms
def test_an_abandoned_read_writes_nothing_and_its_bytes_are_thrown_away(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    size = LAYOUT.block_bytes
    queue = kernels.copy_queue()
    try:
        stream = queue.stream(target, GEOMETRY)
        first = whole_blocks(stream, source, kernels, 0, 1)
        second = whole_blocks(stream, source, kernels, 2)
        stream.feed(source[: size // 2].tobytes())
        while not first.abandon():
            assert select.select([queue.fileno()], [], [], 10)[0]
            queue.finished()
        target[:] = 0
        stream.feed(source[size // 2 : 3 * size].tobytes())
        while stream.num_done() < 2:
            assert select.select([queue.fileno()], [], [], 10)[0]
            queue.finished()
        assert not target[: 2 * size].any()
        assert np.array_equal(target[2 * size : 3 * size], source[2 * size : 3 * size])
        assert second.bad_checks() is None
        assert stream.ring_at(0) == 3 * size
        assert queue.finished() == []
    finally:
        queue.close()


@forms
def test_the_queue_rings_when_so_much_is_consumed(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    try:
        stream = queue.stream(target, GEOMETRY)
        whole_blocks(stream, source, kernels, 0, 1, 2, 3)
        assert stream.ring_at(100) == 0
        for at in range(0, 200, 50):
            stream.feed(source[at : at + 50].tobytes())
        while stream.ring_at(200) < 200:
            assert select.select([queue.fileno()], [], [], 10)[0]
            queue.finished()
        assert stream.num_done() == 0
        assert np.array_equal(target[:200], source[:200])
    finally:
        queue.close()


@forms
def test_a_read_out_of_bounds_is_not_planned(kernels: Kernels) -> None:
    queue = kernels.copy_queue()
    try:
        stream = queue.stream(np.zeros(LAYOUT.pool_bytes, np.uint8), GEOMETRY)
        for spans in ([[0, 0, 1], [0, LAYOUT.pool_bytes, 1]], [[0, 0, 1], [0, -1, 1]]):
            with pytest.raises(RangeError) as caught:
                stream.plan(np.array(spans), NO_CHECKS)
            assert (caught.value.what, caught.value.index) == ("span", 1)
        for block, layer in ((8, 0), (-1, 0), (0, 1)):
            with pytest.raises(RangeError):
                stream.plan(
                    np.array([[0, 0, 1]]),
                    native.leaf_checks([block], [layer], np.array([0], np.uint64), 0),
                )
    finally:
        queue.close()


@forms
def test_a_closed_queue_takes_no_bytes(kernels: Kernels) -> None:
    source, target = random_source(), np.zeros(LAYOUT.pool_bytes, np.uint8)
    queue = kernels.copy_queue()
    stream = queue.stream(target, GEOMETRY)
    whole_blocks(stream, source, kernels, *range(8))
    for at in range(0, len(source), 1000):
        stream.feed(source[at : at + 1000].tobytes())
    assert queue.close() == []
    target[:] = 0
    with pytest.raises(RuntimeError):
        stream.feed(bytes(1))
    assert not target.any()
