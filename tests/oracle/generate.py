"""Makes the oracle's files with transformers: `python tests/oracle/generate.py`.

Run by hand when a case is added, after `pip install -e '.[dev,oracle]'` and
`moonpool pull smollm2-135m`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch
import transformers
from oracle import cases
from oracle.cases import OracleCase, OracleFile, OracleModel
from tokenizers import Tokenizer

from moonpool.hub import ModelDir, resolve
from support.engine import open_tiny
from support.tiny_llama import write_tiny_llama

_LICENSE = Path(__file__).parents[2] / "LICENSE"


def main() -> None:
    torch.set_num_threads(1)
    tiny = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, model) in enumerate(cases.TINY_MODELS.items()):
            directory = open_tiny(write_tiny_llama(Path(scratch) / str(number), model))
            prompts = {str(len(ids)): ids for ids in cases.tiny_prompts(model)}
            tiny[name] = _ask(directory, prompts, cases.NUM_TINY_TOKENS)
    _write(cases.TINY_FILE, tiny)

    directory = resolve("smollm2-135m")
    answers = _ask(directory, _smollm2_prompts(directory), cases.NUM_NEW_TOKENS)
    _write(cases.SMOLLM2_FILE, {"smollm2-135m": answers})


def _smollm2_prompts(directory: ModelDir) -> dict[str, list[int]]:
    tokenizer = Tokenizer.from_file(str(directory.path / "tokenizer.json"))
    paragraphs = _LICENSE.read_text().split("\n\n")
    # Forwards, then backwards: long enough for the longest prompt, and not a plain repetition.
    text = "\n\n".join(paragraphs + paragraphs[::-1])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts = {}
    for length in cases.TEXT_LENGTHS:
        # Each prompt starts elsewhere, so that no two share their first block.
        start = 7 * length % 1000 if length < 2048 else 0
        prompts[f"text of {length}"] = ids[start : start + length]
        assert len(prompts[f"text of {length}"]) == length, (length, len(ids))
    for number, question in enumerate(cases.CHATS):
        chat = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            f"Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompts[f"chat {number}"] = tokenizer.encode(chat, add_special_tokens=False).ids
    return prompts


def _ask(directory: ModelDir, prompts: dict[str, list[int]], num_tokens: int) -> OracleModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32)
    model.eval()
    answers = []
    for name, prompt in prompts.items():
        tokens, margins = _greedy(model, prompt, num_tokens)
        answers.append(OracleCase(name=name, prompt=prompt, tokens=tokens, margins=margins))
        sys.stderr.write(f"{name}: smallest margin {min(margins):.2e}\n")
    return OracleModel(fingerprint=directory.fingerprint, cases=answers)


@torch.inference_mode()
def _greedy(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    margins: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(num_tokens):
        out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        top = out.logits[0, -1].double().topk(2)
        tokens.append(int(out.logits[0, -1].argmax()))
        margins.append(float(f"{float(top.values[0] - top.values[1]):.4g}"))
        inputs = torch.tensor([[tokens[-1]]])
    return tokens, margins


def _write(path: Path, models: dict[str, OracleModel]) -> None:
    file = OracleFile(
        transformers=transformers.__version__, torch=str(torch.__version__), models=models
    )
    path.write_bytes(msgspec.json.encode(file) + b"\n")


if __name__ == "__main__":
    main()
