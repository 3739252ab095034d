"""The compiled and the Python kernels against XXH3 of the planes, on random shapes and strides."""

from __future__ import annotations

import dataclasses
import itertools
import os
import select

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool import native
from moonpool.kv.layout import KvLayout
from moonpool.native.fallback import FallbackKernels
from moonpool.native.geometry import LeafGeometry, RangeError

FORMS = [native.kernels(), FallbackKernels()]
forms = pytest.mark.parametrize("kernels", FORMS, ids=lambda form: type(form).__name__)
SMALL_GEOMETRY = LeafGeometry.of_layout(
    KvLayout.block_major(num_blocks=3, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
)


@st.composite
def geometries(draw: st.DrawFn) -> LeafGeometry:
    """Strides in any order of block, layer and plane, with gaps."""
    counts = {name: draw(st.integers(1, 4)) for name in ("block", "layer", "plane")}
    block_size, token_bytes = draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([1, 4, 26]))
    plane_bytes = block_size * token_bytes * draw(st.integers(1, 3))
    stride, strides = plane_bytes, {}
    for name in draw(st.permutations(["plane", "layer", "block"])):
        strides[name] = stride + draw(st.sampled_from([0, 0, 8, 13]))
        stride = strides[name] * counts[name]
    first_byte = draw(st.sampled_from([0, 0, 7]))
    return LeafGeometry(
        region_bytes=first_byte + stride + draw(st.sampled_from([0, 5])),
        first_byte=first_byte,
        num_blocks=counts["block"],
        num_layers=counts["layer"],
        num_planes=counts["plane"],
        block_stride=strides["block"],
        layer_stride=strides["layer"],
        plane_stride=strides["plane"],
        plane_bytes=plane_bytes,
        block_size=block_size,
        token_bytes=token_bytes,
    )


def random_pool(geometry: LeafGeometry, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, geometry.region_bytes, np.uint8)


def plane_starts(geometry: LeafGeometry, block: int, layer: int) -> list[int]:
    first = geometry.first_byte + block * geometry.block_stride + layer * geometry.layer_stride
    return [first + plane * geometry.plane_stride for plane in range(geometry.num_planes)]


def reference(pool: np.ndarray, geometry: LeafGeometry, block: int, layer: int) -> int:
    payload = b"".join(
        pool[start : start + geometry.plane_bytes].tobytes()
        for start in plane_starts(geometry, block, layer)
    )
    return xxhash.xxh3_64_intdigest(payload)


def all_leaves(geometry: LeafGeometry) -> list[tuple[int, int]]:
    return list(itertools.product(range(geometry.num_blocks), range(geometry.num_layers)))


@forms
@given(geometry=geometries(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_leaves_are_xxh3_of_the_planes_in_order(
    kernels: native.Kernels, geometry: LeafGeometry, seed: int
) -> None:
    geometry.validate()
    pool = random_pool(geometry, seed)
    leaves = np.zeros((geometry.num_blocks, geometry.num_layers), np.uint64)
    blocks = np.arange(geometry.num_blocks, dtype=np.int32)[::-1].copy()
    for layer in range(geometry.num_layers):
        kernels.write_leaves(pool, geometry, blocks, layer, leaves)
    for block, layer in all_leaves(geometry):
        assert int(leaves[block, layer]) == reference(pool, geometry, block, layer)


@forms
@given(geometry=geometries(), seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=25)
def test_a_scattered_copy_is_exact_and_finds_each_flipped_byte(
    kernels: native.Kernels, geometry: LeafGeometry, seed: int, data: st.DataObject
) -> None:
    source = random_pool(geometry, seed)
    target = np.zeros(geometry.region_bytes, np.uint8)
    leaves = data.draw(st.permutations(all_leaves(geometry)))
    expected = [reference(source, geometry, *leaf) for leaf in leaves]
    flipped = data.draw(st.sets(st.integers(0, len(leaves) - 1), max_size=3))
    for index in flipped:
        start = data.draw(st.sampled_from(plane_starts(geometry, *leaves[index])))
        source[start + data.draw(st.integers(0, geometry.plane_bytes - 1))] ^= 1 << (seed % 8)
    spans, after = [], []
    for leaf in leaves:
        for start in data.draw(st.permutations(plane_starts(geometry, *leaf))):
            cut = data.draw(st.integers(0, geometry.plane_bytes))
            spans += [(start, start, cut), (start + cut, start + cut, geometry.plane_bytes - cut)]
        after.append(len(spans) - 1)
    blocks, layers = zip(*leaves, strict=True)
    is_bad = kernels.copy_verify(
        source,
        target,
        np.array(spans, np.int64),
        geometry,
        native.leaf_checks(blocks, layers, np.array(expected, np.uint64), after),
    )
    assert set(np.flatnonzero(is_bad).tolist()) == flipped
    covered = np.zeros(geometry.region_bytes, np.bool_)
    for _, to, length in spans:
        covered[to : to + length] = True
    assert np.array_equal(target, np.where(covered, source, 0))


@forms
@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_one_long_span_is_checked_leaf_by_leaf(kernels: native.Kernels, order: str) -> None:
    layout: KvLayout = getattr(KvLayout, order)(
        num_blocks=5, num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    )
    geometry = LeafGeometry.of_layout(layout)
    source = random_pool(geometry, 1)
    leaves = sorted(all_leaves(geometry), key=lambda leaf: plane_starts(geometry, *leaf))
    expected = np.array([reference(source, geometry, *leaf) for leaf in leaves], np.uint64)
    expected[4] ^= np.uint64(1)
    target = np.zeros_like(source)
    is_bad = kernels.copy_verify(
        source,
        target,
        np.array([[0, 0, layout.pool_bytes]]),
        geometry,
        native.leaf_checks(*zip(*leaves, strict=True), expected, 0),
    )
    assert np.flatnonzero(is_bad).tolist() == [4]
    assert np.array_equal(source, target)


@forms
@given(data=st.data())
@settings(max_examples=30)
def test_out_of_bounds_writes_nothing(kernels: native.Kernels, data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    size = geometry.region_bytes
    source, target = random_pool(geometry, 3), np.zeros(size, np.uint8)
    bad_span = data.draw(
        st.sampled_from(
            [
                (-1, 0, 1),
                (0, -1, 1),
                (0, 0, -1),
                (1, 0, size),
                (0, 1, size),
                (0, 0, size + 1),
                (2**63 - 1, 0, 1),
                (0, 2**63 - 1, 2),
                (0, 0, 2**63 - 1),
            ]
        )
    )
    with pytest.raises(RangeError) as caught:
        kernels.copy_verify(
            source,
            target,
            np.array([(0, 0, size), bad_span], np.int64),
            geometry,
            native.leaf_checks([], [], np.array([], np.uint64)),
        )
    assert (caught.value.what, caught.value.index) == ("span", 1)
    for block, layer in ((geometry.num_blocks, 0), (-1, 0), (0, geometry.num_layers), (0, -1)):
        checks = native.leaf_checks([block], [layer], np.array([0], np.uint64))
        with pytest.raises(RangeError):
            kernels.copy_verify(source, target, np.array([(0, 0, size)]), geometry, checks)
        with pytest.raises(RangeError):
            kernels.write_leaves(
                source,
                geometry,
                np.array([block], np.int32),
                layer,
                np.zeros((geometry.num_blocks, geometry.num_layers), np.uint64),
            )
    assert not target.any()


@forms
def test_leaves_out_of_order_are_refused(kernels: native.Kernels) -> None:
    layout = KvLayout.block_major(
        num_blocks=2, num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32"
    )
    pool = np.zeros(layout.pool_bytes, np.uint8)
    spans = np.zeros((2, 3), np.int64)
    for after in ([1, 0], [0, 2]):
        with pytest.raises(ValueError, match="order"):
            kernels.copy_verify(
                pool,
                pool.copy(),
                spans,
                LeafGeometry.of_layout(layout),
                native.leaf_checks([0, 1], 0, np.zeros(2, np.uint64), after),
            )


@forms
def test_finishing_a_layer_zeroes_tails_then_digests_then_publishes_then_rings(
    kernels: native.Kernels,
) -> None:
    layout = KvLayout.block_major(
        num_blocks=3, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32"
    )
    geometry = LeafGeometry.of_layout(layout)
    pool = random_pool(geometry, 5)
    before = pool.reshape(3, 2, 2, 2, 16, 16).copy()
    leaves = np.zeros((3, 2), np.uint64)
    page = np.zeros(4096, np.uint8)
    eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        finisher = kernels.layer_finisher(
            pool=pool, geometry=geometry, leaves=leaves, page=page, eventfd=eventfd
        )
        control = kernels.control_page(page)
        control.begin_step(7, 1234)
        assert (control.progress(), control.started_ns()) == (
            native.Progress(step=7, layers_done=0),
            1234,
        )
        finisher.finish_layer(
            step=7,
            layer=1,
            block_ids=np.array([2, 0], np.int32),
            zero_tails=np.array([[2, 5]], np.int32),
        )
        assert control.progress() == native.Progress(step=7, layers_done=2)
        assert os.eventfd_read(eventfd) == 1
        before[2, 1, :, :, 5:] = 0
        assert np.array_equal(pool.reshape(before.shape), before)
        for block in (0, 2):
            assert int(leaves[block, 1]) == reference(pool, geometry, block, 1)
        assert not leaves[1].any()
        assert not leaves[:, 0].any()
        control.end_step()
        assert (control.progress().layers_done, control.started_ns()) == (2, 0)
        with pytest.raises(RangeError):
            finisher.finish_layer(
                step=8,
                layer=0,
                block_ids=np.array([0], np.int32),
                zero_tails=np.array([[0, 17]], np.int32),
            )
        assert control.progress().step == 7
    finally:
        os.close(eventfd)


@forms
def test_finishing_a_layer_checks_both_lists_before_it_writes(kernels: native.Kernels) -> None:
    geometry = SMALL_GEOMETRY
    pool = random_pool(geometry, 5)
    before = pool.copy()
    leaves = np.zeros((geometry.num_blocks, geometry.num_layers), np.uint64)
    finisher = kernels.layer_finisher(
        pool=pool, geometry=geometry, leaves=leaves, page=np.zeros(4096, np.uint8), eventfd=-1
    )
    for blocks, tails in (([0, 3], [[0, 5]]), ([0], [[0, 5], [3, 5]]), ([0], [[0, 5], [1, 17]])):
        with pytest.raises(RangeError):
            finisher.finish_layer(
                step=1,
                layer=0,
                block_ids=np.array(blocks, np.int32),
                zero_tails=np.array(tails, np.int32),
            )
        assert np.array_equal(pool, before)
        assert not leaves.any()


@forms
def test_tables_of_another_shape_and_memory_that_cannot_be_written_are_refused(
    kernels: native.Kernels,
) -> None:
    geometry = SMALL_GEOMETRY
    pool = random_pool(geometry, 6)
    sealed = np.frombuffer(pool.tobytes(), np.uint8)
    leaves = np.zeros((geometry.num_blocks, geometry.num_layers), np.uint64)
    page = np.zeros(4096, np.uint8)
    pairs, triples = np.zeros((2, 2), np.int64), np.zeros((2, 3), np.int64)
    checks = native.leaf_checks([], [], np.array([], np.uint64))
    tail = np.array([[0, 5]], np.int32)
    queue = kernels.copy_queue()
    try:
        stream = queue.stream(pool, geometry)
        for call in (
            lambda: kernels.gather(pool, triples),
            lambda: kernels.copy_verify(sealed, pool, pairs, geometry, checks),
            lambda: stream.plan(pairs, checks),
            lambda: kernels.zero_tails(pool, geometry, np.zeros((1, 3), np.int32), 0),
            lambda: kernels.zero_tails(sealed, geometry, tail, 0),
            lambda: kernels.copy_verify(pool, sealed, triples, geometry, checks),
            lambda: queue.stream(sealed, geometry),
            lambda: queue.route(pool, sealed, geometry),
            lambda: kernels.layer_finisher(
                pool=sealed, geometry=geometry, leaves=leaves, page=page, eventfd=-1
            ).finish_layer(step=1, layer=0, block_ids=tail[:, 0].copy(), zero_tails=tail),
        ):
            with pytest.raises(ValueError, match=r"shape|unpack|read-only"):
                call()
    finally:
        queue.close()
    assert np.array_equal(sealed, pool)


def aligned(data: np.ndarray, shift: int) -> np.ndarray:
    """A copy that lies `shift` bytes behind a multiple of 64."""
    room = np.zeros(len(data) + 128, np.uint8)
    first = -room.ctypes.data % 64 + shift
    room[first : first + len(data)] = data
    return room[first : first + len(data)]


@forms
@given(
    num_bytes=st.integers(1, 20_000),
    shifts=st.tuples(st.sampled_from([0, 32, 1, 63]), st.sampled_from([0, 32, 1, 63])),
    seed=st.integers(0, 2**32 - 1),
    is_flipped=st.booleans(),
)
@settings(max_examples=40)
def test_a_leaf_that_is_one_run_is_copied_and_checked_wherever_it_lies(
    kernels: native.Kernels,
    num_bytes: int,
    shifts: tuple[int, int],
    seed: int,
    is_flipped: bool,
) -> None:
    layout = KvLayout.block_major(
        num_blocks=3, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
    geometry = dataclasses.replace(
        LeafGeometry.of_layout(layout),
        region_bytes=3 * num_bytes,
        block_size=1,
        token_bytes=num_bytes,
        plane_bytes=num_bytes,
        num_planes=1,
        block_stride=num_bytes,
    )
    source = aligned(random_pool(geometry, seed), shifts[0])
    target = aligned(np.zeros(3 * num_bytes, np.uint8), shifts[1])
    expected = reference(source, geometry, 1, 0)
    if is_flipped:
        source[num_bytes + seed % num_bytes] ^= 1
    start = num_bytes
    spans = np.array([(start, start, num_bytes)], np.int64)
    checks = native.leaf_checks([1], [0], np.array([expected], np.uint64), [0])
    is_bad = kernels.copy_verify(source, target, spans, geometry, checks)
    assert is_bad.tolist() == [is_flipped]
    assert np.array_equal(target[start : start + num_bytes], source[start : start + num_bytes])
    assert not target[:start].any()
    assert not target[start + num_bytes :].any()


@forms
@given(payload=st.binary(max_size=5000))
@settings(max_examples=30)
def test_digest_is_xxh3_64(kernels: native.Kernels, payload: bytes) -> None:
    assert kernels.digest(np.frombuffer(payload, np.uint8)) == xxhash.xxh3_64_intdigest(payload)


@forms
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_what_is_gathered_and_streamed_lies_where_it_should_and_is_checked(
    kernels: native.Kernels, data: st.DataObject, seed: int
) -> None:
    """Reads of random leaves, their planes cut at random and shuffled, in messages of random sizes."""
    geometry = data.draw(geometries())
    source = random_pool(geometry, seed)
    target = np.zeros(geometry.region_bytes, np.uint8)
    queue = kernels.copy_queue()
    try:
        stream = queue.stream(target, geometry)
        wanted, reads, flipped = [], [], []
        leaves = data.draw(st.permutations(all_leaves(geometry)))
        while leaves:
            count = data.draw(st.integers(1, len(leaves)))
            mine, leaves = leaves[:count], leaves[count:]
            spans, after = [], []
            for leaf in mine:
                for start in data.draw(st.permutations(plane_starts(geometry, *leaf))):
                    cut = data.draw(st.integers(0, geometry.plane_bytes))
                    spans += [(start, start, cut)]
                    spans += [(start + cut, start + cut, geometry.plane_bytes - cut)]
                after.append(len(spans) - 1)
            bad = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
            expected = [
                reference(source, geometry, *leaf) ^ (i in bad) for i, leaf in enumerate(mine)
            ]
            order = data.draw(st.permutations(range(count)))
            checks = native.leaf_checks(
                *zip(*mine, strict=True), np.array(expected, np.uint64), after
            )[list(order)]
            read = stream.plan(np.array(spans, np.int64), checks)
            stream.expect(read)
            wanted += [(offset, length) for offset, _, length in spans if length]
            reads.append(read)
            flipped.append(sorted(order.index(i) for i in bad))
        gathering = kernels.gather(source, np.array(wanted, np.int64))
        assert gathering.num_left == sum(read.num_bytes for read in reads)
        while gathering.num_left:
            stream.feed(gathering.take(data.draw(st.integers(1, gathering.num_left))))
        while stream.num_done() < len(reads):
            assert select.select([queue.fileno()], [], [], 10)[0], "no read is done"
            queue.finished()
        for read, positions in zip(reads, flipped, strict=True):
            bad_checks = read.bad_checks()
            assert ([] if bad_checks is None else bad_checks.tolist()) == positions
        covered = np.zeros(geometry.region_bytes, np.bool_)
        for offset, length in wanted:
            covered[offset : offset + length] = True
        assert np.array_equal(target, np.where(covered, source, 0))
        assert stream.ring_at(0) == len(source[covered])
    finally:
        queue.close()


@forms
def test_spans_outside_of_the_pool_are_not_gathered(kernels: native.Kernels) -> None:
    pool = np.zeros(100, np.uint8)
    for span in ([-1, 1], [100, 1], [0, 101], [1, 100], [5, 0], [5, -1], [2**63 - 1, 2]):
        with pytest.raises(RangeError) as caught:
            kernels.gather(pool, np.array([[0, 100], span], np.int64))
        assert caught.value.index == 1
