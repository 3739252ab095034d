"""A request as a client states it, before tokens, and what the client gets back.

Every door (gRPC, HTTP) turns its own format into a GenerationRequest and an iterator of
GenerationEvents into its own answer. `resolve_sampling` holds the one check of every value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.errors import InvalidRequestError
from moonpool.ids import RequestId
from moonpool.inference.output import FinishReason
from moonpool.inference.request import DEFAULT_TENANT
from moonpool.inference.sampling import SamplingParams

#: OpenAI and vLLM allow four.
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 256
#: Far more than any model has; each is compared with each token of an answer.
MAX_STOP_TOKEN_IDS = 1_024
#: Of one chat, and parts of one message.
MAX_MESSAGES = 4_096
MAX_CACHE_SALT_LENGTH = 1024
#: Of a client's own name for its request; the rest is cut off.
MAX_CLIENT_REQUEST_ID_LENGTH = 128
#: By the word that a client may use, the one that chat templates know. `developer` is OpenAI's newer word for
#: `system`.
CHAT_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What the client said about sampling; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where the client says nothing: the model's generation_config, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One question. `options` are not checked yet; the prompt is not tokenized yet."""

    prompt: Prompt
    #: Empty: the one model that is served.
    model: str = ""
    options: SamplingOptions = SamplingOptions()
    #: Whose it is, as the door says, never the client itself.
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    #: The client's own label, for logs; the request id is minted by the router.
    client_request_id: str = ""
    #: Remaining time when the request arrived; None: the router's default.
    deadline_s: float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer cost."""

    num_prompt_tokens: int
    #: Tokens drawn for the answer, the one that ended it included.
    num_completion_tokens: int
    #: Prompt tokens whose KV was not computed for this request, by any of its attempts.
    num_cached_tokens: int
    #: Of those, how many a worker read from another one that held them ...
    num_peer_tokens: int = 0
    #: ... and how many from a store; the rest it held itself.
    num_store_tokens: int = 0

    @property
    def num_device_tokens(self) -> int:
        """Of the cached ones, those that lay in the pool of the worker that prefilled."""
        return self.num_cached_tokens - self.num_peer_tokens - self.num_store_tokens

    @property
    def num_cached_tokens_by_source(self) -> dict[str, int]:
        """Sums to `num_cached_tokens`. Every source there is has its key."""
        return {
            "device": self.num_device_tokens,
            "peer": self.num_peer_tokens,
            "store": self.num_store_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time to the first token, from the request's arrival, in parts that sum to it."""

    ttft_ms: float
    ttft_parts_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSummary:
    """Where a request ran."""

    prefill_worker: str
    decode_worker: str
    num_attempts: int
    #: Why: local or remote prefill, and the terms of the decision.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """More of the answer. Chunks join without gap or overlap, in text and in token positions.

    The text of a token may come later than its id (half a character, a possible stop string).
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    #: Position of the first of `token_ids` in the answer.
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDone:
    """The answer is complete. Always the last event; a failure raises instead."""

    request_id: RequestId
    model: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    placement: PlacementSummary


GenerationEvent = GenerationChunk | GenerationDone


def resolve_sampling(
    options: SamplingOptions,
    *,
    defaults: SamplingDefaults,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    minted_seed: int,
) -> SamplingParams:
    """Check every value and fill in what was not said.

    A `top_k` beyond the vocabulary keeps all of it, so it becomes `vocab_size`. A stop token that is
    named twice counts once.

    Args:
        minted_seed: 64 bits for a request that brought no seed, so that a replay draws the same.

    Raises:
        InvalidRequestError: Names the field (`param`) and what is allowed.
    """
    temperature = _in_range(
        "temperature", options.temperature, defaults.temperature, low=0.0, high=2.0
    )
    top_p = _in_range("top_p", options.top_p, defaults.top_p, low=0.0, high=1.0)
    if top_p == 0.0:
        raise InvalidRequestError("top_p must be in (0, 1], got 0.", param="top_p")
    top_k = defaults.top_k if options.top_k is None else options.top_k
    if top_k < -1:
        raise InvalidRequestError(
            f"top_k must be -1 or 0 (off) or at least 1, got {top_k}.", param="top_k"
        )
    seed = minted_seed if options.seed is None else options.seed
    if options.seed is not None and not _INT64_MIN <= seed <= _INT64_MAX:
        raise InvalidRequestError("seed must be a signed 64-bit integer.", param="seed")
    check_stop(options.stop)
    _check_stop_token_ids(options.stop_token_ids, vocab_size)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=min(max(top_k, 0), vocab_size),
        seed=seed & (2**64 - 1),
        max_tokens=_resolve_max_tokens(options.max_tokens, num_prompt_tokens, max_model_len),
        ignore_eos=options.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys(options.stop_token_ids)),
    )


def chat_role(said: str, *, param: str) -> str:
    """The role of a message as chat templates know it.

    Raises:
        InvalidRequestError: There is no such role; names `param`.
    """
    role = CHAT_ROLES.get(said)
    if role is None:
        raise InvalidRequestError(
            f"{param} is {said[:64]!r}; allowed are {', '.join(CHAT_ROLES)}.", param=param
        )
    return role


def check_stop(stop: tuple[str, ...]) -> None:
    """Raises InvalidRequestError unless there are at most four, each of 1 to 256 characters."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}.", param="stop"
        )
    if any(not 0 < len(text) <= MAX_STOP_LENGTH for text in stop):
        raise InvalidRequestError(
            f"Each stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop"
        )


def check_cache_salt(cache_salt: str) -> None:
    """Raises InvalidRequestError for more than 1,024 characters; empty means none."""
    if len(cache_salt) > MAX_CACHE_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt may have {MAX_CACHE_SALT_LENGTH} characters, got {len(cache_salt)}.",
            param="cache_salt",
        )


def check_prompt_token_ids(token_ids: tuple[int, ...], *, vocab_size: int) -> None:
    """Raises InvalidRequestError for an empty prompt or an id outside the vocabulary."""
    if not token_ids:
        raise InvalidRequestError(
            "The prompt is empty: send at least one token.", code="empty_prompt", param="prompt"
        )
    worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequestError(
            f"Token ids must lie in [0, {vocab_size}), got {worst}.",
            code="invalid_token_id",
            param=f"prompt[{token_ids.index(worst)}]",
        )


def check_prompt_length(num_prompt_tokens: int, *, max_model_len: int) -> None:
    """Raises InvalidRequestError unless one more token fits behind the prompt."""
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {num_prompt_tokens} input tokens. Shorten the prompt.",
            code="context_length_exceeded",
            param="prompt",
        )


def check_text_length(num_characters: int, *, max_model_len: int, max_token_bytes: int) -> None:
    """Raises InvalidRequestError for a text that is too long whatever its tokens are.

    Args:
        max_token_bytes: Of the longest token in the vocabulary. A character has at least one byte, so
            the text has at least `num_characters / max_token_bytes` tokens.
    """
    if num_characters > max_model_len * max_token_bytes:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"has {num_characters} characters, which are more. Shorten the prompt.",
            code="context_length_exceeded",
            param="prompt",
        )


def _in_range(name: str, value: float | None, default: float, *, low: float, high: float) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be in [{low:g}, {high:g}], got {value}.", param=name
        )
    return value


def _check_stop_token_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}.",
            param="stop_token_ids",
        )
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids must lie in [0, {vocab_size}), got {token_id}.",
                param="stop_token_ids",
            )


def _resolve_max_tokens(wanted: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """An explicit value that does not fit is refused; silence means the rest of the context."""
    check_prompt_length(num_prompt_tokens, max_model_len=max_model_len)
    room = max_model_len - num_prompt_tokens
    if wanted is None:
        return room
    if wanted < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {wanted}.", param="max_tokens"
        )
    if wanted > room:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you asked "
            f"for {num_prompt_tokens} input and {wanted} output tokens. Lower max_tokens to "
            f"{room} or shorten the prompt.",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return wanted
