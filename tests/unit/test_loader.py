"""What is wrong with a model's weights is said by file and tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moonpool.engine.loader import load_model
from moonpool.errors import ModelError
from moonpool.native import kernels
from support.engine import open_tiny
from support.tiny_llama import TinyLlama, write_tiny_llama

QUERY = "model.layers.0.self_attn.q_proj.weight"


def load_changed(tmp_path: Path, change) -> None:
    path = write_tiny_llama(tmp_path / "tiny", TinyLlama(num_layers=1))
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")
    load_model(open_tiny(path), "float32", kernels=kernels())


def test_loads_what_it_knows_and_ignores_old_buffers(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load_changed(tmp_path, lambda weights: weights.update(extra))


def test_a_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{QUERY} is missing in model.safetensors"):
        load_changed(tmp_path, lambda weights: weights.pop(QUERY))


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has shape \[2, 64\], but config.json calls for"):
        load_changed(tmp_path, lambda w: w.update({QUERY: np.ones((2, 64), np.float32)}))


def test_an_unknown_tensor(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(ModelError, match=r"q_norm.weight .* is not part of the architecture"):
        load_changed(tmp_path, lambda weights: weights.update(extra))


def test_integers_are_not_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not floating point"):
        load_changed(tmp_path, lambda w: w.update({QUERY: w[QUERY].astype(np.int32)}))


def test_a_damaged_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny", TinyLlama(num_layers=1))
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        load_model(open_tiny(path), "float32", kernels=kernels())
