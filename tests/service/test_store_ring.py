"""Two store nodes on one Redis: one leaves and the other has what it held; Redis comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from moonpool.bus.memory import MemoryBus
from moonpool.config.secret import load_or_create_secret
from moonpool.core.protocol import TokensReady
from moonpool.ids import BlockHash
from moonpool.inference.request import InferenceRequest
from moonpool.kv.block_hash import hash_blocks
from moonpool.kv.namespace_seeds import NamespaceSeeds
from moonpool.wire.store import PutAnswer
from support.eventually import eventually
from support.redis_server import RedisServer, redis_server
from support.requests import make_request
from support.router_client import RouterClient
from support.stores import RunningStore, running_store, store_config
from support.worker_pair import Workers, expected_answer, fake_workers

#: 12 blocks and a bit; the next turn of the same chat.
FIRST = make_request("r1", prompt=range(200), max_tokens=3, ignore_eos=True)
SECOND = make_request("r2", prompt=[*range(192), *range(7, 40)], max_tokens=5, ignore_eos=True)
NUM_SHARED = 192
NUM_BLOCKS = 12
_DEADLINE_S = 30.0


class Ring:
    """Stores of one cluster that find each other on Redis, and workers. Made by `ring`."""

    def __init__(
        self, path: Path, server: RedisServer, workers: Workers, stack: AsyncExitStack
    ) -> None:
        self._path = path
        self._server = server
        self._workers = workers
        self._stack = stack
        self._started: dict[RunningStore, AsyncExitStack] = {}

    async def store(self, store_id: str, **settings: Any) -> RunningStore:
        settings = {"redis_url": self._server.url} | settings
        config = store_config(self._path, self._path / "model", store_id, **settings)
        stack = await self._stack.enter_async_context(AsyncExitStack())
        store = await stack.enter_async_context(
            running_store(config, MemoryBus(self._workers.broker))
        )
        self._started[store] = stack
        return store

    async def stop(self, store: RunningStore) -> None:
        await self._started.pop(store).aclose()

    async def worker(self, worker_id: str) -> RouterClient:
        settings: dict[str, Any] = {"kv_offload": False, "kv_peer_reads": "always"}
        _, client = await self._workers.start(worker_id, **settings)
        return client

    def chain(self, store: RunningStore) -> tuple[BlockHash, ...]:
        """The first blocks of FIRST and SECOND."""
        secret = load_or_create_secret(self._path)
        seed = NamespaceSeeds(store.service.shell.hello.namespace, secret.value)(FIRST)
        return tuple(hash_blocks(seed, FIRST.prompt_token_ids[:NUM_SHARED], 16))

    async def put(self, store: RunningStore, source: RouterClient) -> None:
        """The store takes what this worker has computed of FIRST."""
        answered = await store.offer(self.chain(store), source.source)
        assert answered == PutAnswer(num_wanted_blocks=NUM_BLOCKS)
        await until_it_has(store, NUM_BLOCKS)


@contextlib.asynccontextmanager
async def ring(path: Path, server: RedisServer) -> AsyncIterator[Ring]:
    async with (
        asyncio.timeout(_DEADLINE_S),
        fake_workers(path) as workers,
        AsyncExitStack() as stack,
    ):
        yield Ring(path, server, workers, stack)


async def answer(client: RouterClient, request: InferenceRequest, **options: Any) -> TokensReady:
    """Have it answered, as it must be; the first report."""
    client.decode(request, **options)
    assert await client.answer(request) == expected_answer(request)
    first = await client.until(request, TokensReady)
    assert isinstance(first, TokensReady)
    return first


async def until_it_has(store: RunningStore, num_blocks: int, *, on_disk: bool = False) -> None:
    async def has_it() -> bool:
        stats = (await store.report()).stats
        return (stats.num_disk_blocks if on_disk else stats.num_host_blocks) == num_blocks

    await eventually(has_it, timeout_s=_DEADLINE_S, what=f"{num_blocks} blocks")


async def until_it_knows(store: RunningStore, num_others: int) -> None:
    await eventually(
        lambda: store.service.num_neighbours == num_others,
        timeout_s=_DEADLINE_S,
        what=f"{num_others} other nodes",
    )


async def test_what_a_leaving_node_held_is_read_from_the_other(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with ring(tmp_path, server) as cluster:
            leaving, staying = await cluster.store("store-0"), await cluster.store("store-1")
            for store in (leaving, staying):
                await until_it_knows(store, 1)
            worker = await cluster.worker("w0")
            await answer(worker, FIRST)
            await cluster.put(leaving, worker)

            await cluster.stop(leaving)
            await until_it_has(staying, NUM_BLOCKS)
            await staying.until_quiet()
            await until_it_knows(staying, 0)
            reader = await cluster.worker("r0")
            first = await answer(reader, SECOND, peer=staying.peer(NUM_SHARED))
            assert (first.num_cached_tokens, first.num_peer_tokens) == (NUM_SHARED, NUM_SHARED)


async def test_what_lay_on_disk_when_a_node_started_is_left_to_the_other(tmp_path: Path) -> None:
    disk = {"ssd_dir": tmp_path / "ssd"}
    disk["ssd_dir"].mkdir()
    with redis_server(tmp_path) as server:
        async with ring(tmp_path, server) as cluster:
            alone = await cluster.store("store-0", **disk)
            worker = await cluster.worker("w0")
            await answer(worker, FIRST)
            await cluster.put(alone, worker)
            await until_it_has(alone, NUM_BLOCKS, on_disk=True)
            await cluster.stop(alone)

            # Nobody reads of it before it leaves.
            leaving = await cluster.store("store-0", **disk)
            staying = await cluster.store("store-1")
            for store in (leaving, staying):
                await until_it_knows(store, 1)
            await cluster.stop(leaving)
            await until_it_has(staying, NUM_BLOCKS)


async def test_stores_serve_while_redis_is_away_and_meet_again(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        async with ring(tmp_path, server) as cluster:
            # It is not there yet. In the end all of them leave: nobody is to wait for the others.
            in_haste = {"drain_timeout_s": 0.0}
            one = await cluster.store("store-0", **in_haste)
            other = await cluster.store("store-1", **in_haste)
            worker = await cluster.worker("w0")
            await answer(worker, FIRST)
            await cluster.put(one, worker)

            server.start()
            for store in (one, other):
                await until_it_knows(store, 1)
            server.kill()
            reader = await cluster.worker("r0")
            first = await answer(reader, SECOND, peer=one.peer(NUM_SHARED))
            assert first.num_peer_tokens == NUM_SHARED
            await cluster.put(other, worker)

            # It comes back empty.
            server.start()
            third = await cluster.store("store-2", **in_haste)
            for store in (one, other, third):
                await until_it_knows(store, 2)
    finally:
        server.kill()
