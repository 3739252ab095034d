"""What a reader on the store's host gets: blocks where they lie, lent and read-only, or a verified copy."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from moonpool.bus.memory import MemoryBroker, MemoryBus
from moonpool.handoff.messages import SourceRef
from moonpool.ids import BlockHash, BlockId
from moonpool.service.life import running
from support.eventually import eventually
from support.pool_node import PoolNode
from support.stores import RunningStore, running_store, store_config
from support.thread_engine import write_fake_model
from support.workers import worker_config

NUM_BLOCKS = 8


def hashes(name: str) -> tuple[BlockHash, ...]:
    """A chain of as many blocks as a node has."""
    return tuple(
        BlockHash(hashlib.sha256(f"{name} {index}".encode()).digest())
        for index in range(NUM_BLOCKS)
    )


BLOCKS = tuple(map(BlockId, range(NUM_BLOCKS)))


@contextlib.asynccontextmanager
async def pool_node(path: Path, model: Path, worker_id: str) -> AsyncIterator[PoolNode]:
    node = PoolNode(
        worker_config(path, model, worker_id, num_blocks=NUM_BLOCKS, transports=("shm",))
    )
    async with running(node):
        yield node


@contextlib.asynccontextmanager
async def store_of(path: Path, model: Path) -> AsyncIterator[tuple[RunningStore, SourceRef]]:
    """With room for eight chains."""
    config = store_config(path, model)
    async with running_store(config, MemoryBus(MemoryBroker())) as store:
        yield store, SourceRef(key=store.key, address=store.address)


def fill(node: PoolNode, seed: int) -> None:
    data = node.memory.pool.bytes
    data[:] = np.random.default_rng(seed).integers(0, 256, data.shape, np.uint8)
    node.write_leaves(NUM_BLOCKS)


async def test_a_copy_is_what_was_put(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "model")
    async with (
        store_of(tmp_path, model) as (store, ref),
        pool_node(tmp_path, model, "writer") as writer,
        pool_node(tmp_path, model, "reader") as reader,
    ):
        fill(writer, 1)
        await writer.put(ref, hashes("a"), BLOCKS)
        await reader.get(ref, hashes("a"), tuple(reversed(BLOCKS)))
        shape = (NUM_BLOCKS, -1)
        put, got = (node.memory.pool.bytes.reshape(shape) for node in (writer, reader))
        assert np.array_equal(got[::-1], put)
        await store.until_quiet()


async def test_a_view_is_read_only_and_stays_while_it_is_lent(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "model")
    async with (
        store_of(tmp_path, model) as (store, ref),
        pool_node(tmp_path, model, "writer") as writer,
        pool_node(tmp_path, model, "reader") as reader,
    ):
        fill(writer, 1)
        first = writer.memory.pool.bytes.reshape(NUM_BLOCKS, -1).copy()
        await writer.put(ref, hashes("a"), BLOCKS)
        await reader.map_arena(ref)
        view = await reader.view(ref, hashes("a"))
        assert not view.blocks.flags.writeable
        assert np.array_equal(view.blocks[list(view.block_ids)], first)

        # More than there is room for: what is lent does not go for it.
        num_total = (await store.report()).num_total_blocks
        for number in range(2 * num_total // NUM_BLOCKS):
            fill(writer, 2 + number)
            await writer.put(ref, hashes(f"b{number}"), BLOCKS)
        assert (await store.report()).stats.num_evicted_blocks
        assert np.array_equal(view.blocks[list(view.block_ids)], first)
        await view.close()

        async def is_returned() -> bool:
            return (await store.ledger()).is_quiet

        await eventually(is_returned, timeout_s=10.0, what="the lease has ended")
