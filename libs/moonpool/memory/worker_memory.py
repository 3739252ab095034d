"""What the two processes of a worker share: pool, leaf digests, control page, and a bell."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.kv.layout import KvLayout
from moonpool.memory.region import OwnedRegion

CONTROL_PAGE_BYTES = 4096
_DIGEST_BYTES = 8

#: The name under which a worker's fd server offers its pool.
POOL_NAME = "kv-pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemoryFds:
    """Descriptors that the service process leaves open in the engine process (`pass_fds`)."""

    pool: int
    leaves: int
    control: int
    bell: int

    def as_tuple(self) -> tuple[int, int, int, int]:
        return (self.pool, self.leaves, self.control, self.bell)


class WorkerMemory:
    """One incarnation's memory, as either of the worker's processes sees it.

    The service creates it, starts the engine with `fds`, and calls `seal()` when the engine has
    attached; until then no peer may be given a descriptor.

    Attributes:
        layout: Where blocks lie in the pool.
        pool: uint8[layout.pool_bytes] through `.bytes`. Only the engine writes blocks that it
            computes, only the service writes blocks that it reads from peers; who holds a block
            decides.
        leaf_digests: uint64[num_blocks, num_layers]; written with the block.
        control_page: uint8[4096] for native.ControlPage; written by the engine.
        bell: eventfd, non-blocking: the engine rings, the service reads.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        pool: OwnedRegion,
        leaves: OwnedRegion,
        control: OwnedRegion,
        bell: int,
    ) -> None:
        self.layout = layout
        self.pool = pool
        self._leaves = leaves
        self._control = control
        self.bell = bell
        for region, size in zip((pool, leaves, control), _sizes(layout), strict=True):
            assert region.size_bytes == size, (region.size_bytes, size)
        shape = (layout.num_blocks, layout.num_layers)
        self.leaf_digests: npt.NDArray[np.uint64] = leaves.bytes.view(np.uint64).reshape(shape)
        self.control_page = control.bytes

    @classmethod
    def create(cls, layout: KvLayout) -> WorkerMemory:
        """New, zero and pre-faulted memory.

        Raises:
            ConfigError: Not on this platform.
            MemoryError: The machine does not have that much.
        """
        regions: list[OwnedRegion] = []
        try:
            names = (POOL_NAME, "kv-digests", "kv-control")
            for name, size in zip(names, _sizes(layout), strict=True):
                regions.append(OwnedRegion.create(f"moonpool-{name}", size))
            pool, leaves, control = regions
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            for region in regions:
                region.close()
            raise
        return cls(layout, pool=pool, leaves=leaves, control=control, bell=bell)

    @classmethod
    def attach(cls, layout: KvLayout, fds: WorkerMemoryFds) -> WorkerMemory:
        """The engine's side: map inherited descriptors, and take ownership of them.

        Raises:
            PermissionError: They are sealed already.
        """
        return cls(
            layout,
            pool=OwnedRegion.attach(fds.pool),
            leaves=OwnedRegion.attach(fds.leaves),
            control=OwnedRegion.attach(fds.control),
            bell=fds.bell,
        )

    @property
    def fds(self) -> WorkerMemoryFds:
        return WorkerMemoryFds(
            pool=self.pool.fd, leaves=self._leaves.fd, control=self._control.fd, bell=self.bell
        )

    def seal(self) -> None:
        """No process can map the regions writable from here on. May be called twice."""
        for region in (self.pool, self._leaves, self._control):
            region.seal()

    def close(self) -> None:
        """Close the descriptors; arrays that others hold stay valid. May be called twice."""
        for region in (self.pool, self._leaves, self._control):
            region.close()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


def _sizes(layout: KvLayout) -> tuple[int, int, int]:
    num_leaves = layout.num_blocks * layout.num_layers
    return (layout.pool_bytes, num_leaves * _DIGEST_BYTES, CONTROL_PAGE_BYTES)
