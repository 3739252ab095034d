"""A stand-in for CUDA's runtime on a CPU: the calls that CudaIpc makes, with CUDA's rules about them.

Device memory is a memfd, and a handle names its process and descriptor; so it can be opened as long as its
owner lives, also from another process. What is opened can be read only. Any call fails if it is told to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moonpool.engine.device.ipc import LAZY_ENABLE_PEER_ACCESS, CudaIpc, IpcHandle

INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE = 1, 2, 400
_NAMES = {
    INVALID_VALUE: b"invalid argument",
    OUT_OF_MEMORY: b"out of memory",
    INVALID_HANDLE: b"invalid resource handle",
}
#: Process, descriptor, size.
_HANDLE = struct.Struct("<qqq")


@dataclass(frozen=True)
class _Mapped:
    pages: mmap.mmap
    address: int
    fd: int = -1


class StandInCuda:
    """One process's runtime. Its functions are attributes, as those of a C library are."""

    def __init__(self) -> None:
        #: Name of a call -> the error that it returns.
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []
        self._owned: dict[int, _Mapped] = {}
        self._opened: dict[int, _Mapped] = {}
        self.cudaMalloc = self._call("cudaMalloc", self._malloc)
        self.cudaIpcGetMemHandle = self._call("cudaIpcGetMemHandle", self._get_handle)
        self.cudaIpcOpenMemHandle = self._call("cudaIpcOpenMemHandle", self._open)
        self.cudaIpcCloseMemHandle = self._call("cudaIpcCloseMemHandle", self._close)
        self.cudaGetErrorString = self._call("cudaGetErrorString", _NAMES.get)

    @property
    def num_open(self) -> int:
        """Of other processes' memories, or what passes for them."""
        return len(self._opened)

    def end(self) -> None:
        """The process's end: its memory cannot be opened any more; who has it open keeps it."""
        for owned in self._owned.values():
            os.close(owned.fd)
        self._owned.clear()

    def _call(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return self.errors.get(name) or work(*arguments)

        return call

    def _malloc(self, address: Any, num_bytes: int) -> int:
        fd = os.memfd_create("device", os.MFD_CLOEXEC)
        # Not zero: CUDA's is not.
        os.ftruncate(fd, num_bytes)
        pages = mmap.mmap(fd, num_bytes)
        pages.write(b"\xa5" * num_bytes)
        mapped = _Mapped(pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)), fd)
        self._owned[mapped.address] = mapped
        address._obj.value = mapped.address
        return 0

    def _get_handle(self, handle: Any, address: int) -> int:
        owned = self._owned.get(address)
        if owned is None:
            return INVALID_VALUE
        packed = _HANDLE.pack(os.getpid(), owned.fd, len(owned.pages))
        ctypes.memmove(ctypes.byref(handle._obj), packed, len(packed))
        return 0

    def _open(self, address: Any, handle: IpcHandle, flags: int) -> int:
        assert flags == LAZY_ENABLE_PEER_ACCESS, flags
        pid, fd, num_bytes = _HANDLE.unpack_from(bytes(handle))
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        except OSError:
            return INVALID_HANDLE
        try:
            pages = mmap.mmap(opened, num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return INVALID_HANDLE
        finally:
            os.close(opened)
        mapped = _Mapped(pages, np.frombuffer(pages, np.uint8).ctypes.data)
        self._opened[mapped.address] = mapped
        address._obj.value = mapped.address
        return 0

    def _close(self, address: int) -> int:
        mapped = self._opened.pop(address, None)
        if mapped is None:
            return INVALID_VALUE
        # From here on a read of it is the end of the process.
        mapped.pages.close()
        return 0


def stand_in_ipc(gpu: str = "GPU-0") -> tuple[StandInCuda, CudaIpc]:
    """A process on a GPU of that name."""
    runtime = StandInCuda()
    return runtime, CudaIpc(runtime, torch.device("cpu"), gpu=gpu)
