"""RadixTree: which blocks can be found by their hash chain, and which of them may go.

A compressed tree: a node holds a run of blocks, children branch where chains part.

            root
             |  h0 h1 h2          blocks 7 8 9
            / \\
    h3 h4  .   .  h3' h4' h5'     children are keyed by the first hash of their run

Rules
- A hash names its whole prefix (kv/block_hash.py), so two runs that agree in one place agree in all
  places before it. A run is compared by its last hash; where runs part is found by bisection.
- A block is locked while the pool counts a reference to it. A locked block is never evicted. Locking
  does not touch the tree: eviction looks at the pool when it comes to it.
- Ancestors outlive descendants: the tree is closed under prefixes, so what match_prefix finds is
  complete from the chain's start.
- Leaves go first, from the tail of their run block by block, in the order of the eviction policy.
- Every unlocked block can be evicted. Usually a chain is locked from its start, and an unlocked
  block has only unlocked descendants. But a request that computed a block which was cached under
  another id meanwhile keeps its own copy private and hangs its next blocks below the cached one, and
  that one may lose its last reference first. When no leaf is left to evict, such a block is cut out
  with everything below it; the locked blocks below stay with their holders, no longer findable.

Life of a block here: insert (locked by its owner) -> unlock, lock again by the pool, ... -> evicted.

Runs are not joined again when a branch is evicted: that would cost a pass over the run, and a match
costs one step per node. No clock: ticks are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.ids import BlockHash, BlockId
from moonpool.kv.block_pool import BlockPool
from moonpool.kv.events import CacheEventLog
from moonpool.kv.eviction import EvictionPolicy
from moonpool.kv.leaf_queue import LeafQueue


class _Node:
    __slots__ = ("block_ids", "children", "hashes", "parent")

    def __init__(
        self, hashes: list[BlockHash], block_ids: list[BlockId], parent: _Node | None
    ) -> None:
        self.hashes = hashes
        self.block_ids = block_ids
        self.parent = parent
        #: By the first hash of the child's run.
        self.children: dict[BlockHash, _Node] = {}


class RadixTree:
    """Blocks of one pool, found by hash chain.

    Args:
        pool: Owns the reference counts; the tree only reads them.
        eviction: The order in which unlocked leaves go.
        events: Is told what can be found and what no longer can.
    """

    def __init__(self, pool: BlockPool, eviction: EvictionPolicy, events: CacheEventLog) -> None:
        self._pool = pool
        self._eviction = eviction
        self._events = events
        self._root = _Node([], [], None)
        #: By block id: the node whose run holds it, None if it is not in the tree.
        self._node_by_block: list[_Node | None] = [None] * pool.num_total
        #: Holds every leaf whose last block is unlocked, in the segment of that block. An entry may be
        #: out of date: too low a priority, or not such a leaf any more.
        self._leaves: LeafQueue[_Node] = LeafQueue(eviction.num_segments)
        #: Holds every node with an unlocked block, least recently unlocked first (and maybe others).
        self._unlocked: dict[_Node, None] = {}
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def __contains__(self, block_id: BlockId) -> bool:
        return self._node_by_block[block_id] is not None

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest prefix of the chain that can be found. Changes nothing."""
        return self._walk(hashes)[2]

    def insert(self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Make the chain findable; returns the block that stands for each hash.

        A hash that is there already keeps its block. The others take theirs from `block_ids`.

        Raises:
            ValueError: lengths differ, or a block to be added is not referenced, is in the tree
                already or occurs twice. Nothing is changed.
        """
        if len(hashes) != len(block_ids):
            raise ValueError(f"{len(hashes)} hashes for {len(block_ids)} blocks")
        node, offset, canonical = self._walk(hashes)
        depth = len(canonical)
        if depth == len(hashes):
            return canonical
        new_hashes = list(hashes[depth:])
        new_block_ids = list(block_ids[depth:])
        if len(set(new_block_ids)) != len(new_block_ids):
            raise ValueError(f"a block occurs twice: {new_block_ids}")
        if not self._pool.are_referenced(new_block_ids):
            raise ValueError(f"a block is not referenced: {new_block_ids}")
        if any(map(self._node_by_block.__getitem__, new_block_ids)):
            raise ValueError(f"a block stands for another hash: {new_block_ids}")
        if offset < len(node.hashes):
            node = self._split(node, offset)
        if node is self._root or node.children:
            child = _Node(new_hashes, new_block_ids, node)
            node.children[new_hashes[0]] = child
            node = child
        else:
            node.hashes += new_hashes
            node.block_ids += new_block_ids
        for block_id in new_block_ids:
            self._node_by_block[block_id] = node
        self._num_blocks += len(new_block_ids)
        self._eviction.on_stored(new_block_ids, new_hashes)
        self._events.on_stored(new_hashes, hashes[depth - 1] if depth else None)
        return canonical + new_block_ids

    def cached(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Those that are in the tree."""
        return [block_id for block_id in block_ids if self._node_by_block[block_id] is not None]

    def unlock(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """These blocks have just lost their last reference; returns those that are not in the tree.

        Whoever used them has told the policy before.
        """
        nodes = list(map(self._node_by_block.__getitem__, block_ids))
        private: list[BlockId] = []
        distinct = dict.fromkeys(nodes)
        if None in distinct:
            del distinct[None]
            private = [
                block_id for block_id, node in zip(block_ids, nodes, strict=True) if node is None
            ]
        for node in distinct:
            assert node is not None
            self._unlocked.pop(node, None)
            self._unlocked[node] = None
            self._queue_if_evictable(node)
        return private

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Remove at least `num_blocks` unlocked blocks; returns the removed ones, still idle.

        O(log nodes) a block. More than asked for go only when a branch has to be cut.

        Raises:
            ValueError: fewer are unlocked. Nothing is changed.
        """
        if num_blocks > self._pool.num_idle:
            raise ValueError(f"evict {num_blocks} of {self._pool.num_idle} unlocked blocks")
        evicted: list[BlockId] = []
        while len(evicted) < num_blocks:
            turn = self._eviction.turn()
            leaf = self._pop_leaf(turn.segments)
            if leaf is not None:
                evicted += self._trim(leaf, min(num_blocks - len(evicted), turn.num_blocks))
            else:
                evicted += self._cut()
        return evicted

    def forget(self, first_hash: BlockHash) -> list[BlockId]:
        """Remove the block that begins a chain with this hash, and all below it, locked or not.

        Returns the removed ones that are idle. O(blocks removed).
        """
        node = self._root.children.get(first_hash)
        return [] if node is None else self._remove_below(node, 0)

    def items(self) -> Iterator[tuple[BlockHash, BlockId]]:
        """Every block of the tree with its hash, parents before children."""
        nodes = [self._root]
        for node in nodes:
            yield from zip(node.hashes, node.block_ids, strict=True)
            nodes.extend(node.children.values())

    # -- finding --

    def _walk(self, hashes: Sequence[BlockHash]) -> tuple[_Node, int, list[BlockId]]:
        """The last node on the chain's path, how much of its run is on it, and the path's blocks."""
        node, offset = self._root, 0
        matched: list[BlockId] = []
        while offset == len(node.hashes) and len(matched) < len(hashes):
            child = node.children.get(hashes[len(matched)])
            if child is None:
                break
            node, offset = child, _common_length(child.hashes, hashes, len(matched))
            matched += node.block_ids[:offset]
        return node, offset, matched

    def _split(self, node: _Node, offset: int) -> _Node:
        """Part a run before `offset`; the new node takes the head, the old one keeps the tail."""
        parent = node.parent
        assert parent is not None
        assert 0 < offset < len(node.hashes), (offset, len(node.hashes))
        head = _Node(node.hashes[:offset], node.block_ids[:offset], parent)
        parent.children[head.hashes[0]] = head
        del node.hashes[:offset], node.block_ids[:offset]
        node.parent = head
        head.children[node.hashes[0]] = node
        for block_id in head.block_ids:
            self._node_by_block[block_id] = head
        if node in self._unlocked:
            self._unlocked[head] = None
        return head

    # -- evicting --

    def _is_evictable(self, node: _Node) -> bool:
        return (
            not node.children and node is not self._root and self._pool.is_idle(node.block_ids[-1])
        )

    def _queue_if_evictable(self, node: _Node) -> None:
        if self._is_evictable(node):
            block_id = node.block_ids[-1]
            segment = self._eviction.segment(block_id)
            if self._leaves.segment(node) != segment:
                self._leaves.put(node, segment, self._eviction.priority(block_id))

    def _pop_leaf(self, segments: Sequence[int]) -> _Node | None:
        """Take the evictable leaf of the smallest priority off the first segment that has one."""
        for segment in segments:
            while (found := self._leaves.pop(segment)) is not None:
                priority, node = found
                if self._is_evictable(node):
                    block_id = node.block_ids[-1]
                    is_here = self._eviction.segment(block_id) == segment
                    if is_here and self._eviction.priority(block_id) == priority:
                        return node
                    self._queue_if_evictable(node)
        return None

    def _trim(self, leaf: _Node, num_blocks: int) -> list[BlockId]:
        """Remove up to `num_blocks` unlocked blocks from the leaf's tail, as long as it is its turn."""
        is_idle, priority = self._pool.is_idle, self._eviction.priority
        block_ids = leaf.block_ids
        segment = self._eviction.segment(block_ids[-1])
        keep = len(block_ids) - 1
        stop = max(0, len(block_ids) - num_blocks)
        # The next leaf's turn comes after this priority (or later: its entry may be too low).
        limit = self._leaves.first_priority(segment)
        while keep > stop and is_idle(block_ids[keep - 1]):
            if self._eviction.segment(block_ids[keep - 1]) != segment:
                break
            if limit is not None and priority(block_ids[keep - 1]) > limit:
                break
            keep -= 1
        parent = leaf.parent
        assert parent is not None
        removed = self._remove_tail(leaf, keep)
        self._queue_if_evictable(leaf if keep else parent)
        return removed

    def _cut(self) -> list[BlockId]:
        """Remove an unlocked block that has locked blocks below it, and all that is below it."""
        while True:
            node = next(iter(self._unlocked))
            for offset in reversed(range(len(node.block_ids))):
                if self._pool.is_idle(node.block_ids[offset]):
                    return self._remove_below(node, offset)
            del self._unlocked[node]

    def _remove_below(self, node: _Node, offset: int) -> list[BlockId]:
        parent = node.parent
        assert parent is not None
        subtree = [node]
        for ancestor in subtree:
            subtree.extend(ancestor.children.values())
        removed: list[BlockId] = []
        for descendant in reversed(subtree[1:]):
            removed += self._remove_tail(descendant, 0)
        removed += self._remove_tail(node, offset)
        self._queue_if_evictable(node if offset else parent)
        return [block_id for block_id in removed if self._pool.is_idle(block_id)]

    def _remove_tail(self, node: _Node, keep: int) -> list[BlockId]:
        """Shorten a childless node's run to `keep` blocks; with none left the node goes too."""
        assert not node.children
        first_hash = node.hashes[0]
        removed = node.block_ids[: keep - 1 if keep else None : -1]
        removed_hashes = node.hashes[: keep - 1 if keep else None : -1]
        self._events.on_removed(removed_hashes)
        self._eviction.on_removed(removed, removed_hashes)
        del node.hashes[keep:], node.block_ids[keep:]
        for block_id in removed:
            self._node_by_block[block_id] = None
        self._num_blocks -= len(removed)
        if not keep:
            parent = node.parent
            assert parent is not None
            del parent.children[first_hash]
            self._unlocked.pop(node, None)
            self._leaves.drop(node)
        return removed

    # -- checking --

    def validate(self) -> None:
        """Raise AssertionError if the tree contradicts itself or the pool."""
        found: dict[BlockId, _Node] = {}
        hashes: set[BlockHash] = set()
        self._leaves.validate()
        assert not self._root.hashes
        assert not self._root.block_ids
        nodes = [self._root]
        for node in nodes:
            assert len(node.hashes) == len(node.block_ids)
            assert node.block_ids or node is self._root, "an empty run"
            for first_hash, child in node.children.items():
                assert child.parent is node
                assert child.hashes[0] == first_hash
                nodes.append(child)
            for block_id, block_hash in zip(node.block_ids, node.hashes, strict=True):
                assert block_id not in found, f"block {block_id} is in two places"
                assert block_hash not in hashes, f"hash {block_hash.hex()} is in two places"
                found[block_id] = node
                hashes.add(block_hash)
                assert not self._pool.is_free(block_id), f"free block {block_id} is cached"
            if self._is_evictable(node):
                segment = self._eviction.segment(node.block_ids[-1])
                assert self._leaves.segment(node) == segment, "an evictable leaf is forgotten"
            is_unlocked = any(self._pool.is_idle(block_id) for block_id in node.block_ids)
            assert node in self._unlocked or not is_unlocked, "an unlocked block is forgotten"
        assert set(self._leaves) <= set(nodes), "a removed node is queued"
        assert set(self._unlocked) <= set(nodes), "a removed node is kept"
        assert len(found) == self._num_blocks, (len(found), self._num_blocks)
        for index, holder in enumerate(self._node_by_block):
            assert found.get(BlockId(index)) is holder, f"block {index} maps to a wrong node"


def _common_length(run: list[BlockHash], hashes: Sequence[BlockHash], start: int) -> int:
    """How many hashes of `run` are those of the chain from `start` on; the first is known to be."""
    low, high = 1, min(len(run), len(hashes) - start)
    if run[high - 1] == hashes[start + high - 1]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if run[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
