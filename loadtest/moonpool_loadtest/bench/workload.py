"""What is asked: prompts of random tokens or words, from a seed.

Random prompts isolate prefill and decode: they share no prefix but the one that is asked for, and say
nothing about tokenizers or speculation on real text.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass

from moonpool.errors import InvalidRequestError
from moonpool.inference.generation import TextPrompt, TokenPrompt

#: Common enough to be one token each in most vocabularies.
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea kid body information back parent face others level office door health
person art war history party result change morning reason
"""
_WORDS = tuple(_WORD_LIST.split())


class PromptKind(enum.StrEnum):
    WORDS = "words"
    #: Exact lengths; needs the size of the vocabulary.
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of whole lengths of at least 1."""

    low: int
    high: int
    #: Of a lognormal distribution, clipped to [low, high]; None: uniform over [low, high].
    mean: float | None = None
    cv: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        """`512`, `128:1024` (uniform, both included) or `lognormal:512:0.8` (mean and CV).

        Raises:
            InvalidRequestError: None of these.
        """
        try:
            if text.startswith("lognormal:"):
                mean, cv = (float(part) for part in text.split(":")[1:])
                if not (mean >= 1 and cv > 0 and math.isfinite(mean * cv)):
                    raise ValueError
                return Lengths(low=1, high=round(mean * 20), mean=mean, cv=cv)
            low, _, high = text.partition(":")
            lengths = Lengths(low=int(low), high=int(high or low))
            if not 1 <= lengths.low <= lengths.high:
                raise ValueError
        except ValueError:
            raise InvalidRequestError(
                f"{text}: a length is N, LOW:HIGH or lognormal:MEAN:CV, of at least 1."
            ) from None
        return lengths

    def draw(self, rng: random.Random) -> int:
        if self.mean is None:
            return rng.randint(self.low, self.high)
        variance = math.log1p(self.cv**2)
        drawn = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(max(round(drawn), self.low), self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Prompts and lengths of a run."""

    kind: PromptKind = PromptKind.WORDS
    #: In tokens or words, shared prefix not included.
    input_lengths: Lengths = Lengths(low=128, high=128)
    output_lengths: Lengths = Lengths(low=32, high=32)
    #: Each prompt begins with one of `num_prefixes` prefixes of this length; 0: none.
    prefix_length: int = 0
    num_prefixes: int = 1
    #: For TOKENS.
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    index: int
    #: Seconds from the start of the run.
    scheduled_s: float
    prompt: TextPrompt | TokenPrompt
    max_tokens: int


def make_requests(
    spec: WorkloadSpec, schedule: tuple[float, ...], *, seed: int, stream: str = "measured"
) -> tuple[BenchRequest, ...]:
    """One request per arrival.

    A request depends on the seed, the stream and its index only: a longer run begins as a shorter
    one does, and warm-up requests, of a stream of their own, leave nothing in a cache that helps.

    Raises:
        InvalidRequestError: TOKENS without a vocabulary.
    """
    prefixes = [
        _make_units(spec, spec.prefix_length, random.Random(f"{seed}/{stream}/prefix/{number}"))
        for number in range(spec.num_prefixes)
    ]
    requests = []
    for index, scheduled_s in enumerate(schedule):
        rng = random.Random(f"{seed}/{stream}/{index}")
        num_input = spec.input_lengths.draw(rng)
        max_tokens = spec.output_lengths.draw(rng)
        units = [*rng.choice(prefixes), *_make_units(spec, num_input, rng)]
        requests.append(
            BenchRequest(
                index=index,
                scheduled_s=scheduled_s,
                prompt=_make_prompt(spec, units),
                max_tokens=max_tokens,
            )
        )
    return tuple(requests)


def _make_units(spec: WorkloadSpec, count: int, rng: random.Random) -> list[int]:
    """Token ids, or indexes of words."""
    if spec.kind is PromptKind.WORDS:
        return rng.choices(range(len(_WORDS)), k=count)
    if spec.vocab_size is None:
        raise InvalidRequestError("Prompts of tokens need --vocab-size.", param="vocab_size")
    # Special tokens come first in most vocabularies.
    return rng.choices(range(min(100, spec.vocab_size // 2), spec.vocab_size), k=count)


def _make_prompt(spec: WorkloadSpec, units: list[int]) -> TextPrompt | TokenPrompt:
    if spec.kind is PromptKind.TOKENS:
        return TokenPrompt(token_ids=tuple(units))
    return TextPrompt(text=" ".join(_WORDS[unit] for unit in units))
