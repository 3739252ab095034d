"""A tiny model as llama.cpp would store it, for what reads GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

from support.tiny_llama import TinyLlama

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    source: Path,
    model: TinyLlama,
    *,
    is_quantized: bool = False,
    change: Callable[[gguf.GGUFWriter], None] = lambda _writer: None,
) -> Path:
    """Its names, q and k permuted, and whatever `change` adds or says otherwise; returns `path`.

    `source` is the directory that write_tiny_llama made of `model`.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(model.num_layers)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_context_length(model.max_positions)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocab = _vocabulary(source)
    assert len(vocab) == model.vocab_size, len(vocab)
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocab) - 3))
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in vocab[259:]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    _add_weights(writer, load_file(source / "model.safetensors"), model, is_quantized)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(source: Path) -> list[str]:
    vocab = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def _add_weights(
    writer: gguf.GGUFWriter,
    weights: dict[str, np.ndarray],
    model: TinyLlama,
    is_quantized: bool,
) -> None:
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            index, _, leaf = stem.removeprefix("model.layers.").partition(".")
            target = f"blk.{index}.{_NAMES[leaf]}.weight"
        else:
            target = f"{_NAMES[stem]}.weight"
        for part, heads in (("q_proj", model.num_heads), ("k_proj", model.num_kv_heads)):
            if part in name:
                halves = value.reshape(heads, 2, -1, value.shape[1])
                value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if is_quantized and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, value)
