"""The process in which peers read a pool by NIXL. NixlSource (nixl_source.py) starts it, and says why it is one.

Life
1. It maps the pool, before that is sealed: a NIC wants memory that it could write. Nothing here writes it.
2. It makes one agent, and reports what peers need, or why there is none, as a line of JSON.
3. It looks after its agent: a reader cannot even connect otherwise. It looks at once when one of UCX's sockets
   has something (a READ over TCP is answered here) and often after that, and every PAUSE_S for what comes
   through shared memory without a sign. RDMA and reads over shared memory need nothing of it.
4. It ends with its end of the socket, so it never outlives the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from moonpool.memory.region import OwnedRegion
from moonpool.transport.nixl_agent import NixlAgent, NixlUnusableError, address_of, pause_s

#: One percent of a core, and the step in which a reader on this host connects.
PAUSE_S = 20e-3


def serve(
    control: socket.socket,
    pool: OwnedRegion,
    name: str,
    ucx: Mapping[str, str],
    *,
    most_s: float = PAUSE_S,
    is_alone: bool = True,
) -> None:
    """Report on `control`, then answer readers until its other end is closed.

    Args:
        most_s: The longest pause between two looks.
        is_alone: The process has no other use: whatever waits for sockets in it is UCX.
    """

    def report(**what: Any) -> None:
        control.sendall(json.dumps(what).encode() + b"\n")

    try:
        agent = NixlAgent(name, [pool.bytes], ucx=ucx)
    except NixlUnusableError as error:
        report(error=error.message)
        return
    report(agent_metadata=agent.metadata.hex(), base_address=address_of(pool.bytes))
    fds = (control.fileno(), *(_event_sets() if is_alone else ()))
    moved_at = time.monotonic()
    while True:
        pause = pause_s(time.monotonic() - moved_at, most_s=most_s)
        ready, _, _ = select.select(fds, (), (), pause)
        if control.fileno() in ready:
            agent.close()
            return
        if ready:
            moved_at = time.monotonic()
        agent.progress()


def _event_sets() -> list[int]:
    """The epoll descriptors of this process. UCX waits for its sockets by such."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
    return found


def main(pool_fd: str, control_fd: str, name: str, ucx: str) -> None:
    pool = OwnedRegion.attach(int(pool_fd))
    with socket.socket(fileno=int(control_fd)) as control:
        serve(control, pool, name, json.loads(ucx))


if __name__ == "__main__":
    main(*sys.argv[1:])
