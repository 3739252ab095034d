"""The manifest of a converted model: what is in its directory, written last.

A directory without a manifest, or whose files differ from it in size, is not complete and is made
again. The hashes of the weight files stand in it too, so that no start has to read them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from moonpool.hub.data_dir import atomic_write

MANIFEST_NAME = "moonpool.json"
#: Raised whenever a conversion writes something else: older directories are then made again.
CONVERTER_VERSION = 2


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    converter_version: int
    #: SHA-256 of the file that the model was made from.
    source_sha256: str
    #: By name, all files of the directory except the manifest.
    files: dict[str, ManifestFile]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    with atomic_write(directory / MANIFEST_NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest if the directory is complete and of this converter's version, else None."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    if manifest.converter_version != CONVERTER_VERSION:
        return None
    for name, entry in manifest.files.items():
        try:
            if (directory / name).stat().st_size != entry.size_bytes:
                return None
        except OSError:
            return None
    return manifest
