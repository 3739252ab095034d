"""A fault of a tenant: it floods a store, and takes nothing of another one's below that one's floor.

In a store with little memory two tenants have a floor. One asks a little and holds less than its floor, then the
other brings a multiple of what the store's memory has room for, chain after chain. When workers have forgotten
all they held, what the first tenant asks comes from the store's memory: every block of it. Of what lay there
without a floor something is gone, so the flood did press.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from moonpool.config.schema import ApiKeySettings, ClusterConfig, TenantSettings
from moonpool.errors import MoonpoolError
from moonpool.hub.model_dir import resolve
from moonpool.tiering.protocol import StoreStats
from moonpool_loadtest.faults.lab import FaultLab, FaultReport
from moonpool_loadtest.faults.store_cluster import BLOCK_SIZE
from moonpool_loadtest.faults.waiting import within
from moonpool_loadtest.faults.workload import Case, Outcome, num_shared_tokens

STORE = "store-0"
#: Each has a floor. Whoever comes by no key of theirs has none.
CALM, FLOODING = "calm", "flooding"
KEY_BY_TENANT: Mapping[str, str] = {CALM: "the calm one's", FLOODING: "the flooding one's"}
FLOOR_BLOCKS = 20
#: Of the store's memory.
NUM_BLOCKS = 72
NUM_FAMILIES_BESIDE_FLOOD = 2

_KEPT_S = 15.0


def with_floors(config: ClusterConfig) -> ClusterConfig:
    """The same with keys for both tenants, and stores of NUM_BLOCKS blocks in which each has its floor."""
    model = resolve(config.model, data_dir=config.data_dir)
    block_bytes = model.config.kv_layout(1, config.dtype, BLOCK_SIZE).block_bytes
    small = {
        "host_bytes": NUM_BLOCKS * block_bytes,
        "tenants": tuple(
            TenantSettings(tenant=tenant, floor_bytes=FLOOR_BLOCKS * block_bytes)
            for tenant in KEY_BY_TENANT
        ),
    }
    keys = tuple(ApiKeySettings(tenant=tenant, key=key) for tenant, key in KEY_BY_TENANT.items())
    return config.model_copy(
        update={
            "router": config.router.model_copy(update={"api_keys": keys}),
            "stores": tuple(
                group.model_copy(update={"settings": group.settings.model_copy(update=small)})
                for group in config.stores
            ),
        }
    )


async def run_flood(lab: FaultLab, *, num_floods: int) -> FaultReport:
    """One tenant asks a family a time; what the other has below its floor stays. Takes two families more."""
    started = asyncio.get_running_loop().time()
    calm, flooding = (lab.client.with_key(KEY_BY_TENANT[name]) for name in (CALM, FLOODING))
    kept, unprotected = lab.take(), lab.take()
    lead = max(kept, key=lambda case: len(case.prompt))
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for client, case in ((calm, lead), (lab.client, max(unprotected, key=_num_blocks))):
        before = await _stats(lab)
        outcomes.append(await client.ask(case))
        problems += await _brought(lab, before, _num_blocks(case))
    stranger = await flooding.ask(lead)
    outcomes.append(stranger)
    if _num_cached_tokens(stranger):
        problems.append(f"{FLOODING} found what {CALM} had computed")
    before = await _stats(lab)
    for _ in range(num_floods):
        family = lab.take()
        last = await _stats(lab)
        outcomes += await flooding.ask_all(family)
        problems += await _brought(lab, last, num_shared_tokens(family, BLOCK_SIZE) // BLOCK_SIZE)
    problems += await lab.settle()
    after = await _stats(lab)
    held = _num_blocks_by_tenant(before)
    left = _num_blocks_by_tenant(after)
    num_brought = after.num_put_blocks - before.num_put_blocks
    if held[CALM] > FLOOR_BLOCKS:
        problems.append(f"{CALM} held {held[CALM]} blocks, more than its floor")
    if left[CALM] < held[CALM]:
        problems.append(f"of {held[CALM]} blocks below the floor of {CALM} {left[CALM]} are left")
    if left[""] >= held[""]:
        problems.append(f"the {held['']} blocks without a floor withstood the flood")
    if num_brought < 2 * NUM_BLOCKS:
        problems.append(f"the flood was of {num_brought} blocks only")
    asked, found = await _ask_again(lab, kept, lead)
    outcomes += asked
    problems += found
    return lab.judge(
        "one tenant floods a store: another's floor",
        outcomes,
        problems=problems,
        started=started,
        note=f"{num_brought} blocks brought into a store of {NUM_BLOCKS}: of a tenant's {held[CALM]} "
        f"below its floor {left[CALM]} left, of {held['']} without a floor {left['']}",
    )


# -- parts --


async def _ask_again(
    lab: FaultLab, family: tuple[Case, ...], lead: Case
) -> tuple[list[Outcome], list[str]]:
    """The calm tenant's requests, of workers that hold nothing; what of them was not found, if anything."""
    problems: list[str] = []
    outcomes: list[Outcome] = []
    client = lab.client.with_key(KEY_BY_TENANT[CALM])
    num_shared = num_shared_tokens(family, BLOCK_SIZE)
    for case in (lead, *(case for case in family if case is not lead)):
        try:
            for worker_id in lab.cluster.worker_ids:
                await lab.cluster.clear_worker(worker_id)
        except MoonpoolError as error:
            problems.append(error.message)
        before = await _stats(lab)
        outcome = await client.ask(case)
        after = await _stats(lab)
        outcomes.append(outcome)
        # At least one token of a prompt is computed.
        wanted = (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE if case is lead else num_shared
        if (num_cached := _num_cached_tokens(outcome)) < wanted:
            problems.append(f"{case.name}: of {wanted} tokens {num_cached} were found")
        num_hits = after.num_hit_host_blocks - before.num_hit_host_blocks
        if num_hits * BLOCK_SIZE < wanted:
            problems.append(f"{case.name}: the store gave {num_hits} blocks")
    return outcomes, problems + await lab.settle()


def _num_blocks(case: Case) -> int:
    """Full blocks of its prompt."""
    return len(case.prompt) // BLOCK_SIZE


def _num_cached_tokens(outcome: Outcome) -> int:
    return outcome.done.usage.num_cached_tokens if outcome.done is not None else 0


def _num_blocks_by_tenant(stats: StoreStats) -> dict[str, int]:
    """What each has in memory; under the empty name, those without a part of their own."""
    return {use.tenant: use.num_blocks for use in stats.tenants}


async def _stats(lab: FaultLab) -> StoreStats:
    return (await lab.cluster.store_report(STORE)).stats


async def _brought(lab: FaultLab, before: StoreStats, num_blocks: int) -> list[str]:
    """So many blocks have been brought to the store since `before`; else what is wrong."""

    async def is_brought() -> bool:
        return (await _stats(lab)).num_put_blocks >= before.num_put_blocks + num_blocks

    return await within(_KEPT_S, f"{num_blocks} more blocks are brought", is_brought)
