"""Writes a safetensors file tensor by tensor, so that a model never lies in memory as a whole.

Format: 8 bytes little-endian length, a JSON header with name -> dtype, shape, offsets, then the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.hub.data_dir import atomic_write
from moonpool.hub.manifest import ManifestFile


def write_float32(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, npt.NDArray[np.float32]]],
    on_written: Callable[[int, int], None],
) -> ManifestFile:
    """Writes `tensors`, which come in the order of `shapes`, and returns the file's size and hash.

    `on_written(done, total)` is called after each tensor, in bytes of payload.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    total = offset
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    digest = hashlib.sha256()
    done = 0
    expected = iter(shapes.items())
    with atomic_write(path) as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for name, values in tensors:
            assert (name, values.shape) == next(expected), (name, values.shape)
            assert values.dtype == np.float32, (name, values.dtype)
            data = np.ascontiguousarray(values).data
            digest.update(data)
            file.write(data)
            done += values.nbytes
            on_written(done, total)
        assert done == total, (done, total)
    return ManifestFile(size_bytes=8 + len(text) + total, sha256=digest.hexdigest())
