"""Another process on the GPU, whose pool peers.py reads: allocates it, fills it, says how to open it, waits.

python tests/gpu/peer_owner.py DEVICE NUM_BYTES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moonpool.engine.device.ipc import CudaError, CudaIpc, find_cuda_ipc


def make_ipc(device: torch.device) -> CudaIpc:
    """CUDA IPC; for a self-check on a CPU what stands in for it. Raises CudaError."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        return find_cuda_ipc(device)
    from support.cuda_runtime import stand_in_ipc

    _, ipc = stand_in_ipc()
    return ipc


def fill(memory: torch.Tensor) -> None:
    """The same bytes in every process on one device."""
    generator = torch.Generator(memory.device).manual_seed(7)
    memory.random_(0, 256, generator=generator)


def main() -> None:
    try:
        ipc = make_ipc(torch.device(sys.argv[1]))
        memory = ipc.allocate(int(sys.argv[2]))
        fill(memory)
        if memory.device.type == "cuda":
            torch.cuda.synchronize()
        offer = {"gpu": ipc.gpu, "ipc_handle": ipc.export(memory).hex(), "why": ""}
    except CudaError as error:
        offer = {"gpu": "", "ipc_handle": "", "why": str(error)}
    print(json.dumps(offer), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
