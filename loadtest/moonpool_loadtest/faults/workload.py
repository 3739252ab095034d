"""The requests that faults are tried on, and how their answers are compared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from moonpool.errors import MoonpoolError
from moonpool.inference.generation import (
    GenerationChunk,
    GenerationDone,
    GenerationRequest,
    SamplingOptions,
    TokenPrompt,
)
from moonpool.rpc.generate import open_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request whose tokens are known from a run without faults."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    #: None is greedy.
    seed: int | None = None

    def request(self, *, deadline_s: float) -> GenerationRequest:
        is_greedy = self.seed is None
        return GenerationRequest(
            prompt=TokenPrompt(token_ids=self.prompt),
            options=SamplingOptions(
                temperature=0.0 if is_greedy else 0.8,
                top_p=1.0 if is_greedy else 0.95,
                top_k=0 if is_greedy else 40,
                seed=self.seed,
                max_tokens=self.max_tokens,
                ignore_eos=True,
            ),
            deadline_s=deadline_s,
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a client saw of one request."""

    case: Case
    token_ids: list[int] = field(default_factory=list)
    done: GenerationDone | None = None
    error: MoonpoolError | None = None
    #: A chunk that did not continue where the last one ended.
    out_of_order: str = ""
    duration_s: float = 0.0

    def add(self, chunk: GenerationChunk) -> None:
        if chunk.token_ids and chunk.first_position != len(self.token_ids):
            self.out_of_order = f"{chunk.first_position} after {len(self.token_ids)} tokens"
        self.token_ids += chunk.token_ids

    @property
    def problem(self) -> str:
        """What is wrong with the stream itself, whatever its tokens; empty if nothing is."""
        if self.error is not None:
            return f"{self.case.name}: {self.error.code}: {self.error.message}"
        if self.done is None:
            return f"{self.case.name}: the stream ended without an end"
        if self.out_of_order:
            return f"{self.case.name}: out of order: {self.out_of_order}"
        if self.done.usage.num_completion_tokens != len(self.token_ids):
            return (
                f"{self.case.name}: usage counts {self.done.usage.num_completion_tokens} tokens, "
                f"{len(self.token_ids)} came"
            )
        return ""

    def first_difference(self, expected: Sequence[int]) -> int | None:
        """Position of the first token that differs; None if all are equal."""
        if self.token_ids == list(expected):
            return None
        pairs = zip(self.token_ids, expected, strict=False)
        return next(
            (index for index, (got, want) in enumerate(pairs) if got != want),
            min(len(self.token_ids), len(expected)),
        )


def make_cases(
    *,
    vocab_size: int,
    prompt_lengths: Sequence[int],
    max_tokens: int,
    rng: random.Random,
    first_token_id: int = 16,
    prefix: str = "",
) -> tuple[Case, ...]:
    """Alternately greedy and seeded, of the given lengths, all different from their first block on."""
    return tuple(
        Case(
            name=f"{prefix}{'greedy' if index % 2 == 0 else 'seeded'}-{length}-{index}",
            prompt=tuple(rng.randrange(first_token_id, vocab_size) for _ in range(length)),
            max_tokens=max_tokens,
            seed=None if index % 2 == 0 else 1_000 + index,
        )
        for index, length in enumerate(prompt_lengths)
    )


def make_family(
    *,
    vocab_size: int,
    prefix_length: int,
    tail_lengths: Sequence[int],
    max_tokens: int,
    rng: random.Random,
    first_token_id: int = 16,
    prefix: str = "",
) -> tuple[Case, ...]:
    """Alternately greedy and seeded, all with one prefix and each with a tail of its own.

    Whoever is asked first leaves the prefix in a worker's cache; the others find it there.
    """
    tails = make_cases(
        vocab_size=vocab_size,
        prompt_lengths=tail_lengths,
        max_tokens=max_tokens,
        rng=rng,
        first_token_id=first_token_id,
        prefix=prefix,
    )
    shared = tuple(rng.randrange(first_token_id, vocab_size) for _ in range(prefix_length))
    return tuple(replace(tail, prompt=shared + tail.prompt) for tail in tails)


def num_shared_tokens(family: Sequence[Case], block_size: int) -> int:
    """Tokens of the full blocks with which all prompts of a family begin."""
    num_tokens = min(len(case.prompt) for case in family)
    while len({case.prompt[:num_tokens] for case in family}) > 1:
        num_tokens -= 1
    return num_tokens // block_size * block_size


class Client:
    """Asks a router. One channel for all requests.

    Args:
        key: The door's, if it wants one.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, key: str | None = None, deadline_s: float = 120.0
    ) -> None:
        self._channel = channel
        self._key = key
        self._deadline_s = deadline_s

    def with_key(self, key: str) -> Client:
        """The same, coming in by another key."""
        return Client(self._channel, key=key, deadline_s=self._deadline_s)

    async def ask(self, case: Case) -> Outcome:
        """The whole answer, or the error."""
        outcome = Outcome(case=case)
        await self.read(outcome)
        return outcome

    async def ask_all(self, cases: Sequence[Case]) -> list[Outcome]:
        """At the same time."""
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self.ask(case)) for case in cases]
        return [task.result() for task in asking]

    async def read(self, outcome: Outcome, *, num_tokens: int | None = None) -> None:
        """Ask and read into `outcome`; leave after `num_tokens`, if given, by cancelling."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = outcome.case.request(deadline_s=self._deadline_s)
        try:
            async with open_generation(
                self._channel, request, peer="router", key=self._key
            ) as events:
                async for event in events:
                    if isinstance(event, GenerationDone):
                        outcome.done = event
                    else:
                        outcome.add(event)
                    if num_tokens is not None and len(outcome.token_ids) >= num_tokens:
                        return
        except MoonpoolError as error:
            outcome.error = error
        finally:
            outcome.duration_s = loop.time() - started
