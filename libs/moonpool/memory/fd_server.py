"""Passes read-only memory to peers on the same host: descriptors over an abstract Unix socket.

One connection asks for one name and gets one descriptor. Both ends check SO_PEERCRED: the server
gives memory only to processes of its own user, and the client believes only a server of its own user
(anyone may bind an abstract name first). What is passed is sealed, so a peer can only read it.

    request    name, newline
    answer     "ok" newline, with the descriptor   |   "refused: why" newline
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import closing

from moonpool.errors import TransferError
from moonpool.ids import WorkerKey
from moonpool.memory.host import require_linux
from moonpool.memory.region import ReadOnlyRegion, has_seals

_MAX_LINE_BYTES = 200
#: A client sends its line at once or is dropped.
_REQUEST_TIMEOUT_S = 2.0
#: Of accept: too many open files just now, or a client that left already.
_PASSING_ERRORS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ECONNABORTED,
}
_PAUSE_S = 0.1


def socket_name(worker: WorkerKey) -> str:
    """The abstract socket of one incarnation, without the leading NUL byte."""
    return f"moonpool/{worker.worker_id}/{worker.incarnation}"


class FdServer:
    """Offers named descriptors of sealed regions. Bound at construction, serving while run() runs."""

    def __init__(
        self, name: str, descriptors: Mapping[str, int], *, uid: int | None = None
    ) -> None:
        """Bind `name` (socket_name).

        Args:
            descriptors: By name; they stay the caller's and open for the server's life.
            uid: Whose processes may have them; this process's user's if None.

        Raises:
            ValueError: A descriptor is not sealed.
            OSError: The name is taken.
        """
        require_linux()
        for region, fd in descriptors.items():
            if not has_seals(fd):
                raise ValueError(f"{region} is not sealed: a peer could write it")
        self._descriptors = dict(descriptors)
        self._uid = os.geteuid() if uid is None else uid
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind("\0" + name)
            self._socket.listen(64)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    async def run(self) -> None:
        """Serve until cancelled, then close the socket."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(self._socket)
                    except OSError as error:
                        if error.errno not in _PASSING_ERRORS:
                            raise
                        await asyncio.sleep(_PAUSE_S)
                        continue
                    group.create_task(self._answer(connection))
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._socket.close()

    async def _answer(self, connection: socket.socket) -> None:
        with closing(connection):
            connection.setblocking(False)
            try:
                if peer_uid(connection) != self._uid:
                    connection.send(b"refused: another user\n")
                    return
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    name = await _read_line(connection)
                fd = self._descriptors.get(name)
                if fd is None:
                    connection.send(b"refused: no such region\n")
                    return
                socket.send_fds(connection, [b"ok\n"], [fd])
            except (OSError, TimeoutError, ValueError):
                # The client is gone, silent or talks nonsense; it sees the connection close.
                return


async def fetch_region(
    name: str, region: str, size_bytes: int, *, timeout_s: float, uid: int | None = None
) -> ReadOnlyRegion:
    """Ask a peer's fd server for a region and map it, in a thread (a large map takes a while).

    Args:
        uid: Whose server is believed; this process's user's if None.

    Raises:
        TransferError: Nobody listens, it is another user's, it refused, or it was too slow.
    """
    trusted_uid = os.geteuid() if uid is None else uid
    return await asyncio.to_thread(_fetch, name, region, size_bytes, timeout_s, trusted_uid)


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end (SO_PEERCRED)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", packed)
    return int(uid)


async def _read_line(connection: socket.socket) -> str:
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n"):
        received = await loop.sock_recv(connection, _MAX_LINE_BYTES)
        line += received
        if not received or len(line) > _MAX_LINE_BYTES:
            raise ValueError("not a request")
    return line[:-1].decode()


def _fetch(
    name: str, region: str, size_bytes: int, timeout_s: float, trusted_uid: int
) -> ReadOnlyRegion:
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout_s)
            connection.connect("\0" + name)
            if peer_uid(connection) != trusted_uid:
                raise TransferError(
                    "the peer's memory server runs as another user", code="kv_region_refused"
                )
            connection.sendall(region.encode() + b"\n")
            answer, fds, _, _ = socket.recv_fds(
                connection, _MAX_LINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        if answer != b"ok\n" or len(fds) != 1:
            raise TransferError(
                f"the peer gave no memory: {answer.decode(errors='replace').strip() or 'closed'}",
                code="kv_region_refused",
            )
        return ReadOnlyRegion(fds[0], size_bytes)
    except OSError as error:
        raise TransferError(
            f"the peer's memory server does not answer: {error}", code="kv_peer_lost"
        ) from error
    finally:
        for fd in fds:
            os.close(fd)
