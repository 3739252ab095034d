"""KvLayout: where the bytes of a block lie. Layout is data, and all arithmetic about it is here.

A pool is a number of blocks of `block_size` tokens. Layers fall into groups (one today); a group has
planes ("k", "v"; a latent or scales would be others). Within a plane the order is HND,
`[kv_head, token, dim]`, so that a slice of heads is one run and FlashInfer takes it as it is.

    block-major   [block, layer, plane, kv_head, token, dim]     a block is one run
    layer-major   [layer, block, plane, kv_head, token, dim]     a layer is one run

Both are the same KvLayout with other strides. CopyPlan says which bytes of one pool go where in another
that lays its blocks out differently. What it converts: strides and order, and the slice of KV heads, in
both directions: a rank of many heads reads from several ranks of few, a rank of few reads a part of one
that has many. What it refuses: whatever changes a block's values or tokens.

All arithmetic of layouts stands in this one file, and no other file multiplies shapes: what leaves it
are offsets and lengths in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.errors import FailedPreconditionError

Int64Array = npt.NDArray[np.int64]
#: float8_e4m3: 4 bits of exponent, 3 of mantissa, finite up to 448.
KvDtype = Literal["float32", "bfloat16", "float8_e4m3"]

#: Offsets within it are exact in int64, and so are sums of two.
_MAX_POOL_BYTES = 1 << 62

_ITEM_SIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers whose KV has one shape and one block table."""

    first_layer: int
    num_layers: int
    #: KV heads that this rank holds, `first_kv_head` the first of them among `total_kv_heads`.
    num_kv_heads: int
    first_kv_head: int
    total_kv_heads: int
    head_dim: int
    dtype: KvDtype
    planes: tuple[str, ...] = ("k", "v")
    #: Sliding window in tokens, or None for full attention.
    window: int | None = None
    #: Byte distances; the plane's inside is contiguous.
    block_stride_bytes: int
    layer_stride_bytes: int
    plane_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The layout of one rank's pool."""

    block_size: int
    num_blocks: int
    groups: tuple[KvGroup, ...]

    @classmethod
    def block_major(
        cls,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        block_size: int = 16,
        first_kv_head: int = 0,
        total_kv_heads: int | None = None,
    ) -> KvLayout:
        """One group, all heads or a rank's slice, `[block, layer, plane, head, token, dim]`."""
        plane = num_kv_heads * block_size * head_dim * _ITEM_SIZE[dtype]
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=(
                KvGroup(
                    first_layer=0,
                    num_layers=num_layers,
                    num_kv_heads=num_kv_heads,
                    first_kv_head=first_kv_head,
                    total_kv_heads=num_kv_heads if total_kv_heads is None else total_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    block_stride_bytes=num_layers * 2 * plane,
                    layer_stride_bytes=2 * plane,
                    plane_stride_bytes=plane,
                ),
            ),
        )

    @classmethod
    def layer_major(
        cls,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        block_size: int = 16,
        first_kv_head: int = 0,
        total_kv_heads: int | None = None,
    ) -> KvLayout:
        """One group, all heads or a rank's slice, `[layer, block, plane, head, token, dim]`."""
        plane = num_kv_heads * block_size * head_dim * _ITEM_SIZE[dtype]
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=(
                KvGroup(
                    first_layer=0,
                    num_layers=num_layers,
                    num_kv_heads=num_kv_heads,
                    first_kv_head=first_kv_head,
                    total_kv_heads=num_kv_heads if total_kv_heads is None else total_kv_heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    block_stride_bytes=2 * plane,
                    layer_stride_bytes=num_blocks * 2 * plane,
                    plane_stride_bytes=plane,
                ),
            ),
        )

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Payload of one block, all layers and planes of this rank."""
        return sum(self.layer_block_bytes(group) * group.num_layers for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def token_bytes(self, group: KvGroup) -> int:
        """One token of one head of one plane: the innermost run."""
        return group.head_dim * _ITEM_SIZE[group.dtype]

    def head_bytes(self, group: KvGroup) -> int:
        """One head of one plane of one layer of one block."""
        return self.block_size * self.token_bytes(group)

    def plane_bytes(self, group: KvGroup) -> int:
        """One plane of one layer of one block: one contiguous run."""
        return group.num_kv_heads * self.head_bytes(group)

    def layer_block_bytes(self, group: KvGroup) -> int:
        """One layer of one block: what one leaf digest covers."""
        return self.plane_bytes(group) * len(group.planes)

    def group_of(self, layer: int) -> KvGroup:
        """The group of a layer of the model.

        Raises:
            ValueError: this rank does not hold the layer.
        """
        for group in self.groups:
            if group.first_layer <= layer < group.first_layer + group.num_layers:
                return group
        raise ValueError(f"layer {layer} is not in this layout")

    def plane_offset(self, block: int, layer: int, plane: int) -> int:
        """Where a plane of a layer (of the model) of a block begins, in bytes from the pool's start.

        Raises:
            ValueError: block, layer or plane is outside the pool.
        """
        group = self.group_of(layer)
        if not (0 <= block < self.num_blocks and 0 <= plane < len(group.planes)):
            raise ValueError(f"block {block}, plane {plane} is outside the pool")
        return (
            block * group.block_stride_bytes
            + (layer - group.first_layer) * group.layer_stride_bytes
            + plane * group.plane_stride_bytes
        )

    def leaf_ranges(self, block: int, layer: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of each plane of a layer of a block, in the order that its digest covers.

        Raises:
            ValueError: block or layer is outside the pool.
        """
        group = self.group_of(layer)
        starts = (self.plane_offset(block, layer, plane) for plane in range(len(group.planes)))
        return tuple((start, start + self.plane_bytes(group)) for start in starts)

    def problems(self) -> list[str]:
        """What is wrong with a layout that somebody else described: one sentence each."""
        if len(self.groups) != 1:
            return [f"groups: {len(self.groups)}, only 1 is supported"]
        (group,) = self.groups
        found = [
            f"{name}: {value} is not positive"
            for name, value in (
                ("block_size", self.block_size),
                ("num_blocks", self.num_blocks),
                ("num_layers", group.num_layers),
                ("num_kv_heads", group.num_kv_heads),
                ("head_dim", group.head_dim),
                ("planes", len(group.planes)),
            )
            if value < 1
        ]
        if group.dtype not in _ITEM_SIZE:
            found.append(f"dtype: {group.dtype} is not one of {', '.join(_ITEM_SIZE)}")
        if found:
            return found
        if not 0 <= group.first_kv_head <= group.total_kv_heads - group.num_kv_heads:
            found.append(
                f"first_kv_head: {group.first_kv_head} + {group.num_kv_heads} heads"
                f" of {group.total_kv_heads}"
            )
        end = self.plane_bytes(group)
        axes = [
            (group.plane_stride_bytes, len(group.planes), "plane_stride_bytes"),
            (group.layer_stride_bytes, group.num_layers, "layer_stride_bytes"),
            (group.block_stride_bytes, self.num_blocks, "block_stride_bytes"),
        ]
        for stride, count, name in sorted(axes):
            if count > 1:
                if stride < end:
                    found.append(f"{name}: {stride} is less than the {end} bytes it steps over")
                end += stride * (count - 1)
        if self.pool_bytes > _MAX_POOL_BYTES:
            found.append(f"pool_bytes: {self.pool_bytes} is more than {_MAX_POOL_BYTES}")
        if end > self.pool_bytes:
            found.append(f"strides: reach byte {end} of a pool of {self.pool_bytes}")
        return found

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class IncompatibleLayoutError(FailedPreconditionError):
    """No copy can turn blocks of the source layout into blocks of the target layout.

    Attributes:
        differences: `field: source value != target value`, or what is wrong with one of the two.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(f"KV layouts do not fit: {'; '.join(differences)}")
        self.differences = tuple(differences)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """What is copied for some layers of pairs of blocks, in order. Made by `CopyPlan.copies`."""

    #: int64[m, 3] of (source offset, target offset, length) in bytes from the pools' starts.
    spans: Int64Array
    #: int64[n, num layers]: the row of `spans` that completes a leaf. When rows up to and including
    #: it are copied, all planes of that (block, layer) are there and its digest can be checked.
    last_spans: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """How to copy blocks from pools of one layout to pools of another. Made by `plan`."""

    source: KvLayout
    target: KvLayout
    #: KV heads (of the model) that both hold: [first_kv_head, end_kv_head).
    first_kv_head: int
    end_kv_head: int

    @property
    def is_complete(self) -> bool:
        """Whether this source alone fills the target's blocks; else other ranks have the rest."""
        (group,) = self.target.groups
        return self.end_kv_head - self.first_kv_head == group.num_kv_heads

    def copies(
        self,
        source_block_ids: npt.ArrayLike,
        target_block_ids: npt.ArrayLike,
        first_layer: int,
        end_layer: int,
    ) -> Copies:
        """The copies for layers [first_layer, end_layer) of pairs of blocks.

        Neighbours on both sides are one span: from block-major to block-major a block's layers are
        one run, and so are blocks whose ids are consecutive on both sides.

        Args:
            source_block_ids: Integers [n].
            target_block_ids: Integers [n], all different.
            first_layer: Of the model.
            end_layer: Of the model.

        Raises:
            ValueError: numbers of ids differ, or an id or layer is outside its pool.
        """
        runs = self._runs(source_block_ids, target_block_ids, first_layer, end_layer)
        are_first = runs.are_first()
        rows = are_first.nonzero()[0]
        spans = np.empty((len(rows), 3), np.int64)
        spans[:, 0] = runs.source_starts[rows]
        spans[:, 1] = runs.target_starts[rows]
        spans[:-1, 2] = rows[1:] - rows[:-1]
        spans[-1:, 2] = len(are_first) - rows[-1:]
        span_of_run = np.arange(len(rows)).repeat(spans[:, 2])
        spans[:, 2] *= runs.length

        if runs.dimensions == (0,):
            by_block = span_of_run[:, None]
        else:
            # To [block, layer, plane], with a length of 1 for what lies within every run.
            order = np.argsort(runs.dimensions)
            absent = tuple(dimension for dimension in range(3) if dimension not in runs.dimensions)
            by_plane = np.expand_dims(span_of_run.reshape(runs.shape).transpose(order), absent)
            by_block = by_plane.max(axis=2)
        last_spans = np.empty((len(by_block), end_layer - first_layer), np.int64)
        last_spans[:] = by_block
        return Copies(spans=spans, last_spans=last_spans)

    def _runs(
        self,
        source_block_ids: npt.ArrayLike,
        target_block_ids: npt.ArrayLike,
        first_layer: int,
        end_layer: int,
    ) -> _Runs:
        (source,), (target,) = self.source.groups, self.target.groups
        from_ids = _checked_ids(source_block_ids, self.source.num_blocks, "source")
        to_ids = _checked_ids(target_block_ids, self.target.num_blocks, "target")
        if len(from_ids) != len(to_ids):
            raise ValueError(f"{len(from_ids)} source blocks for {len(to_ids)} target blocks")
        first, num_layers = first_layer - source.first_layer, end_layer - first_layer
        if not (first >= 0 and 0 <= num_layers <= source.num_layers - first):
            raise ValueError(f"layers [{first_layer}, {end_layer}) are outside the pool")

        head_bytes = self.source.head_bytes(source)
        from_base, to_base = (
            first * group.layer_stride_bytes
            + (self.first_kv_head - group.first_kv_head) * head_bytes
            for group in (source, target)
        )
        length = (self.end_kv_head - self.first_kv_head) * head_bytes
        inner = sorted(
            axis
            for axis in (
                _Axis(target.plane_stride_bytes, source.plane_stride_bytes, len(source.planes), 2),
                _Axis(target.layer_stride_bytes, source.layer_stride_bytes, num_layers, 1),
            )
            if axis.size != 1
        )
        # Inner axes without a gap on either side are part of the run, so that the arrays stay small.
        while (
            inner and inner[0].size and inner[0].target_stride == inner[0].source_stride == length
        ):
            length *= inner.pop(0).size
        # From inside out in the order of the target's memory, so that what can be one span is
        # neighbours; the new axis is put in front.
        blocks = _Axis(target.block_stride_bytes, source.block_stride_bytes, len(to_ids), 0)
        from_starts: Int64Array = np.asarray(from_base, np.int64)
        to_starts: Int64Array = np.asarray(to_base, np.int64)
        axes = sorted([*inner, blocks])
        for axis in axes:
            if axis is blocks:
                from_steps, to_steps = from_ids, to_ids
            else:
                from_steps = to_steps = np.arange(axis.size, dtype=np.int64)
            from_starts = np.add.outer(from_steps * axis.source_stride, from_starts)
            to_starts = np.add.outer(to_steps * axis.target_stride, to_starts)
        return _Runs(
            source_starts=from_starts.reshape(-1),
            target_starts=to_starts.reshape(-1),
            length=length,
            shape=to_starts.shape,
            dimensions=tuple(axis.dimension for axis in reversed(axes)),
        )


class _Axis(NamedTuple):
    """One loop of a copy; sorts by its step in the target."""

    target_stride: int
    source_stride: int
    size: int
    #: 0 block, 1 layer, 2 plane.
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Runs of one length, in copy order: int64[n] starts, an array of `shape` over `dimensions`."""

    source_starts: Int64Array
    target_starts: Int64Array
    length: int
    shape: tuple[int, ...]
    dimensions: tuple[int, ...]

    def are_first(self) -> npt.NDArray[np.bool_]:
        """bool[n]: True where a run does not go on where the one before it ends, on either side."""
        first = np.empty(len(self.target_starts), np.bool_)
        first[:1] = True
        first[1:] = self.target_starts[1:] - self.target_starts[:-1] != self.length
        first[1:] |= self.source_starts[1:] - self.source_starts[:-1] != self.length
        return first


def plan(source: KvLayout, target: KvLayout) -> CopyPlan:
    """How to fill blocks of `target` from blocks of `source`.

    Raises:
        IncompatibleLayoutError: the blocks hold different things, or no head in common, or a layout
            contradicts itself.
    """
    problems = [f"source {problem}" for problem in source.problems()]
    problems += [f"target {problem}" for problem in target.problems()]
    if problems:
        raise IncompatibleLayoutError(problems)
    (a,), (b,) = source.groups, target.groups
    differences = [
        f"{name}: {mine} != {theirs}"
        for name, mine, theirs in (
            ("block_size", source.block_size, target.block_size),
            ("dtype", a.dtype, b.dtype),
            ("head_dim", a.head_dim, b.head_dim),
            ("first_layer", a.first_layer, b.first_layer),
            ("num_layers", a.num_layers, b.num_layers),
            ("planes", ",".join(a.planes), ",".join(b.planes)),
            ("window", a.window, b.window),
            ("total_kv_heads", a.total_kv_heads, b.total_kv_heads),
        )
        if mine != theirs
    ]
    first = max(a.first_kv_head, b.first_kv_head)
    end = min(a.first_kv_head + a.num_kv_heads, b.first_kv_head + b.num_kv_heads)
    if first >= end:
        differences.append(f"kv_heads: {_heads(a)} != {_heads(b)}")
    if differences:
        raise IncompatibleLayoutError(differences)
    return CopyPlan(source=source, target=target, first_kv_head=first, end_kv_head=end)


def _heads(group: KvGroup) -> str:
    return f"[{group.first_kv_head}, {group.first_kv_head + group.num_kv_heads})"


def _checked_ids(block_ids: npt.ArrayLike, num_blocks: int, side: str) -> Int64Array:
    ids: Int64Array = np.asarray(block_ids, dtype=np.int64)
    # As unsigned, what is negative is too large as well.
    if np.count_nonzero(ids.view(np.uint64) >= num_blocks):
        raise ValueError(f"a {side} block id is outside [0, {num_blocks})")
    return ids
