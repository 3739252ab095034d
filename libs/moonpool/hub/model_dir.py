"""resolve: from what a user names to a model's directory, complete and checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moonpool.config.schema import default_data_dir
from moonpool.errors import ModelError
from moonpool.hub.data_dir import atomic_write, exclusive
from moonpool.hub.gguf_convert import convert_gguf
from moonpool.hub.manifest import read_manifest
from moonpool.hub.model_config import ModelConfig, read_json, read_model_config
from moonpool.hub.progress import Progress, no_progress
from moonpool.hub.pull import KNOWN_MODELS, is_pulled, pull, sha256_of_file

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDir:
    """A model on disk whose files are all there."""

    #: What clients call it unless the operator says otherwise.
    name: str
    path: Path
    config: ModelConfig
    #: Weight files, sorted by name.
    weight_files: tuple[Path, ...]
    #: Hex SHA-256 of what decides the model's values: part of the cache namespace.
    fingerprint: str


class _FileState(msgspec.Struct, frozen=True, kw_only=True):
    """Which file, and when it was last changed. Its own time can be set back; that of its inode cannot."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _FileState:
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )


class _KnownHash(msgspec.Struct, frozen=True, kw_only=True):
    state: _FileState
    sha256: str


def resolve(
    model: str,
    *,
    data_dir: Path | None = None,
    progress: Progress = no_progress,
    can_pull: bool = False,
) -> ModelDir:
    """Finds `model`: a known name, a directory in Hugging Face's form, or a .gguf file.

    A GGUF is converted once into the data directory, under the hash of its content. A known name
    that is not pulled yet is pulled if `can_pull`, else refused with the command that does it.

    Raises:
        ModelError: names what is missing, damaged or unsupported, and the fix.
    """
    data_dir = data_dir or default_data_dir(os.environ)
    if model in KNOWN_MODELS:
        if not (can_pull or is_pulled(model, data_dir)):
            raise ModelError(f"model {model!r} is not here yet; run `moonpool pull {model}`")
        return open_model_dir(pull(model, data_dir, progress), name=model, data_dir=data_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_model_dir(path.resolve(), name=path.resolve().name, data_dir=data_dir)
    if path.is_file() and path.suffix == ".gguf":
        target = _converted(path, data_dir, progress)
        return open_model_dir(target, name=path.stem, data_dir=data_dir)
    if path.exists():
        raise ModelError(f"{model} is neither a directory nor a .gguf file")
    raise ModelError(
        f"model {model!r} was not found: give a directory with config.json and safetensors, "
        f"a .gguf file, or one of the known names: {', '.join(KNOWN_MODELS)}"
    )


def open_model_dir(path: Path, *, name: str, data_dir: Path) -> ModelDir:
    """Checks that a directory is a complete model of a supported architecture."""
    config = read_model_config(path)
    weight_files = _weight_files(path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path / 'tokenizer.json'} is missing; a model needs the `tokenizers` library's form"
        )
    return ModelDir(
        name=name,
        path=path,
        config=config,
        weight_files=weight_files,
        fingerprint=config.fingerprint(_weight_hashes(path, weight_files, data_dir)),
    )


def _converted(source: Path, data_dir: Path, progress: Progress) -> Path:
    known = _cached_hash(source.resolve(), data_dir, progress)
    target = data_dir / "models" / f"gguf-{known[:16]}"
    with exclusive(data_dir, target.name):
        manifest = read_manifest(target)
        if manifest is None or manifest.source_sha256 != known:
            convert_gguf(source, target, source_sha256=known, progress=progress)
    return target


def _weight_files(path: Path) -> tuple[Path, ...]:
    index_path = path / _INDEX_FILE
    if (path / _SINGLE_FILE).is_file():
        names = {_SINGLE_FILE}
    elif index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path}: weight_map must name a file for each tensor")
        names = {str(name) for name in weight_map.values()}
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index_path}: weight files must lie beside the index")
    else:
        other = sorted(file.name for file in path.glob("*.bin"))
        hint = f" ({other[0]} is a pickle, which is never read; convert it)" if other else ""
        raise ModelError(f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}{hint}")
    files = tuple(path / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, but {_INDEX_FILE} names it; copy it again")
    return files


def _weight_hashes(path: Path, files: tuple[Path, ...], data_dir: Path) -> dict[str, str]:
    # Only what was converted here says truly what it holds; a copy may have been changed since.
    is_ours = path.resolve().is_relative_to((data_dir / "models").resolve())
    manifest = read_manifest(path) if is_ours else None
    hashes = {}
    for file in files:
        if manifest is not None and file.name in manifest.files:
            hashes[file.name] = manifest.files[file.name].sha256
        else:
            hashes[file.name] = _cached_hash(file, data_dir, no_progress)
    return hashes


def _cached_hash(file: Path, data_dir: Path, progress: Progress) -> str:
    """SHA-256 of a file, remembered in the data directory for as long as the file is not touched."""
    state = _FileState.of(file.stat())
    key = hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    entry_path = data_dir / "hashes" / f"{key}.json"
    try:
        known = msgspec.json.decode(entry_path.read_bytes(), type=_KnownHash)
    except (OSError, msgspec.MsgspecError):
        known = None
    if known and known.state == state:
        return known.sha256
    sha256 = sha256_of_file(file, progress)
    with atomic_write(entry_path) as out:
        out.write(msgspec.json.encode(_KnownHash(state=state, sha256=sha256)))
    return sha256
