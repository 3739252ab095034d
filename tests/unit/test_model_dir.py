"""resolve: names, directories and GGUF files; what is missing is said with the fix."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from moonpool.errors import ModelError
from moonpool.hub import resolve
from moonpool.hub.manifest import MANIFEST_NAME
from moonpool.hub.tokenizer import Tokenizer
from support.gguf_file import write_gguf
from support.tiny_llama import TinyLlama, write_tiny_llama


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny", TinyLlama())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_directory(tiny: Path, home: Path) -> None:
    found = resolve(str(tiny), data_dir=home)
    assert (found.name, found.path) == ("tiny", tiny)
    assert found.weight_files == (tiny / "model.safetensors",)


def test_shards_through_their_index(tmp_path: Path, home: Path) -> None:
    path = write_tiny_llama(tmp_path / "sharded", TinyLlama(num_shards=3))
    assert len(resolve(str(path), data_dir=home).weight_files) == 3
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.safetensors is missing"):
        resolve(str(path), data_dir=home)


def test_the_fingerprint_follows_the_content_and_not_the_place(tiny: Path, home: Path) -> None:
    first = resolve(str(tiny), data_dir=home).fingerprint
    copy = tiny.parent / "copy"
    shutil.copytree(tiny, copy)
    assert resolve(str(copy), data_dir=home).fingerprint == first
    write_tiny_llama(tiny, TinyLlama(seed=9))
    assert resolve(str(tiny), data_dir=home).fingerprint != first


def test_a_foreign_directorys_own_claims_are_not_believed(tiny: Path, home: Path) -> None:
    source = tiny.parent / "tiny.gguf"
    write_gguf(source, tiny, TinyLlama())
    converted = resolve(str(source), data_dir=home)
    # Copied out and tuned further: other weights of the same size, beside the old manifest.
    tuned = tiny.parent / "tuned"
    shutil.copytree(converted.path, tuned)
    assert resolve(str(tuned), data_dir=home).fingerprint == converted.fingerprint
    weights = tuned / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert resolve(str(tuned), data_dir=home).fingerprint != converted.fingerprint


def test_hashes_are_read_once(tiny: Path, home: Path) -> None:
    first = resolve(str(tiny), data_dir=home).fingerprint
    # What is remembered is believed, right or wrong, as long as nobody touches the file.
    (entry,) = (home / "hashes").iterdir()
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "sha256": "0" * 64}))
    assert resolve(str(tiny), data_dir=home).fingerprint != first
    entry.write_text("{}")
    assert resolve(str(tiny), data_dir=home).fingerprint == first


def test_other_weights_are_seen_whatever_their_size_and_time(tiny: Path, home: Path) -> None:
    first = resolve(str(tiny), data_dir=home).fingerprint
    weights = tiny / "model.safetensors"
    status = weights.stat()
    # As rsync --times or cp --preserve leave a file that was trained further.
    tuned = tiny / "tuned"
    tuned.write_bytes(weights.read_bytes()[:-1] + b"!")
    tuned.rename(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    assert resolve(str(tiny), data_dir=home).fingerprint != first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "config.json is missing: not a Hugging Face model directory"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_missing_file(tiny: Path, home: Path, name: str, words: str) -> None:
    (tiny / name).unlink()
    with pytest.raises(ModelError, match=words):
        resolve(str(tiny), data_dir=home)


def test_a_pickle_is_not_read(tiny: Path, home: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle, which is never read"):
        resolve(str(tiny), data_dir=home)


def test_unknown_and_not_yet_pulled_names(home: Path) -> None:
    with pytest.raises(ModelError, match=r"'nothing' was not found.*smollm2-135m"):
        resolve("nothing", data_dir=home)
    with pytest.raises(ModelError, match="run `moonpool pull smollm2-135m`"):
        resolve("smollm2-135m", data_dir=home)


def test_a_gguf_is_converted_once_into_the_same_model(tiny: Path, home: Path) -> None:
    source = tiny.parent / "tiny.gguf"
    write_gguf(source, tiny, TinyLlama())
    found = resolve(str(source), data_dir=home)
    assert found.name == "tiny"
    original = load_file(tiny / "model.safetensors")
    converted = load_file(found.path / "model.safetensors")
    assert original.keys() == converted.keys()
    assert all((original[name] == converted[name]).all() for name in original)
    text = "What's 1,234 + 5? ünïcödé"
    expected = Tokenizer.load(tiny).encode(text)
    assert Tokenizer.load(found.path).encode(text) == expected
    written = (found.path / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(source), data_dir=home) == found
    assert (found.path / "model.safetensors").stat().st_mtime_ns == written


def test_a_quantised_gguf_gives_its_dequantised_values(tiny: Path, home: Path) -> None:
    source = tiny.parent / "tiny.gguf"
    write_gguf(source, tiny, TinyLlama(), is_quantized=True)
    converted = load_file(resolve(str(source), data_dir=home).path / "model.safetensors")
    original = load_file(tiny / "model.safetensors")
    for name, value in original.items():
        assert abs(value - converted[name]).max() <= abs(value).max() / 127


def test_a_conversion_that_was_cut_off_is_made_again(tiny: Path, home: Path) -> None:
    source = tiny.parent / "tiny.gguf"
    write_gguf(source, tiny, TinyLlama())
    path = resolve(str(source), data_dir=home).path
    expected = (path / "model.safetensors").read_bytes()
    (path / MANIFEST_NAME).unlink()
    (path / "model.safetensors").write_bytes(b"half")
    assert (resolve(str(source), data_dir=home).path / "model.safetensors").read_bytes() == expected


def test_a_damaged_gguf(tiny: Path, home: Path) -> None:
    source = tiny.parent / "bad.gguf"
    source.write_bytes(b"GGUF but no more")
    with pytest.raises(ModelError, match=r"bad.gguf is not a readable GGUF file"):
        resolve(str(source), data_dir=home)
