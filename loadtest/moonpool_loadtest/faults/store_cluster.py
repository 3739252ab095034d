"""The cluster in which stores are broken: one store, or a ring of three."""

from __future__ import annotations

from pathlib import Path

from moonpool.config.schema import ClusterConfig
from moonpool.hub.model_dir import resolve
from moonpool.kv.layout import KvDtype

BLOCK_SIZE = 16
#: Of each store's memory: what all families leave, and some more. Checking all invariants takes time in proportion.
NUM_HOST_BLOCKS = 384


def store_cluster(
    model: str,
    *,
    data_dir: Path,
    ssd_dir: Path,
    dtype: KvDtype,
    redis_url: str | None = None,
    is_checked: bool = False,
    num_workers: int = 2,
) -> ClusterConfig:
    """Workers of role both with 48 blocks each, and stores with disks. The router takes the workers in turn.

    Args:
        redis_url: Where three stores find each other; None: there is one.
        num_workers: At most two; they read by shm and by gRPC.
    """
    is_ring = redis_url is not None
    block_bytes = (
        resolve(model, data_dir=data_dir).config.kv_layout(1, dtype, BLOCK_SIZE).block_bytes
    )
    workers = [
        {"role": "both", "name": "left", "transports": ["shm", "grpc"]},
        {"role": "both", "name": "right", "transports": ["grpc"]},
    ]
    return ClusterConfig.model_validate(
        {
            "name": "ring" if is_ring else "stores",
            "data_dir": data_dir,
            "model": model,
            "dtype": dtype,
            # In a ring a load runs all the time: nothing of it is handed over, or turned away.
            "local_prefill_tokens": 512 if is_ring else 256,
            "router": {
                "http_port": 0,
                "grpc_port": 0,
                "placement": {"disagg": "threshold", "mode": "round_robin"},
            },
            "worker": {
                "num_blocks": 48,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 4,
                "max_queued_steps": 64 if is_ring else 2,
                "max_model_len": 512,
                # What is faster does not matter here.
                "kv_peer_reads": "always",
                "is_checked": is_checked,
            },
            "workers": workers[:num_workers],
            "store": {
                "host_bytes": NUM_HOST_BLOCKS * block_bytes,
                "ssd_dir": ssd_dir,
                # All that fifty deaths leave: what is not there again was lost.
                "ssd_bytes": "4GiB",
                "ssd_admission": "all",
                "ssd_write_bytes_per_day": 0,
                "is_ssd_strict": True,
                "redis_url": redis_url,
                "is_checked": is_checked,
            },
            "stores": 3 if is_ring else 1,
        }
    )
