"""StepUpload: a step's arrays on the device, in one copy.

FlashInfer, the embedding and the model's own indexing take int32, so all of them lie in one buffer:

    | token_ids | positions | row_of_token | kv_indptr | kv_indices | kv_last_page_len | sample_tokens |

Each begins at a multiple of 16 bytes. The buffers are used again in every step: the host's is written
only when the step before is over, the device's only after what the main stream was given before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonpool.core.step import Int32Array
from moonpool.engine.batch import PageTables, StepBatch

_ALIGNMENT = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBatch:
    """A StepBatch on the device; all tensors int32. Holds until the next step is sent."""

    #: The tables as they lie on the host: whoever plans reads them there.
    pages: PageTables
    token_ids: Tensor
    positions: Tensor
    #: Which row of the tables each token belongs to.
    row_of_token: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    #: Tokens whose logits are wanted; None for none.
    sample_tokens: Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class StepUpload:
    """One step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._pinned(1 << 12)
        self._on_device = torch.empty_like(self._host, device=device)
        self._current: DeviceBatch | None = None

    def send(self, batch: StepBatch) -> DeviceBatch:
        """Copies a step's arrays; does not wait. The step before must be over."""
        pages = batch.pages
        num_rows = pages.num_rows
        parts: tuple[Int32Array, ...] = (
            batch.token_ids.astype(np.int32),
            batch.positions.astype(np.int32),
            np.repeat(np.arange(num_rows, dtype=np.int32), np.diff(pages.qo_indptr)),
            pages.kv_indptr,
            pages.kv_indices,
            pages.kv_last_page_len,
            batch.sample_tokens.astype(np.int32),
        )
        starts = np.cumsum([0, *(-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts)])
        self._make_room(int(starts[-1]))
        host = self._host.numpy()
        for start, part in zip(starts, parts, strict=False):
            host[start : start + len(part)] = part
        used = slice(0, int(starts[-1]))
        self._on_device[used].copy_(self._host[used], non_blocking=True)
        views = [
            self._on_device[int(start) : int(start) + len(part)]
            for start, part in zip(starts, parts, strict=False)
        ]
        self._current = DeviceBatch(
            pages=pages,
            token_ids=views[0],
            positions=views[1],
            row_of_token=views[2],
            kv_indptr=views[3],
            kv_indices=views[4],
            kv_last_page_len=views[5],
            sample_tokens=views[6] if len(parts[6]) else None,
        )
        return self._current

    def current(self, pages: PageTables) -> DeviceBatch:
        """The step that was sent last, which must be that of `pages`."""
        assert self._current is not None, "no step was sent"
        assert self._current.pages is pages, "these tables are not the step's"
        return self._current

    def _make_room(self, num_ints: int) -> None:
        if num_ints > len(self._host):
            self._host = self._pinned(1 << (num_ints - 1).bit_length())
            self._on_device = torch.empty_like(self._host, device=self._device)

    def _pinned(self, num_ints: int) -> Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_ints, dtype=torch.int32, pin_memory=is_pinned)
