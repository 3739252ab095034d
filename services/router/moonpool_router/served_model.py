"""ServedModel: the model as the doors need it: text in, text out, limits, defaults. No weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.errors import InvalidRequestError
from moonpool.hub.chat_template import ChatTemplate
from moonpool.hub.detokenizer import Detokenizer
from moonpool.hub.model_config import read_json
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import (
    ChatPrompt,
    Prompt,
    SamplingDefaults,
    TextPrompt,
    TokenPrompt,
    check_prompt_length,
    check_prompt_token_ids,
    check_text_length,
)
from moonpool.wire.fields import MAX_TOKENS

#: Threads that render and tokenize: a prompt of megabytes must not hold up the others.
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What does not change while the model is served."""

    name: str
    #: Hex SHA-256 of what decides the model's values.
    fingerprint: str
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults


class ServedModel:
    """Close it when the last prompt is tokenized."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, directory: Path) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._directory = directory
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._of_thread = threading.local()

    @classmethod
    def load(cls, model: str, *, data_dir: Path, served_name: str | None = None) -> ServedModel:
        """Find the model and read its tokenizer. Blocks.

        Raises:
            ModelError: It is missing, damaged or not supported.
        """
        directory = resolve(model, data_dir=data_dir)
        tokenizer = Tokenizer.load(directory.path)
        facts = ModelFacts(
            name=served_name or directory.name,
            fingerprint=directory.fingerprint,
            vocab_size=directory.config.vocab_size,
            # Longer prompts and answers do not fit into a message to a worker.
            max_model_len=min(directory.config.max_positions, MAX_TOKENS),
            defaults=_sampling_defaults(directory),
        )
        return cls(facts, tokenizer, directory.path)

    @property
    def executor(self) -> Executor:
        """The threads of prompts: for other work on one."""
        return self._executor

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def token_ids(self, prompt: Prompt, *, max_model_len: int) -> tuple[int, ...]:
        """The prompt as tokens, in a thread where that takes time. What is too long is not walked through.

        Raises:
            InvalidRequestError: Empty, too long, an id outside the vocabulary, or messages that the
                chat template does not take.
        """
        match prompt:
            case TextPrompt(text=text):
                self._check_length(len(text), max_model_len)
                token_ids = await self._in_thread(self._encode_text, text)
            case ChatPrompt(messages=messages):
                self._check_length(sum(len(each.content) for each in messages), max_model_len)
                token_ids = await self._in_thread(self._encode_chat, prompt)
            case TokenPrompt():
                token_ids = prompt.token_ids
        check_prompt_length(len(token_ids), max_model_len=max_model_len)
        check_prompt_token_ids(token_ids, vocab_size=self.facts.vocab_size)
        return token_ids

    def detokenizer(self, prompt: Prompt, token_ids: Sequence[int]) -> Detokenizer:
        """For one answer to `prompt`, which is `token_ids`: a completion goes on with its prompt's text, a
        chat's answer is a text of its own."""
        return self._tokenizer.detokenizer(
            after=() if isinstance(prompt, ChatPrompt) else token_ids
        )

    def _check_length(self, num_characters: int, max_model_len: int) -> None:
        # Normalizers that shorten a text do so to letters, whose tokens are far from the longest.
        check_text_length(
            num_characters,
            max_model_len=max_model_len,
            max_token_bytes=self._tokenizer.max_token_bytes,
        )

    async def _in_thread(self, encode: Any, argument: Any) -> tuple[int, ...]:  # Any: one of two
        loop = asyncio.get_running_loop()
        token_ids: tuple[int, ...] = await loop.run_in_executor(self._executor, encode, argument)
        return token_ids

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def _encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        if not prompt.messages:
            raise InvalidRequestError(
                "messages must hold at least one message.", code="empty_array", param="messages"
            )
        rendered = self._template().render(
            [{"role": message.role, "content": message.content} for message in prompt.messages]
        )
        return tuple(self._tokenizer.encode_rendered(rendered))

    def _template(self) -> ChatTemplate:
        """This thread's own: a template is not thread-safe."""
        template: ChatTemplate | None = getattr(self._of_thread, "template", None)
        if template is None:
            template = ChatTemplate.load(
                self._directory, special_tokens=self._tokenizer.special_tokens
            )
            if template is None:
                raise InvalidRequestError(
                    f"The model {self.facts.name} has no chat template: send text or tokens.",
                    code="unsupported_content",
                    param="messages",
                )
            self._of_thread.template = template
        return template


def _sampling_defaults(directory: ModelDir) -> SamplingDefaults:
    """Of generation_config.json, as vLLM takes them; OpenAI's where it is silent."""
    path = directory.path / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    silent = SamplingDefaults()
    temperature, top_p, top_k = (
        value if isinstance(value, int | float) and not isinstance(value, bool) else None
        for value in map(config.get, ("temperature", "top_p", "top_k"))
    )
    return SamplingDefaults(
        temperature=silent.temperature if temperature is None else float(temperature),
        top_p=silent.top_p if top_p is None else float(top_p),
        top_k=silent.top_k if top_k is None else int(top_k),
    )
