"""What is asked of NIXL by a transport that reads with the real one: reads and no more, by one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moonpool import native
from moonpool.transport.nixl import NixlTransport
from moonpool.transport.nixl_agent import NixlAgent, load_nixl
from support.kv_source import SMALL, UCX_BY_NAME, block_read, reader_pool, serve_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    method: str
    thread: str
    #: Texts, bytes and arrays. A handle that is kept here would keep its agent.
    arguments: tuple[Any, ...]


class WatchedNixl:
    """NIXL's package, and what its user asks of it."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self.__name__ = package.__name__
        self.nixl_agent_config = package.nixl_agent_config
        self.has_progress_thread: list[bool] = []
        self.calls: list[Call] = []

    def nixl_agent(self, name: str, config: Any) -> WatchedAgent:
        self.has_progress_thread.append(config.enable_pthread)
        self.note("nixl_agent", name)
        return WatchedAgent(self._package.nixl_agent(name, config), self.note)

    def note(self, method: str, *arguments: Any) -> None:
        kept = tuple(value for value in arguments if isinstance(value, str | bytes | np.ndarray))
        self.calls.append(
            Call(method=method, thread=threading.current_thread().name, arguments=kept)
        )

    def asked(self, method: str) -> list[Any]:
        """The first argument of each such call."""
        return [call.arguments[0] for call in self.calls if call.method == method]


class WatchedAgent:
    def __init__(self, inner: Any, note: Callable[..., None]) -> None:
        self._inner = inner
        self._note = note

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._note(method, *arguments)
            return getattr(self._inner, method)(*arguments)

        return call


async def test_nixl_reads_runs_of_neighbours_in_one_thread_of_ours() -> None:
    nixl = WatchedNixl(load_nixl())
    pool = reader_pool()
    async with (
        serve_kv(by="nixl") as source,
        NixlTransport(
            pool=pool,
            agent=f"test@{os.urandom(8).hex()}",
            kernels=native.kernels(),
            ucx=UCX_BY_NAME["nixl"],
            agent_type=partial(NixlAgent, package=nixl),
        ) as transport,
    ):
        peer = await transport.connect(source.region, timeout_s=5)
        for blocks, num_runs in (([3, 4, 5, 6], 1), ([3, 4, 9, 1], 3)):
            num_before = len(nixl.asked("get_xfer_descs"))
            layers = range(SMALL.num_layers)
            read = block_read(SMALL, source.memory.leaf_digests, blocks, blocks, layers)
            assert len(read.spans) == 4 * SMALL.num_layers
            result = await peer.read(read, timeout_s=5)
            assert (result.num_bytes, result.bad_leaves) == (read.num_bytes, ())
            ours, theirs = nixl.asked("get_xfer_descs")[num_before:]
            assert len(ours) == len(theirs) == num_runs
        assert nixl.asked("remove_remote_agent") == []
        await peer.close()
    # One more to see that the peer answers.
    assert nixl.asked("initialize_xfer") == ["READ"] * 3
    assert sum(call.method == "transfer" for call in nixl.calls) == 3
    assert nixl.asked("remove_remote_agent") == [str(source.region.worker)]
    assert nixl.has_progress_thread == [False]
    assert {call.thread for call in nixl.calls} == {"moonpool-nixl"}


_EXIT = """
import ctypes, sys
from moonpool.transport.nixl_agent import try_out
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # What destructors do where the system has a second libnl.
try_out()
sys.exit(3)
"""


def test_a_process_that_has_used_nixl_ends_with_its_own_status() -> None:
    ended = subprocess.run([sys.executable, "-c", _EXIT], check=False, timeout=60)
    assert ended.returncode == 3
