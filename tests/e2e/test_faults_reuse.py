"""Faults of prefix reads, of the router's index and of two routers, in a cluster of real processes.

One cluster lives through all of it, in the order of this file: each life of the worker that dies is armed
for the next scenario. Tokens must be those of the model alone; afterwards every ledger is quiet, each
router's index is true, and nothing is left behind. Last, one tenant's blocks are poisoned in that cluster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from moonpool.config.secret import load_or_create_secret
from moonpool.core.protocol import TokensReady
from moonpool.handoff.messages import PeerPrefix
from moonpool.rpc.admin import clear_cache
from moonpool_loadtest.faults.lab import FamilySizes, FaultLab, FaultReport, make_families
from moonpool_loadtest.faults.reuse import (
    FAILPOINTS,
    LEFT,
    NUM_FAMILIES,
    NUM_FAMILIES_FOR_LEAVERS,
    RIGHT,
    SCENARIOS,
    reuse_config,
)
from support.fault_lab import check, fault_lab
from support.poison import poison_pool
from support.requests import make_request
from support.router_client import RouterClient
from support.tiny_llama import TinyLlama, write_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_MODEL = TinyLlama()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultLab]:
    home = tmp_path_factory.mktemp("faults-reuse")
    model = write_tiny_llama(home / "tiny", _MODEL)
    config = reuse_config(str(model), data_dir=home / "data", dtype="float32", is_checked=True)
    sets = make_families(
        FamilySizes(vocab_size=_MODEL.vocab_size),
        num_judged=NUM_FAMILIES,
        num_for_leavers=NUM_FAMILIES_FOR_LEAVERS,
    )
    async with fault_lab(config, sets, is_whole=True, failpoints=FAILPOINTS) as lab:
        yield lab


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[run.__name__ for run in SCENARIOS])
async def test_no_fault_of_reuse_costs_a_token(
    lab: FaultLab, scenario: Callable[[FaultLab], Awaitable[FaultReport]]
) -> None:
    check(await scenario(lab))


async def test_poisoned_blocks_of_one_tenant_reach_no_other(lab: FaultLab) -> None:
    """Nor do they reach a peer: what it reads must have the digests of what was computed."""
    cluster = lab.cluster
    secret = load_or_create_secret(cluster.config.data_dir)
    async with AsyncExitStack() as stack:
        clients = []
        for name in (LEFT, RIGHT):
            address = str(cluster.part(name).fact("grpc_address"))
            await clear_cache(address, key=secret.rpc_key, deadline_s=5.0)
            client = RouterClient(
                address, rpc_key=secret.rpc_key, secret_fingerprint=secret.fingerprint
            )
            clients.append(await stack.enter_async_context(client))
        left, right = clients

        async def ask(
            client: RouterClient, name: str, tenant: str, peer: PeerPrefix | None = None
        ) -> tuple[list[int], int, int]:
            """Tokens, and how many of the prompt's were cached, how many of those at the peer."""
            request = make_request(
                name, prompt=range(20, 105), max_tokens=16, ignore_eos=True, tenant=tenant
            )
            client.decode(request, peer=peer)
            tokens = await client.answer(request)
            await cluster.wait_quiet()
            first = await client.until(request, TokensReady)
            assert isinstance(first, TokensReady)
            return tokens, first.num_cached_tokens, first.num_peer_tokens

        expected, *_ = await ask(left, "a1", "a")
        assert await ask(left, "a2", "a") == (expected, 80, 0)
        process = cluster.part(LEFT).process
        assert process is not None
        assert poison_pool(process.pid, 3.0) > 0
        # Nobody reads it but its own tenant, where it lies.
        assert await ask(left, "b1", "b") == (expected, 0, 0)
        assert await ask(left, "b2", "b") == (expected, 80, 0)
        assert await ask(right, "a3", "a", left.peer(80)) == (expected, 0, 0)
        assert await ask(right, "b3", "b", left.peer(80)) == (expected, 80, 80)
        tokens, num_cached, _ = await ask(left, "a4", "a")
        assert (tokens != expected, num_cached) == (True, 80)
