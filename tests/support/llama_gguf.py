"""A model directory's weights as a GGUF file, for llama.cpp. Without a tokenizer: ids go in and out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from moonpool.hub import ModelDir

#: In GGUF's words, by what follows `model.layers.N.` in a Llama.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(directory: ModelDir, target: Path, *, precision: str) -> None:
    """Matrices rounded to `precision` (bf16, f16 or f32), norms in float32."""
    # gguf takes a second to import.
    import gguf
    from gguf.quants import quantize

    config = directory.config
    kind = gguf.GGMLQuantizationType[precision.upper()]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for file in directory.weight_files:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name == "lm_head.weight" and config.is_embedding_tied:
                    continue
                values = tensors.get_tensor(name).astype(np.float32)
                if ".q_proj." in name:
                    values = _permuted(values, config.num_heads)
                elif ".k_proj." in name:
                    values = _permuted(values, config.num_kv_heads)
                if values.ndim == 1:
                    writer.add_tensor(_gguf_name(name), values)
                else:
                    writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, _, end = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{end}"
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{end}"


def _permuted(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp rotates neighbours, where others rotate halves."""
    size = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, size // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
