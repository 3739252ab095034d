"""A KV source in a process of its own: prints its region and digests, ends with its standard input.

Arguments: seed, the number of blocks, and how it will be read (for NIXL).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.kv.layout import KvLayout
from moonpool.wire.layout import region_to_pb
from support.kv_source import serve_kv


async def main(seed: int, num_blocks: int, by: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=num_blocks, num_layers=4, num_kv_heads=4, head_dim=64, dtype="float32"
    )
    async with serve_kv(layout, seed=seed, by=by) as source:
        region = region_to_pb(source.region).SerializeToString().hex()
        digests = source.memory.leaf_digests.tobytes().hex()
        sys.stdout.write(json.dumps({"region": region, "digests": digests}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
