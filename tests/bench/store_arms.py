"""One end of one arm of bench_store.py, as a process: `store_arms.py ARM SETTINGS`.

It owns a pool of objects, does what each line of standard input says, and answers with one line: the
seconds that each batch took, and the digests of the objects. What is not the arm's own work (new
contents, wiping, checking) is done while no clock runs.

Each epoch has contents of its own, so that nothing of the last one passes for it; keys carry the epoch.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import uvloop
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.config.process import WorkerConfig
from moonpool.config.schema import TelemetrySettings
from moonpool.handoff.messages import SourceRef
from moonpool.ids import BlockHash, BlockId, Incarnation, WorkerId, WorkerKey
from moonpool.rpc.admin import clear_cache
from moonpool.service.life import running
from moonpool.service.log import setup_logging
from support.pool_node import DEADLINE_S, PoolNode, View

ByteArray = npt.NDArray[np.uint8]
Settings = dict[str, Any]

#: Every page of an object bears the epoch's mark.
PAGE_WORDS = 512


class Arm(Protocol):
    """A writer or a reader. An object has a key, and lies in a slot of the pool."""

    @property
    def pool(self) -> ByteArray:
        """uint8[num_objects, object_bytes]: what is put, and where most arms get to."""
        ...

    def contents_changed(self) -> None:
        """The pool holds an epoch's objects; not timed."""
        ...

    async def put(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        """Returns when the store has all of them."""
        ...

    async def get(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        """Returns when the bytes of all of them are in this process."""
        ...

    def got(self, slot: int) -> ByteArray | bytes:
        """What the last `get` brought."""
        ...

    async def let_go(self) -> None:
        """What was got has been looked at."""
        ...

    async def clear(self) -> None:
        """Have the store forget everything."""
        ...


class RedisArm:
    """redis.asyncio with hiredis: a pipeline of SETs, one MGET. What it gets are bytes objects."""

    def __init__(self, settings: Settings, client: Any) -> None:
        self.pool = make_pool(settings)
        self._client = client
        self._got: dict[int, bytes] = {}

    def contents_changed(self) -> None:
        pass

    async def put(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, slot in zip(keys, slots, strict=True):
            pipeline.set(key, memoryview(self.pool[slot]))
        assert all(await pipeline.execute())

    async def get(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        self._got = dict(zip(slots, await self._client.mget(keys), strict=True))

    def got(self, slot: int) -> ByteArray | bytes:
        return self._got[slot]

    async def let_go(self) -> None:
        self._got = {}

    async def clear(self) -> None:
        await self._client.flushall()


class MooncakeArm:
    """A client without memory for others: batch_put_from and batch_get_into a registered pool."""

    def __init__(self, settings: Settings) -> None:
        self.pool = make_pool(settings)
        self._store = mooncake_client(settings, segment_bytes=0)
        assert self._store.register_buffer(self.pool.ctypes.data, self.pool.nbytes) == 0

    def contents_changed(self) -> None:
        pass

    async def put(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        statuses = self._store.batch_put_from(list(keys), *self._places(slots))
        assert not any(statuses), statuses

    async def get(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        sizes = self._store.batch_get_into(list(keys), *self._places(slots))
        assert all(size == self.pool.shape[1] for size in sizes), sizes

    def got(self, slot: int) -> ByteArray | bytes:
        return self.pool[slot]

    async def let_go(self) -> None:
        pass

    async def clear(self) -> None:
        assert self._store.remove_all(True) == len(self.pool)

    def _places(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        size = self.pool.shape[1]
        return [self.pool.ctypes.data + slot * size for slot in slots], [size] * len(slots)


class MoonpoolArm:
    """A worker's pool and service; a batch is a chain of blocks."""

    def __init__(self, settings: Settings, node: PoolNode) -> None:
        layout = node.memory.layout
        self.pool = node.memory.pool.bytes.reshape(layout.num_blocks, layout.block_bytes)
        assert self.pool.shape == (settings["num_objects"], settings["object_bytes"])
        self.node = node
        key = WorkerKey(WorkerId(settings["store_id"]), Incarnation(settings["incarnation"]))
        self.store = SourceRef(key=key, address=settings["address"])

    def contents_changed(self) -> None:
        self.node.write_leaves(len(self.pool))

    async def put(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        await self.node.put(self.store, hashes_of(keys), [BlockId(slot) for slot in slots])

    async def get(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        await self.node.get(self.store, hashes_of(keys), [BlockId(slot) for slot in slots])

    def got(self, slot: int) -> ByteArray | bytes:
        return self.pool[slot]

    async def let_go(self) -> None:
        pass

    async def clear(self) -> None:
        key = self.node.parts.secret.rpc_key
        await clear_cache(self.store.address, key=key, deadline_s=DEADLINE_S)


class MoonpoolViewArm(MoonpoolArm):
    """Its `get` copies nothing: the objects are where the store has them, lent and read-only."""

    _view: View | None = None

    async def get(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        self._view = await self.node.view(self.store, hashes_of(keys))
        self._slots = list(slots)

    def got(self, slot: int) -> ByteArray | bytes:
        assert self._view is not None
        block = self._view.blocks[self._view.block_ids[self._slots.index(slot)]]
        assert not block.flags.writeable
        return block

    async def let_go(self) -> None:
        if self._view is not None:
            await self._view.close()
            self._view = None


def make_pool(settings: Settings) -> ByteArray:
    """Touched memory for all objects."""
    pool = np.empty((settings["num_objects"], settings["object_bytes"]), np.uint8)
    pool[:] = 1
    return pool


def fill(pool: ByteArray, epoch: int) -> None:
    """The objects of an epoch: random bytes that lie there from the first on, and marks in each page."""
    words = pool.view(np.uint64)
    if epoch == 0:
        words[:] = np.random.default_rng(0).integers(0, 2**64, words.shape, np.uint64)
    marks = words[:, ::PAGE_WORDS]
    marks[:] = np.random.default_rng(1 + epoch).integers(0, 2**64, marks.shape, np.uint64)


def hashes_of(keys: Sequence[str]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(hashlib.sha256(key.encode()).digest()) for key in keys)


def mooncake_client(settings: Settings, *, segment_bytes: int) -> Any:
    """A client of the master, over TCP."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", settings["master"]
    )
    assert status == 0, status
    return store


@asynccontextmanager
async def make_arm(name: str, settings: Settings) -> AsyncIterator[Arm]:
    match name:
        case "redis":
            import redis.asyncio

            async with redis.asyncio.from_url(settings["url"]) as client:
                yield RedisArm(settings, client)
        case "mooncake":
            yield MooncakeArm(settings)
        case "moonpool" | "view":
            node = PoolNode(WorkerConfig.model_validate_json(settings["worker"]))
            async with running(node):
                if name == "moonpool":
                    yield MoonpoolArm(settings, node)
                    return
                view = MoonpoolViewArm(settings, node)
                await node.map_arena(view.store)
                yield view
        case _:
            raise AssertionError(name)


class Session:
    """Does what the parent says, and says how long it took."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm

    async def obey(self, order: dict[str, Any]) -> dict[str, object]:
        if order["do"] == "clear":
            await self._arm.clear()
            return {}
        epoch, size = order["epoch"], order["batch"]
        slots = range(len(self._arm.pool))
        batches = [slots[first : first + size] for first in range(0, len(slots), size)]
        do = {"put": self._put, "get": self._get}[order["do"]]
        return await do(
            [([f"{epoch}-{size}-{slot}" for slot in one], one) for one in batches], epoch
        )

    async def _put(self, batches: list[tuple[list[str], range]], epoch: int) -> dict[str, object]:
        arm = self._arm
        fill(arm.pool, epoch)
        arm.contents_changed()
        taken = [await timed(arm.put, keys, slots) for keys, slots in batches]
        return answer_of(taken, [digest(one) for one in arm.pool])

    async def _get(self, batches: list[tuple[list[str], range]], epoch: int) -> dict[str, object]:
        arm = self._arm
        arm.pool[:] = 0
        taken, digests = [], []
        for keys, slots in batches:
            taken.append(await timed(arm.get, keys, slots))
            digests += [digest(arm.got(slot)) for slot in slots]
            await arm.let_go()
        return answer_of(taken, digests)


async def timed(
    work: Callable[[Sequence[str], Sequence[int]], Awaitable[None]],
    keys: Sequence[str],
    slots: Sequence[int],
) -> tuple[float, float]:
    """Seconds, and of this process's CPU time."""
    started, cpu_started = time.perf_counter(), time.process_time()
    await work(keys, slots)
    return time.perf_counter() - started, time.process_time() - cpu_started


def answer_of(taken: list[tuple[float, float]], digests: list[str]) -> dict[str, object]:
    return {
        "seconds": [seconds for seconds, _ in taken],
        "cpu_seconds": sum(cpu_seconds for _, cpu_seconds in taken),
        "digests": digests,
    }


def digest(data: ByteArray | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


async def serve(name: str, settings: Settings, answer: Callable[[object], None]) -> None:
    async with make_arm(name, settings) as arm:
        # As our services do, and for every arm: a full collection would be somebody's p99.
        gc.collect()
        gc.freeze()
        answer({"ready": True})
        session = Session(arm)
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer(await session.obey(json.loads(line)))


def main() -> None:
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    # Some arms' libraries print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup_logging(TelemetrySettings(), process_name=name)

    def answer(what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if name == "mooncake-segment":
        store = mooncake_client(settings, segment_bytes=settings["segment_bytes"])
        answer({"ready": True})
        sys.stdin.read()
        store.close()
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(name, settings, answer))


if __name__ == "__main__":
    main()
