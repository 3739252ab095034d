"""CudaIpc: device memory that another process on the same GPU can map. CUDA's runtime, called as it is.

    owner     allocate -> export: a handle of 64 bytes, to be sent
    reader    open -> a view of the owner's memory -> close

Facts of CUDA's documentation (Runtime API, Device Management) that shape it:

- A handle names a whole allocation: memory for others is allocated by cudaMalloc, not cut from torch's.
- The owner must not free it while anybody has it open: it is never freed. With its process's end the
  handle opens nothing any more.
- Only another process may open it, on the one device that this process computes on.
- A copy from what was closed is undefined: whoever closes has waited for all copies.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

#: The only flag there is, and it must be given.
LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_MAPS = Path("/proc/self/maps")


class CudaError(RuntimeError):
    """What CUDA says about a call of ours, or why it cannot be called."""


class SharedMemory(Protocol):
    """Device memory between processes."""

    @property
    def gpu(self) -> str:
        """The GPU's own identity; only processes with an equal one open each other's memory."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], zeroed, for the life of the process. Raises CudaError."""
        ...

    def export(self, memory: Tensor) -> bytes:
        """A handle to what `allocate` gave. Raises CudaError."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """uint8[num_bytes]: another process's memory. Raises CudaError."""
        ...

    def close(self, memory: Tensor) -> None:
        """Of what `open` gave: no work may use it, and none does afterwards. Raises CudaError."""
        ...


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t. Calls take it by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class CudaIpc:
    """SharedMemory by CUDA IPC.

    Args:
        runtime: libcudart, or what stands in for it. Any: a C library.
        device: The current one of each thread that calls.
    """

    def __init__(self, runtime: Any, device: torch.device, *, gpu: str) -> None:
        pointer = ctypes.POINTER(ctypes.c_void_p)
        for name, arguments in (
            ("cudaMalloc", [pointer, ctypes.c_size_t]),
            ("cudaIpcGetMemHandle", [ctypes.POINTER(IpcHandle), ctypes.c_void_p]),
            ("cudaIpcOpenMemHandle", [pointer, IpcHandle, ctypes.c_uint]),
            ("cudaIpcCloseMemHandle", [ctypes.c_void_p]),
            ("cudaGetErrorString", [ctypes.c_int]),
        ):
            getattr(runtime, name).argtypes = arguments
            getattr(runtime, name).restype = ctypes.c_int
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._runtime = runtime
        self._device = device
        self.gpu = gpu

    def allocate(self, num_bytes: int) -> Tensor:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), num_bytes)
        return self._view(address, num_bytes).zero_()

    def export(self, memory: Tensor) -> bytes:
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), memory.data_ptr())
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        if len(handle) != _HANDLE_BYTES:
            raise CudaError(f"a handle of {len(handle)} bytes is not one of CUDA's")
        address = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            IpcHandle.from_buffer_copy(handle),
            LAZY_ENABLE_PEER_ACCESS,
        )
        return self._view(address, num_bytes)

    def close(self, memory: Tensor) -> None:
        self._call("cudaIpcCloseMemHandle", memory.data_ptr())

    def _view(self, address: ctypes.c_void_p, num_bytes: int) -> Tensor:
        assert address.value is not None, "CUDA gave no address"
        if self._device.type == "cuda":
            view = torch.as_tensor(_DeviceArray(address.value, num_bytes), device=self._device)
            if view.data_ptr() != address.value:
                raise CudaError(
                    f"torch does not take memory at {address.value:#x} as {self._device}'s"
                )
            return view
        return torch.frombuffer(
            (ctypes.c_ubyte * num_bytes).from_address(address.value), dtype=torch.uint8
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code != 0:
            what = self._runtime.cudaGetErrorString(code)
            raise CudaError(f"{name}: {what.decode() if what else 'unknown error'} ({code})")


class _DeviceArray:
    """Memory of a GPU, as torch.as_tensor takes it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def find_cuda_ipc(device: torch.device) -> CudaIpc:
    """CUDA IPC for the GPU that this process computes on, by the library that torch has loaded.

    Raises:
        CudaError: In words: this GPU has been cut into instances, or there is no such library.
    """
    properties = torch.cuda.get_device_properties(device)
    if " MIG " in f" {properties.name} ":
        raise CudaError(f"{properties.name} is an instance of a GPU (MIG)")
    library = loaded_library("libcudart")
    if library is None:
        raise CudaError("torch has not loaded CUDA's runtime as a library (libcudart)")
    return CudaIpc(ctypes.CDLL(library), device, gpu=str(properties.uuid))


def loaded_library(name: str) -> str | None:
    """The path of a library that is mapped in this process; `name` without its version."""
    for line in _MAPS.read_text().splitlines():
        _, slash, path = line.partition("/")
        file_name = path.rpartition("/")[2]
        if slash and file_name.startswith(name) and ".so" in file_name:
            return f"/{path}"
    return None
