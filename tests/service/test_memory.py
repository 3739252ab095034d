"""Regions, seals and the fd server, with real descriptors and real processes."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import TransferError
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.kv.layout import KvLayout
from moonpool.memory import fd_server
from moonpool.memory.fd_server import FdServer, fetch_region, socket_name
from moonpool.memory.host import host_id
from moonpool.memory.region import OwnedRegion, ReadOnlyRegion, available_bytes
from moonpool.memory.worker_memory import POOL_NAME, WorkerMemory, WorkerMemoryFds

LAYOUT = KvLayout.block_major(
    num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32"
)


@pytest.fixture
def region() -> Iterator[OwnedRegion]:
    owned = OwnedRegion.create("test", 8192)
    yield owned
    owned.close()


def unique_name() -> str:
    return socket_name(WorkerKey(WorkerId("test"), Incarnation(os.urandom(8).hex())))


def test_a_sealed_region_cannot_be_written_or_resized_by_whoever_holds_the_descriptor(
    region: OwnedRegion,
) -> None:
    region.seal()
    region.seal()
    assert region.is_sealed
    with pytest.raises(PermissionError):
        mmap.mmap(region.fd, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError, match="sealed"):
        OwnedRegion.attach(region.fd)
    with pytest.raises(PermissionError):
        os.write(region.fd, b"x")
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    reopened = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(reopened)


def test_a_peer_sees_the_owners_writes_and_cannot_write(region: OwnedRegion) -> None:
    region.seal()
    peer = ReadOnlyRegion(region.fd, 8192)
    region.bytes[17] = 99
    assert peer.bytes[17] == 99
    with pytest.raises(ValueError, match="read-only"):
        peer.bytes[0] = 1


def test_a_peer_refuses_memory_that_may_shrink_or_has_another_size(region: OwnedRegion) -> None:
    with pytest.raises(TransferError, match="not sealed"):
        ReadOnlyRegion(region.fd, 8192)
    region.seal()
    with pytest.raises(TransferError, match="8192"):
        ReadOnlyRegion(region.fd, 4096)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(TransferError, match="not sealed"):
            ReadOnlyRegion(read_end, 8192)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_too_much_memory_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(MemoryError, match="are available"):
        OwnedRegion.create("test", available_bytes() * 2)


def test_closing_leaves_arrays_valid(region: OwnedRegion) -> None:
    view = region.bytes
    region.close()
    region.close()
    view[5] = 3
    assert view[5] == 3


def test_both_processes_of_a_worker_write_one_memory() -> None:
    memory = WorkerMemory.create(LAYOUT)
    child = (
        "import sys\n"
        "from moonpool.kv.layout import KvLayout\n"
        "from moonpool.memory.worker_memory import WorkerMemory, WorkerMemoryFds\n"
        "from moonpool import native\n"
        "layout = KvLayout.block_major(\n"
        "    num_blocks=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype='float32')\n"
        "pool, leaves, control, bell = map(int, sys.argv[1:])\n"
        "fds = WorkerMemoryFds(pool=pool, leaves=leaves, control=control, bell=bell)\n"
        "memory = WorkerMemory.attach(layout, fds)\n"
        "print('attached', flush=True)\n"
        "sys.stdin.readline()\n"
        "memory.pool.bytes[100] = 7\n"
        "memory.leaf_digests[3, 1] = 2**63\n"
        "native.kernels().control_page(memory.control_page).publish(4, 2)\n"
        "import os; os.eventfd_write(memory.bell, 1)\n"
    )
    try:
        fds = memory.fds
        with subprocess.Popen(
            [sys.executable, "-c", child, *(str(fd) for fd in fds.as_tuple())],
            pass_fds=fds.as_tuple(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            memory.seal()
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.wait(30) == 0
        assert memory.pool.bytes[100] == 7
        assert memory.leaf_digests.shape == (4, 2)
        assert int(memory.leaf_digests[3, 1]) == 2**63
        assert os.eventfd_read(memory.bell) == 1
        assert isinstance(memory.fds, WorkerMemoryFds)
    finally:
        memory.close()
        memory.close()


def test_regions_leave_nothing_in_the_file_system(region: OwnedRegion) -> None:
    assert not [path for path in Path("/dev/shm").iterdir() if "moonpool" in path.name]
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{region.fd}")


def test_host_id_is_stable_within_a_host() -> None:
    assert host_id() == host_id()
    other = subprocess.run(
        [sys.executable, "-c", "from moonpool.memory.host import host_id; print(host_id())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == host_id()


async def test_a_region_is_fetched_by_name(region: OwnedRegion) -> None:
    region.bytes[:] = np.arange(8192, dtype=np.uint8)
    region.seal()
    name = unique_name()
    server = FdServer(name, {POOL_NAME: region.fd})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.run())
        before = len(os.listdir("/proc/self/fd"))
        peer = await fetch_region(name, POOL_NAME, 8192, timeout_s=5)
        assert np.array_equal(peer.bytes, region.bytes)
        with pytest.raises(TransferError, match="no such region"):
            await fetch_region(name, "other", 8192, timeout_s=5)
        with pytest.raises(TransferError, match="announced"):
            await fetch_region(name, POOL_NAME, 4096, timeout_s=5)
        peer.close()
        # Others' may be collected meanwhile.
        assert len(os.listdir("/proc/self/fd")) <= before
        task.cancel()
    with pytest.raises(TransferError, match="does not answer") as caught:
        await fetch_region(name, POOL_NAME, 8192, timeout_s=5)
    assert caught.value.code == "kv_peer_lost"


async def test_a_server_outlives_clients_that_talk_nonsense(region: OwnedRegion) -> None:
    region.seal()
    name = unique_name()
    server = FdServer(name, {POOL_NAME: region.fd})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.run())
        for payload in (b"", b"\xff\n", b"x" * 5000):
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, "\0" + name)
                await asyncio.get_running_loop().sock_sendall(client, payload)
        await fetch_region(name, POOL_NAME, 8192, timeout_s=5)
        task.cancel()


async def test_another_user_is_refused_on_both_ends(region: OwnedRegion) -> None:
    region.seal()
    other = os.geteuid() + 1
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("\0" + (name := unique_name()))
        listener.listen()
        client.connect("\0" + name)
        assert fd_server.peer_uid(client) == os.geteuid()
    async with asyncio.TaskGroup() as group:
        ours, theirs = unique_name(), unique_name()
        servers = [
            FdServer(ours, {POOL_NAME: region.fd}),
            FdServer(theirs, {POOL_NAME: region.fd}, uid=other),
        ]
        tasks = [group.create_task(server.run()) for server in servers]
        with pytest.raises(TransferError, match="runs as another user"):
            await fetch_region(ours, POOL_NAME, 8192, timeout_s=5, uid=other)
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, "\0" + theirs)
            assert await loop.sock_recv(client, 100) == b"refused: another user\n"
        for task in tasks:
            task.cancel()


def test_only_sealed_memory_is_offered_and_a_name_is_taken_once(region: OwnedRegion) -> None:
    name = unique_name()
    with pytest.raises(ValueError, match="not sealed"):
        FdServer(name, {POOL_NAME: region.fd})
    region.seal()
    server = FdServer(name, {POOL_NAME: region.fd})
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is what is checked
        FdServer(name, {POOL_NAME: region.fd})
    assert caught.value.errno == errno.EADDRINUSE
    server.close()
    FdServer(name, {POOL_NAME: region.fd}).close()


def test_a_process_that_keeps_freed_memory_does_not_fault_it_in_again() -> None:
    """In a process of its own: the setting lasts."""
    script = """
import resource, sys
from moonpool.memory.heap import keep_freed_memory
if not keep_freed_memory():
    sys.exit("not glibc")
for _ in range(4):
    b"x" * (1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    b"x" * (1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if done.stderr.strip() == "not glibc":
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr
    # One pass alone over 200 buffers of fresh pages would be 51,200 faults.
    assert int(done.stdout) < 1_000
