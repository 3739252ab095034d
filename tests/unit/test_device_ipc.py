"""CudaIpc over a stand-in for CUDA's runtime: what is called, with what, and what its errors become."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moonpool.engine.device.ipc import CudaError, loaded_library
from moonpool.engine.device.pool import DevicePool
from moonpool.kv.layout import KvLayout
from support.cuda_runtime import INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, stand_in_ipc

CPU = torch.device("cpu")


def test_what_the_owner_writes_is_what_a_reader_sees() -> None:
    (owner, theirs), (reader, ours) = stand_in_ipc(), stand_in_ipc()
    memory = theirs.allocate(4096)
    assert not memory.any()
    memory[17] = 3
    opened = ours.open(theirs.export(memory), 4096)
    assert opened[17] == 3
    memory[18] = 4
    assert opened[18] == 4
    assert reader.num_open == 1
    ours.close(opened)
    assert reader.num_open == 0
    assert owner.calls == ["cudaMalloc", "cudaIpcGetMemHandle"]
    assert reader.calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_a_pool_in_memory_for_others_is_like_any(dtype: str) -> None:
    layout = KvLayout.block_major(
        num_blocks=3, num_layers=2, num_kv_heads=2, head_dim=8, dtype=dtype
    )
    _, ipc = stand_in_ipc()
    pools = [
        DevicePool(layout, CPU),
        DevicePool(layout, CPU, memory=ipc.allocate(DevicePool.num_bytes(layout))),
    ]
    for pool in pools:
        pool.put(1, torch.tensor([2]), torch.tensor([5]), torch.ones(1, 2, 2, 8))
        assert len(pool.memory) == DevicePool.num_bytes(layout)
    assert torch.equal(pools[0].memory, pools[1].memory)
    assert pools[0].memory.any()


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("cudaMalloc", OUT_OF_MEMORY, r"cudaMalloc: out of memory \(2\)"),
        ("cudaIpcGetMemHandle", INVALID_VALUE, r"cudaIpcGetMemHandle: invalid argument \(1\)"),
        ("cudaIpcOpenMemHandle", INVALID_HANDLE, r"cudaIpcOpenMemHandle: invalid resource"),
        ("cudaIpcCloseMemHandle", 999, r"cudaIpcCloseMemHandle: unknown error \(999\)"),
    ],
)
def test_an_error_of_cuda_is_told_in_its_words(name: str, code: int, words: str) -> None:
    (owner, theirs), (reader, ours) = stand_in_ipc(), stand_in_ipc()
    owner.errors[name] = reader.errors[name] = code
    with pytest.raises(CudaError, match=words):
        ours.close(ours.open(theirs.export(theirs.allocate(64)), 64))


def test_a_handle_of_an_owner_that_is_gone_opens_nothing() -> None:
    (owner, theirs), (_, ours) = stand_in_ipc(), stand_in_ipc()
    handle = theirs.export(theirs.allocate(64))
    owner.end()
    with pytest.raises(CudaError, match="invalid resource handle"):
        ours.open(handle, 64)


def test_what_is_no_handle_does_not_get_to_cuda() -> None:
    runtime, ipc = stand_in_ipc()
    with pytest.raises(CudaError, match="63 bytes"):
        ipc.open(bytes(63), 64)
    assert runtime.calls == []


def test_a_loaded_library_is_found_by_its_name() -> None:
    """In a process of its own: here some may be loaded already."""
    script = (
        "import ctypes.util, ctypes; from moonpool.engine.device.ipc import loaded_library;"
        "print(loaded_library('libc.'), loaded_library('libcudart'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    libc, cudart = done.stdout.split()
    assert libc.startswith("/")
    assert "libc." in libc
    assert cudart == "None" or "libcudart" in cudart
    assert loaded_library("libnobody-has-this") is None
