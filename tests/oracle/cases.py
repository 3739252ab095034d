"""The oracle's models and prompts, and the form of its files.

Each file holds, for every prompt, transformers' greedy tokens in float32 and its margin (highest minus
second logit) at each of them. Prompts are token ids: how a text becomes ids is not what is tested.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from support.tiny_llama import LLAMA3_ROPE, TinyLlama

HERE = Path(__file__).parent
SMOLLM2_FILE = HERE / "smollm2_greedy.json"
TINY_FILE = HERE / "tiny_greedy.json"

#: A differing token is excused where the oracle's own margin is smaller: a tie within float32.
NEAR_TIE = 1e-4

NUM_NEW_TOKENS = 64
TEXT_LENGTHS = (
    *(1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 64, 100, 128),
    *(255, 256, 257, 512, 777, 1024, 2048, 4000),
)
CHATS = (
    "What is the capital of France, and which river flows through it?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain, step by step, how to compute 17 * 23 + 4.",
)

NUM_TINY_TOKENS = 32
TINY_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 150)
TINY_MODELS = {
    "plain": TinyLlama(),
    "tied, llama3 rope": TinyLlama(
        seed=1, num_layers=2, is_embedding_tied=True, rope_scaling=LLAMA3_ROPE
    ),
    "biases, no grouping, three shards": TinyLlama(
        seed=2, has_bias=True, num_kv_heads=4, num_shards=3
    ),
    "one KV head, linear rope": TinyLlama(
        seed=3, num_kv_heads=1, head_dim=32, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ),
}


class OracleCase(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    prompt: list[int]
    tokens: list[int]
    margins: list[float]


class OracleModel(msgspec.Struct, frozen=True, kw_only=True):
    #: Fingerprint of the model directory that the oracle read.
    fingerprint: str
    cases: list[OracleCase]


class OracleFile(msgspec.Struct, frozen=True, kw_only=True):
    transformers: str
    torch: str
    models: dict[str, OracleModel]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer compares with the oracle's."""

    #: Index of the first token that differs, or None.
    first_difference: int | None
    #: The oracle's margin there.
    margin: float | None = None

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None

    @property
    def is_excused(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE


def compare(case: OracleCase, tokens: list[int]) -> Comparison:
    for index, (expected, found) in enumerate(zip(case.tokens, tokens, strict=True)):
        if expected != found:
            return Comparison(first_difference=index, margin=case.margins[index])
    return Comparison(first_difference=None)


def read_oracle(path: Path) -> OracleFile:
    return msgspec.json.decode(path.read_bytes(), type=OracleFile)


def tiny_prompts(model: TinyLlama) -> list[list[int]]:
    rng = np.random.Generator(np.random.PCG64(1000 + model.seed))
    return [rng.integers(3, model.vocab_size, length).tolist() for length in TINY_LENGTHS]
