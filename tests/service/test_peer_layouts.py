"""Peers whose pools are laid out in another way: read if a copy can convert their blocks, else refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from moonpool.config.secret import load_or_create_secret
from moonpool.kv.layout import IncompatibleLayoutError, KvLayout, plan
from moonpool.kv.region import KvRegion
from moonpool.transport.base import KvPeer, KvRead, ReadResult
from moonpool.transport.select import TransportSelector
from moonpool.worker.peer_connector import PeerConnector
from moonpool.worker.peers import Peer
from support.router_client import RouterClient
from support.worker_pair import fake_workers
from support.workers import RunningWorker

#: Every worker's of fake_workers, but for the number of blocks.
SHAPE = {"num_layers": 4, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}


class Reached:
    """A Transport to everybody, over which nothing is read; its own peer."""

    name = "reached"
    unusable = None
    is_lost = False

    def __init__(self) -> None:
        self.region: KvRegion

    def announce(self, region: KvRegion) -> KvRegion:
        return region

    def why_not(self, region: KvRegion) -> str | None:
        return None

    async def connect(self, region: KvRegion, *, timeout_s: float) -> KvPeer:
        self.region = region
        return self

    async def read(self, read: KvRead, *, timeout_s: float) -> ReadResult:
        raise AssertionError("nothing is read here")

    async def close(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return


async def connected(worker: RunningWorker, router: RouterClient, ours: KvLayout) -> Peer:
    """The worker as a peer of one with such a pool."""
    assert router.hello is not None
    own_region = replace(router.hello.regions[0], layout=ours)
    connector = PeerConnector(
        hello=replace(router.hello, regions=(own_region,)),
        layout=ours,
        selector=TransportSelector([Reached()]),
        rpc_key=load_or_create_secret(worker.config.common.data_dir).rpc_key,
    )
    return await connector(router.source)


async def test_blocks_in_another_order_are_converted(tmp_path: Path) -> None:
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("h0")
        assert router.hello is not None
        theirs = router.hello.regions[0].layout
        for ours in (theirs, KvLayout.layer_major(num_blocks=32, **SHAPE)):
            peer = await connected(worker, router, ours)
            try:
                assert peer.plan == plan(theirs, ours)
                assert peer.plan.is_complete
                # One run for all layers of a block, or one for each.
                num_runs = len(peer.plan.copies([3], [5], 0, 4).spans)
                assert num_runs == (1 if ours == theirs else 4)
            finally:
                await peer.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 3}, "num_layers: 4 != 3"),
        ({"head_dim": 4}, "head_dim: 2 != 4"),
        ({"dtype": "bfloat16"}, "dtype: float32 != bfloat16"),
        ({"num_kv_heads": 2}, "total_kv_heads: 1 != 2"),
    ],
)
async def test_blocks_that_hold_something_else_are_refused_in_the_plans_words(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    ours = KvLayout.block_major(num_blocks=32, **{**SHAPE, **change})
    async with fake_workers(tmp_path) as workers:
        worker, router = await workers.start("h0")
        assert router.hello is not None
        with pytest.raises(IncompatibleLayoutError, match=words) as told:
            await connected(worker, router, ours)
        with pytest.raises(IncompatibleLayoutError) as expected:
            plan(router.hello.regions[0].layout, ours)
        assert told.value.message == expected.value.message
