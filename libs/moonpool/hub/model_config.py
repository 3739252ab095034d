"""ModelConfig: what the engine must know of a model, read from a Hugging Face directory and checked.

The architectures that exist are in SUPPORTED_ARCHITECTURES. Whatever in config.json would change the
values and is not implemented is refused by name: a wrong answer is worse than none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moonpool.errors import ModelError
from moonpool.kv.layout import KvDtype, KvLayout

#: Llama, Llama 2, Llama 3, SmolLM2 and everything else that calls itself by this name.
SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequencies scaled by wavelength (Llama 3.1, section 3 of its reference code)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """Frequency i divided by `factors[i]`: how a GGUF stores Llama 3's scaling."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. Sizes are counts of elements."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    is_embedding_tied: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    bos_token_id: int | None
    #: Tokens that end an answer: generation_config.json's, else config.json's.
    eos_token_ids: tuple[int, ...]

    def kv_layout(self, num_blocks: int, dtype: KvDtype, block_size: int = 16) -> KvLayout:
        """The default, block-major pool for all heads of this model."""
        return KvLayout.block_major(
            num_blocks=num_blocks,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_size=block_size,
        )

    def fingerprint(self, weight_sha256_by_name: dict[str, str]) -> str:
        """Hex SHA-256 of all that decides the model's values: shape and weight files' contents."""
        shape = asdict(self)
        # Where an answer ends does not change what the tokens' KV is.
        for name in ("bos_token_id", "eos_token_ids", "max_positions"):
            del shape[name]
        text = json.dumps([shape, sorted(weight_sha256_by_name.items())], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_model_config(directory: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        ModelError: a file is missing or not JSON, a value is out of range, or the architecture or an
            option of it is not supported; names the file and the key.
    """
    config = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(config, generation)


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON of others, checked where it is used
    """A JSON object from a model's directory, or a ModelError that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a Hugging Face model directory?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


# Any: raw JSON, every value is checked by the helpers below
def parse_model_config(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """See read_model_config."""
    architecture = _architecture(config)
    num_heads = _positive_int(config, "num_attention_heads")
    hidden_size = _positive_int(config, "hidden_size")
    num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
    head_dim = _positive_int(config, "head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim = {head_dim} must be even")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(
            f"config.json: hidden_act = {activation!r} is not supported; only 'silu' is"
        )
    if (parallel := config.get("pretraining_tp", 1)) != 1:
        raise ModelError(f"config.json: pretraining_tp = {parallel} is not supported; only 1 is")
    if "quantization_config" in config:
        raise ModelError(
            "config.json: quantization_config is not supported; use float32 or bfloat16 weights, "
            "or a GGUF file"
        )
    rope_theta, rope_scaling = _rope(config, head_dim)
    vocab_size = _positive_int(config, "vocab_size")
    return ModelConfig(
        architecture=architecture,
        num_layers=_positive_int(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=_positive_int(config, "max_position_embeddings", 2048),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
        is_embedding_tied=_flag(config, "tie_word_embeddings"),
        has_attention_bias=_flag(config, "attention_bias"),
        has_mlp_bias=_flag(config, "mlp_bias"),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(generation, "eos_token_id", vocab_size)
        or _token_ids(config, "eos_token_id", vocab_size),
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(
            f"config.json: architectures = {names!r} must name one; supported: {supported}"
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelError(f"architecture {names[0]!r} is not supported; supported: {supported}")
    return str(names[0])


def _rope(config: dict[str, Any], head_dim: int) -> tuple[float, RopeScaling | None]:
    """transformers 4 writes rope_theta and rope_scaling, 5 writes both as rope_parameters."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"config.json: rope parameters must be an object, not {parameters!r}")
    source = parameters if "rope_theta" in parameters else config
    theta = _positive_float(source, "rope_theta", 10_000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(factor=_positive_float(parameters, "factor"))
    if kind == "llama3":
        return theta, _llama3_scaling(parameters)
    if kind == "frequency_factors":
        return theta, FrequencyFactors(factors=_rope_factors(parameters, head_dim // 2))
    raise ModelError(
        f"config.json: rope_type = {kind!r} is not supported; supported: default, linear, llama3"
    )


def _llama3_scaling(parameters: dict[str, Any]) -> Llama3RopeScaling:
    scaling = Llama3RopeScaling(
        factor=_positive_float(parameters, "factor"),
        low_freq_factor=_positive_float(parameters, "low_freq_factor"),
        high_freq_factor=_positive_float(parameters, "high_freq_factor"),
        original_max_positions=_positive_int(parameters, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(
            f"config.json: high_freq_factor = {scaling.high_freq_factor} must be above "
            f"low_freq_factor = {scaling.low_freq_factor}"
        )
    return scaling


def _rope_factors(parameters: dict[str, Any], num_factors: int) -> tuple[float, ...]:
    factors = parameters.get("factors")
    if not isinstance(factors, list) or len(factors) != num_factors:
        raise ModelError(f"config.json: rope factors must be a list of {num_factors} numbers")
    return tuple(_positive_float({"rope factors": each}, "rope factors") for each in factors)


def _positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} = {value!r} must be a positive integer")
    return value


def _positive_float(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ModelError(f"config.json: {key} = {value!r} must be a positive number")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, (bool, type(None))):
        raise ModelError(f"config.json: {key} = {value!r} must be true or false")
    return bool(value)


def _token_ids(config: dict[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids, or nothing."""
    value = config.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ModelError(f"{key} = {value!r} must be a token id or a list of token ids")
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"{key} = {token_id} is not in the vocabulary of {vocab_size} tokens")
    return tuple(values)
