"""NixlAgent: what is used of NIXL's agent, typed, and whether NIXL can be used here at all.

NIXL moves bytes with UCX: RDMA where there is a NIC, else shared memory (process_vm_readv) or TCP. Its
package is the extra `rdma`. UCX reads its own environment (UCX_TLS, UCX_NET_DEVICES, ...) when an agent
is made; what the environment sets goes before what is set here.

Rules
1. One thread at a time calls an agent. Calls release the interpreter lock, except where said.
2. No progress thread: nothing moves unless `is_done` or `progress` is called. It would burn a core.
3. READs only, and a READ cannot be recalled: a transfer is not given up before it is done or failed, or
   before `close`. UCX promises that a failed READ writes no more; `close` takes away the memory itself.
4. A process that has loaded NIXL ends without the destructors of its C libraries, with the status that it meant.
   Where the system has libibverbs, UCX loads it beside the one that NIXL brings, and with it a second libnl,
   which crashes as both are taken apart.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.transport.base import ByteArray

#: uint64[n, 3] of (address, length, 0), as NIXL wants descriptors.
Descriptors = npt.NDArray[np.uint64]

#: The same code, built for two versions of CUDA; neither needs a GPU.
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_MEMORY = "DRAM"
_RDMA_DEVICES = Path("/sys/class/infiniband")

#: The pause between two looks is this part of the time since something moved.
_PAUSE_SHARE = 1 / 16
_MIN_PAUSE_S = 50e-6

INSTALL = "pip install 'moonpool[rdma]'"


class NixlUnusableError(MoonpoolError):
    """NIXL is not installed, or does not work on this machine; the message says why."""

    default_code = "nixl_unusable"


class NixlError(Exception):
    """What NIXL says about one peer or transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlFacts:
    """What there is, before an agent is made."""

    version: str
    rdma_devices: tuple[str, ...]


def nixl_facts() -> NixlFacts:
    """Look without loading anything.

    Raises:
        NixlUnusableError: Not installed.
    """
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
        names = _RDMA_DEVICES.iterdir() if _RDMA_DEVICES.is_dir() else ()
        return NixlFacts(version=version, rdma_devices=tuple(sorted(path.name for path in names)))
    raise NixlUnusableError(f"NIXL is not installed: {INSTALL}")


class NixlAgent:
    """One agent and the memory that it may read into or be read from.

    Args:
        name: Unique among all agents that meet.
        memories: Registered; must outlive the agent.
        ucx: UCX settings by their names without `UCX_`; the environment goes before them. NIXL takes
            no value with a comma.
        package: NIXL, or what stands in for it; loaded if None.
    """

    def __init__(
        self,
        name: str,
        memories: Sequence[ByteArray],
        *,
        ucx: Mapping[str, str] | None = None,
        package: Any = None,
    ) -> None:
        """Takes some tenths of a second, the first time in a process.

        Raises:
            NixlUnusableError: Not installed, or it does not start; in words.
        """
        package = load_nixl() if package is None else package
        self._errors = _error_types(package)
        config = package.nixl_agent_config(enable_prog_thread=False, backends=[])
        settings = ",".join(f"{key}={value}" for key, value in (ucx or {}).items())
        try:
            # Any: the package has no types.
            agent: Any = package.nixl_agent(name, config)
            agent.create_backend(_BACKEND, {"engine_config": settings} if settings else {})
            agent.register_memory(
                np.array([[address_of(memory), memory.size, 0] for memory in memories], np.uint64),
                _MEMORY,
            )
            #: What a peer's `add_peer` takes.
            self.metadata: bytes = agent.get_agent_metadata()
        except self._errors as error:
            raise NixlUnusableError(f"NIXL does not start here: {error}") from error
        self._agent = agent
        self._handles: set[Any] = set()

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer's agent known; returns its name. No message is sent yet.

        Raises:
            NixlError: Not metadata, or of an agent that cannot be reached from here.
        """
        with self._telling():
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect. A peer that is not known is none. Holds the interpreter lock."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            # It was found dead and removed by NIXL itself.
            return

    def read(self, peer: str, remote: Descriptors, local: Descriptors) -> object:
        """Post one READ of parallel descriptors; returns its handle. Over shared memory, copies.

        Raises:
            NixlError: Nothing of it is in flight.
        """
        agent = self._agent
        with self._telling():
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, _MEMORY),
                agent.get_xfer_descs(remote, _MEMORY),
                peer,
            )
            self._handles.add(handle)
            try:
                agent.transfer(handle)
            except self._errors:
                self.release(handle)
                raise
        return handle

    def is_done(self, handle: object) -> bool:
        """Make progress, and say whether the READ has ended well.

        Raises:
            NixlError: It failed; it writes no more.
        """
        with self._telling():
            return bool(self._agent.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        """Forget a READ that is done or failed. Holds the interpreter lock.

        Raises:
            NixlError: NIXL does not let go of it; `close` does.
        """
        with self._telling():
            handle.release()
        self._handles.discard(handle)

    def progress(self) -> None:
        """Answer peers that connect or read."""
        with self._telling():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """End the agent, and with it every READ: no byte is written after this. May be called twice.

        Holds the interpreter lock.
        """
        for handle in self._handles:
            with suppress(*self._errors):
                handle.release()
        self._handles.clear()
        # The native agent ends with its last reference: sockets and queue pairs are closed, and
        # the memory is taken from the NIC.
        self._agent = None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise NixlError(f"{error or 'failed'} ({type(error).__name__})") from error


def try_out(timeout_s: float = 5.0) -> None:
    """Read from one agent to another in this process. Blocks; loads UCX for good.

    Raises:
        NixlUnusableError: It does not work, in words.
    """
    here, there = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)
    reader, source = NixlAgent("try-out-reader", [here]), NixlAgent("try-out-source", [there])
    try:
        handle = reader.read(
            reader.add_peer(source.metadata),
            np.array([[address_of(there), there.size, 0]], np.uint64),
            np.array([[address_of(here), here.size, 0]], np.uint64),
        )
        deadline = time.monotonic() + timeout_s
        while not reader.is_done(handle):
            source.progress()
            if time.monotonic() > deadline:
                raise NixlUnusableError(f"a READ on this machine did not end in {timeout_s:g} s")
    except NixlError as error:
        raise NixlUnusableError(f"a READ on this machine failed: {error}") from error
    finally:
        reader.close()
        source.close()
    if not np.array_equal(here, there):
        raise NixlUnusableError("a READ on this machine brought other bytes")


def pause_s(still_s: float, *, most_s: float) -> float:
    """How long to wait before the next look, if nothing has moved for `still_s`."""
    return min(max(still_s * _PAUSE_SHARE, _MIN_PAUSE_S), most_s)


def address_of(memory: ByteArray) -> int:
    """Where it begins in this process."""
    return int(memory.ctypes.data)


def load_nixl() -> Any:
    """NIXL's package, which has no types.

    Raises:
        NixlUnusableError: Not installed, or it cannot be loaded.
    """
    nixl_facts()
    problems = []
    for package in _PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            problems.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It writes each agent's birth to standard output.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        _skip_destructors_at_exit()
        return module
    raise NixlUnusableError(f"NIXL cannot be loaded: {'; '.join(problems)}")


@functools.cache
def _skip_destructors_at_exit() -> None:
    """Once in a process: end it in the midst of C's exit(), after Python's own end (see rule 4)."""
    libc = ctypes.CDLL(None)
    # Last in, first out: what was registered before, and all destructors, would come after this.
    libc.on_exit(libc._exit, None)


def _error_types(package: Any) -> tuple[type[Exception], ...]:
    """What it raises; its own exceptions share no base."""
    bindings = importlib.import_module(f"{package.__name__}._bindings")
    types = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    own = (kind for kind in types if isinstance(kind, type) and issubclass(kind, Exception))
    # It raises this one itself, for a plugin that is not there.
    return (RuntimeError, *own)
