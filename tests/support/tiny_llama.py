"""A small random Llama on disk, for tests that need the real engine but no language.

It has what a real model directory has: config, safetensors, byte-level tokenizer, chat template and
generation_config. Weights come from numpy's PCG64, so a seed gives the same model everywhere. They are
scaled so that greedy answers wander: neither one token for ever nor a short cycle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyLlama:
    """Shape and seed of a tiny model."""

    seed: int = 0
    num_layers: int = 3
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 320
    max_positions: int = 2048
    is_embedding_tied: bool = False
    has_bias: bool = False
    num_shards: int = 1
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    eos_token_ids: tuple[int, ...] = (2,)


def write_tiny_llama(path: Path, model: TinyLlama | None = None) -> Path:
    """Writes the model's directory and returns it."""
    model = model or TinyLlama()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config(model), indent=2))
    generation = {"bos_token_id": 1, "eos_token_id": list(model.eos_token_ids)}
    (path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "tokenizer.json").write_text(make_tokenizer(model.vocab_size).to_str())
    _save(path, _weights(model), model.num_shards)
    return path


def _config(model: TinyLlama) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rope_theta": 10000.0,
        "rope_scaling": model.rope_scaling,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.is_embedding_tied,
        "attention_bias": model.has_bias,
        "mlp_bias": model.has_bias,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": model.eos_token_ids[0],
        "torch_dtype": "float32",
    }


def _weights(model: TinyLlama) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.Generator(np.random.PCG64(model.seed))
    hidden, middle = model.hidden_size, model.intermediate_size
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns)) * (gain / np.sqrt(columns))
        return values.astype(np.float32)

    def norm() -> npt.NDArray[np.float32]:
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    def bias(size: int) -> npt.NDArray[np.float32]:
        return (0.1 * rng.standard_normal(size)).astype(np.float32)

    # A tied head prefers the token it has just read; a small embedding leaves that to the layers.
    embedding_gain = np.sqrt(hidden) * (0.2 if model.is_embedding_tied else 1.0)
    weights = {
        "model.embed_tokens.weight": matrix(model.vocab_size, hidden, gain=embedding_gain),
        "model.norm.weight": norm(),
    }
    if not model.is_embedding_tied:
        weights["lm_head.weight"] = matrix(model.vocab_size, hidden, gain=3.0)
    for index in range(model.num_layers):
        prefix = f"model.layers.{index}"
        weights[f"{prefix}.input_layernorm.weight"] = norm()
        weights[f"{prefix}.post_attention_layernorm.weight"] = norm()
        # Sharp attention and strong MLPs: the next token depends on the whole context.
        for name, rows, columns, gain in (
            ("self_attn.q_proj", query, hidden, 2.0),
            ("self_attn.k_proj", kv, hidden, 2.0),
            ("self_attn.v_proj", kv, hidden, 2.0),
            ("self_attn.o_proj", hidden, query, 2.0),
            ("mlp.gate_proj", middle, hidden, 1.5),
            ("mlp.up_proj", middle, hidden, 1.5),
            ("mlp.down_proj", hidden, middle, 1.5),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns, gain)
            if model.has_bias:
                weights[f"{prefix}.{name}.bias"] = bias(rows)
    return weights


def _save(path: Path, weights: dict[str, npt.NDArray[np.float32]], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    names = sorted(weights)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Three special tokens, the 256 bytes, and common pairs up to the vocabulary's size."""
    vocab = {text: token_id for token_id, text in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges = []
    for pair in _PAIRS:
        if len(vocab) == vocab_size:
            break
        vocab[pair] = len(vocab)
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return tokenizer


#: "Ġ" is a space in a byte-level vocabulary.
_PAIRS = tuple(first + second for second in "aeiou" for first in "Ġbcdfghjklmnpqrstvwxyz")
