"""GGUF -> a directory in Hugging Face's form: float32 safetensors, config, tokenizer, chat template.

Weights are dequantised once and stored as float32, the exact values that the quantised file stands
for: the engine casts to its dtype when it loads, and a float32 engine equals any other that
dequantises the same file. Opening and dequantising a GGUF takes seconds; loading safetensors does not.

llama.cpp stores the rows of q and k permuted for its own rope (pairs side by side); they are put back
into the order of halves that config.json's readers expect.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moonpool.errors import ModelError
from moonpool.hub.data_dir import atomic_write
from moonpool.hub.gguf_metadata import GgufMetadata
from moonpool.hub.gguf_tokenizer import GgufTokenizer, build_tokenizer, read_gguf_tokenizer
from moonpool.hub.manifest import (
    CONVERTER_VERSION,
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    write_manifest,
)
from moonpool.hub.progress import Progress, no_progress
from moonpool.hub.safetensors_writer import write_float32

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

#: GGUF's architecture name -> the one in config.json.
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FREQS = "rope_freqs.weight"


def convert_gguf(
    source: Path, target: Path, *, source_sha256: str, progress: Progress = no_progress
) -> None:
    """Makes `target` from the file `source`; the manifest, written last, makes it complete.

    Raises:
        ModelError: damaged file, or an architecture, tensor or tokenizer that is not known.
    """
    # gguf takes a second to import, and only a conversion needs it.
    from gguf import GGUFReader
    from gguf.quants import dequantize

    progress("convert", 0, None)
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError(f"{source.name} is not a readable GGUF file: {error}") from error
    meta = GgufMetadata(reader.fields, source.name)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def dequantized(tensor: ReaderTensor) -> npt.NDArray[np.float32]:
        try:
            value = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"{source.name}: tensor {tensor.name}: {error}") from error
        return np.asarray(value, dtype=np.float32)

    rope_factors: list[float] | None = None
    if _ROPE_FREQS in tensors:
        rope_factors = [float(each) for each in dequantized(tensors.pop(_ROPE_FREQS)).reshape(-1)]
    gguf_names = {_hf_name(name, source.name): name for name in tensors}
    shapes = {
        hf: tuple(int(size) for size in reversed(tensors[gguf].shape))
        for hf, gguf in sorted(gguf_names.items())
    }
    config = _config(meta, shapes, rope_factors)
    tokenizer = read_gguf_tokenizer(meta)
    built_tokenizer = build_tokenizer(tokenizer)

    def values() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for hf in shapes:
            value = dequantized(tensors[gguf_names[hf]]).reshape(shapes[hf])
            if ".q_proj." in hf:
                value = _unpermute(hf, value, config["num_attention_heads"])
            elif ".k_proj." in hf:
                value = _unpermute(hf, value, config["num_key_value_heads"])
            yield hf, value

    (target / MANIFEST_NAME).unlink(missing_ok=True)
    weights = write_float32(
        target / "model.safetensors",
        shapes,
        values(),
        lambda done, total: progress("convert", done, total),
    )
    files = {"model.safetensors": weights}
    for name, text in (
        ("config.json", _json(config)),
        ("generation_config.json", _json(_generation_config(tokenizer))),
        ("tokenizer_config.json", _json(_tokenizer_config(meta, tokenizer))),
        ("tokenizer.json", built_tokenizer.to_str(pretty=False)),
    ):
        files[name] = _write_text(target / name, text)
    write_manifest(
        target,
        Manifest(converter_version=CONVERTER_VERSION, source_sha256=source_sha256, files=files),
    )


def _hf_name(name: str, file_name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    head, _, rest = name.partition(".")
    index, _, leaf = rest.partition(".")
    if head == "blk" and index.isdecimal() and leaf in _LAYER_NAMES:
        return f"model.layers.{int(index)}.{_LAYER_NAMES[leaf]}"
    raise ModelError(f"{file_name}: tensor {name} belongs to no architecture known here")


def _unpermute(
    name: str, value: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """[heads * dim, ...]: rows of each head from interleaved pairs to two halves."""
    if value.shape[0] % (2 * num_heads):
        raise ModelError(f"{name}: {value.shape[0]} rows are not those of {num_heads} heads")
    half = value.shape[0] // num_heads // 2
    pairs = value.reshape(num_heads, half, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def _config(
    meta: GgufMetadata, shapes: dict[str, tuple[int, ...]], rope_factors: list[float] | None
) -> dict[str, Any]:  # Any: JSON
    kind = meta.text("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {kind!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError("the GGUF file lacks the tensor token_embd.weight")
    num_heads = meta.count(f"{kind}.attention.head_count")
    hidden_size = meta.count(f"{kind}.embedding_length")
    head_dim = meta.count(f"{kind}.attention.key_length", max(1, hidden_size // num_heads))
    rope_dim = meta.count(f"{kind}.rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise ModelError(
            f"{kind}.rope.dimension_count = {rope_dim} is not supported; only the whole head's "
            f"{head_dim} is"
        )
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "num_hidden_layers": meta.count(f"{kind}.block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": meta.count(f"{kind}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count(f"{kind}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding[0],
        "max_position_embeddings": meta.count(f"{kind}.context_length"),
        "rope_theta": meta.number(f"{kind}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(meta, f"{kind}.rope", rope_factors),
        # The file holds a float32; its shortest decimal form is the number that was meant.
        "rms_norm_eps": float(str(np.float32(meta.number(_RMS_EPS.format(kind))))),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta.token_id("tokenizer.ggml.bos_token_id", embedding[0]),
        "eos_token_id": meta.token_id("tokenizer.ggml.eos_token_id", embedding[0]),
        "torch_dtype": "float32",
    }


_RMS_EPS = "{}.attention.layer_norm_rms_epsilon"


def _rope_scaling(
    meta: GgufMetadata, prefix: str, factors: list[float] | None
) -> dict[str, Any] | None:  # Any: JSON
    """As llama.cpp reads it (llama-model.cpp, load_hparams).

    Scaling is linear unless the file says otherwise, its factor 1 unless the file has one, under today's
    key or the old one; where there are factors by frequency too, both hold.
    """
    scaling = meta.text(f"{prefix}.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise ModelError(
            f"{prefix}.scaling.type = {scaling!r} is not supported; supported: none, linear"
        )
    if (gain := meta.number(f"{prefix}.scaling.attn_factor", 1.0)) != 1.0:
        raise ModelError(f"{prefix}.scaling.attn_factor = {gain} is not supported; only 1 is")
    old = meta.number(f"{prefix}.scale_linear", 0.0)
    # llama.cpp takes 0 for no scaling.
    factor = meta.number(f"{prefix}.scaling.factor", old) or 1.0
    if factor < 0:
        raise ModelError(f"{prefix}.scaling.factor = {factor} must be positive")
    if scaling == "none":
        factor = 1.0
    if factors is not None:
        return {"rope_type": "frequency_factors", "factors": [factor * each for each in factors]}
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _generation_config(tokenizer: GgufTokenizer) -> dict[str, Any]:  # Any: JSON
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.end_token_ids),
        "pad_token_id": tokenizer.pad_token_id,
    }


def _tokenizer_config(meta: GgufMetadata, tokenizer: GgufTokenizer) -> dict[str, Any]:  # Any: JSON
    def text_of(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.tokens[token_id]

    return {
        "add_bos_token": tokenizer.has_bos_prefix,
        "bos_token": text_of(tokenizer.bos_token_id),
        "eos_token": text_of(tokenizer.eos_token_id),
        "unk_token": text_of(tokenizer.unknown_token_id),
        "pad_token": text_of(tokenizer.pad_token_id),
        "chat_template": meta.optional_text("tokenizer.chat_template"),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write_text(path: Path, text: str) -> ManifestFile:
    data = text.encode()
    with atomic_write(path) as file:
        file.write(data)
    return ManifestFile(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
