"""What a chat's next turn has to compute: `python -m moonpool_loadtest.experiments.multi_turn`.

A chat of 8 turns through 2 prefill and 2 decode workers, placed twice:

    placed     as placement chooses by default
    in turns   round robin on both legs, every turn prefilled away from where it is decoded: each turn
               leaves the workers of the one before, as under the worst of loads

and asked twice: by token ids, where a turn's prompt begins with the prompt and the drawn tokens of the
turn before; and by text, where the router tokenizes the answers again, which need not give the tokens that
were drawn.

new            tokens of the prompt behind what it has in common with the prompt and answer before
computed       tokens of the prompt that no worker held, as the answer's usage tells
left           workers that the turn before ran on: each may cost one block, since a block that is not full
               is not kept
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from moonpool.config.schema import RoleName
from moonpool.errors import InternalError
from moonpool.hub.chat_template import ChatTemplate
from moonpool.hub.tokenizer import Tokenizer
from moonpool.inference.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingOptions,
    TokenPrompt,
)
from moonpool.wire.steps import StepRecord
from moonpool_loadtest.experiments.lab import (
    DEADLINE_S,
    Answer,
    Asker,
    PeerReads,
    Setting,
    WorkerPlan,
    cluster_config,
    open_asker,
    progress,
    run,
)
from moonpool_loadtest.experiments.report import Finding, publish

BLOCK_SIZE = 16

_OPENING = (
    "You are a helpful assistant on a ship. The ship sails from harbour to harbour along the coast, with "
    "grain, wood and letters on board, and a crew of nine. You answer the crew's questions in two or three "
    "plain sentences. "
)
_QUESTIONS = (
    "What should we check before we leave the harbour tomorrow morning?",
    "The wind comes from the west and gets stronger. Which sails would you take in first, and why?",
    "How far is it to the lighthouse if we make six knots and need four hours?",
    "The cook says that the flour has become wet. What can he still make of it for nine people?",
    "Explain to the youngest of the crew how tides work, and when the next high tide might be.",
    "A letter has fallen into the sea. What do we tell the woman who waits for it on the island?",
    "We have seen three whales and many gulls near the bow. What does that tell us about the fish here?",
    "Write the last line of today's log book.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """How long it is."""

    num_turns: int
    #: Of the first prompt, of what the user adds each turn, and of each answer. By text only the last.
    opening_tokens: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn, as its client saw it and as it was accounted for."""

    number: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_device_tokens: int
    num_peer_tokens: int
    #: What the engines say that they computed of the prompt; None if one did not tell every step.
    num_engine_tokens: int | None
    ttft_ms: float
    #: Prefilled and decoded on; equal if on one.
    workers: tuple[str, ...]
    #: Of the turn before; 0 for the first.
    num_left: int
    #: By text: tokens of the answer before that were drawn differently from what its text gives.
    num_changed_tokens: int = 0

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_device_tokens - self.num_peer_tokens

    @property
    def num_excess_tokens(self) -> int:
        """Computed beyond what is new and a block for each worker left; positive is too much."""
        return self.num_computed_tokens - self.num_new_tokens - BLOCK_SIZE * self.num_left


def common_length(before: Sequence[int], after: Sequence[int]) -> int:
    """Leading tokens that both have."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    return sum(1 for _ in pairs)


class ChatRunner:
    """Lives through chats on one cluster, one turn after the other."""

    def __init__(self, asker: Asker, chat: Chat, model_path: Path) -> None:
        self._asker = asker
        self._chat = chat
        self._tokenizer = Tokenizer.load(model_path)
        self._model_path = model_path
        self._steps: dict[str, int] = {}

    async def by_tokens(self) -> list[Turn]:
        """Answers go back as the tokens that were drawn."""
        chat, turns = self._chat, list[Turn]()
        prompt = self._asker.new_prompt(chat.opening_tokens)
        history: tuple[int, ...] = ()
        for number in range(chat.num_turns):
            answer = await self._ask(
                GenerationRequest(
                    prompt=TokenPrompt(token_ids=prompt),
                    options=SamplingOptions(
                        temperature=0.0, max_tokens=chat.answer_tokens, ignore_eos=True
                    ),
                    deadline_s=DEADLINE_S,
                )
            )
            turns.append(await self._turn(number, answer, prompt, history, turns))
            history = (*prompt, *answer.token_ids)
            prompt = (*history, *self._asker.new_prompt(chat.question_tokens))
        return turns

    async def by_text(self) -> list[Turn]:
        """Answers go back as text; some are drawn, so that not all of them are what a tokenizer makes."""
        chat, turns = self._chat, list[Turn]()
        messages = [ChatMessage(role="system", content=self._opening_text())]
        history: tuple[int, ...] = ()
        for number in range(chat.num_turns):
            question = _QUESTIONS[number % len(_QUESTIONS)]
            messages.append(ChatMessage(role="user", content=question))
            prompt = self._rendered(messages)
            answer = await self._ask(
                GenerationRequest(
                    prompt=ChatPrompt(messages=tuple(messages)),
                    options=SamplingOptions(
                        temperature=0.8, top_p=0.95, seed=number, max_tokens=chat.answer_tokens
                    ),
                    deadline_s=DEADLINE_S,
                )
            )
            turns.append(await self._turn(number, answer, prompt, history, turns))
            # The token that ends a turn is the template's to write.
            is_stop = answer.done is not None and answer.done.finish_reason == "stop"
            drawn = answer.token_ids[:-1] if is_stop else answer.token_ids
            history = (*prompt, *drawn)
            messages.append(ChatMessage(role="assistant", content=answer.text))
        return turns

    # -- parts --

    async def _ask(self, request: GenerationRequest) -> Answer:
        """The next turn is asked as soon as this one is answered."""
        answer = Answer(sent_unix_ns=0)
        await self._asker.read_request(answer, request)
        return answer

    async def _turn(
        self,
        number: int,
        answer: Answer,
        prompt: tuple[int, ...],
        history: tuple[int, ...],
        before: Sequence[Turn],
    ) -> Turn:
        assert answer.done is not None, answer
        usage, placement = answer.done.usage, answer.done.placement
        if usage.num_prompt_tokens != len(prompt):
            raise InternalError(f"{usage.num_prompt_tokens} tokens were asked, not {len(prompt)}")
        common = common_length(history, prompt)
        num_steps = usage.num_completion_tokens - 1
        engine = await self._engine_tokens()
        workers = dict.fromkeys(
            (placement.prefill_worker or placement.decode_worker, placement.decode_worker)
        )
        return Turn(
            number=number + 1,
            num_prompt_tokens=len(prompt),
            num_new_tokens=len(prompt) - common,
            num_device_tokens=usage.num_device_tokens,
            num_peer_tokens=usage.num_peer_tokens,
            num_engine_tokens=None if engine is None else engine - num_steps,
            ttft_ms=answer.ttft_ms,
            workers=tuple(workers),
            num_left=len(before[-1].workers) if before else 0,
            num_changed_tokens=len(history) - common,
        )

    async def _engine_tokens(self) -> int | None:
        """Tokens that all engines computed since this was last asked; None if a step is missing."""
        total: int | None = 0
        for worker_id in self._asker.cluster.worker_ids:
            after = self._steps.get(worker_id, 0)
            steps = await self._asker.cluster.steps(worker_id, after_step=after)
            if steps:
                self._steps[worker_id] = steps[-1].step
            if not _is_gapless(steps, after):
                total = None
            if total is not None:
                total += sum(step.num_tokens for step in steps)
        return total

    def _opening_text(self) -> str:
        length = max(len(self._tokenizer.encode(_OPENING)), 1)
        return _OPENING * max(self._chat.opening_tokens // length, 1)

    def _rendered(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """As the router does it."""
        template = ChatTemplate.load(
            self._model_path, special_tokens=self._tokenizer.special_tokens
        )
        if template is None:
            raise InternalError(f"{self._model_path} has no chat template.")
        rendered = template.render(
            [{"role": message.role, "content": message.content} for message in messages]
        )
        return tuple(self._tokenizer.encode_rendered(rendered))


def _is_gapless(steps: Sequence[StepRecord], after: int) -> bool:
    """The engine counts steps from 1."""
    return [step.step for step in steps] == list(range(after + 1, after + 1 + len(steps)))


# -- the arms --

PLACED, IN_TURNS = "placed", "in turns"
TOKENS, TEXT = "tokens", "text"
_PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    PLACED: {},
    IN_TURNS: {"mode": "round_robin", "disagg": "threshold"},
}


@asynccontextmanager
async def open_runner(
    setting: Setting, placement: str, chat: Chat, *, peer_reads: PeerReads
) -> AsyncIterator[ChatRunner]:
    """A cluster of 2 + 2 whose engines share a core, as only one of them has work at a time."""
    longest = chat.opening_tokens + chat.num_turns * (chat.question_tokens + chat.answer_tokens)
    roles: tuple[RoleName, ...] = ("prefill", "decode")
    workers = [
        WorkerPlan(
            role=role,
            engine_core=setting.cores.engine,
            chunk_tokens=2_048,
            # Two chats, the one by text with questions of its own length.
            pool_tokens=4 * longest + 2_048,
            count=2,
            peer_reads=peer_reads,
        )
        for role in roles
    ]
    config = cluster_config(
        setting,
        f"multi-turn-{placement.replace(' ', '-')}",
        workers,
        local_prefill_tokens=0 if placement == IN_TURNS else 256,
        placement=_PLACEMENTS[placement],
    )
    async with open_asker(config, seed=1, vocab_size=setting.model.config.vocab_size) as asker:
        yield ChatRunner(asker, chat, setting.model.path)


def findings_of(turns: Mapping[tuple[str, str], Sequence[Turn]]) -> list[Finding]:
    """Bars hold for every turn after the first."""
    found = []
    for (placement, asked), chat in turns.items():
        where = f"{placement}, by {asked}"
        later = chat[1:]
        told = [turn for turn in chat if turn.num_engine_tokens is not None]
        sources = (
            f"own {sum(turn.num_device_tokens for turn in later)}, "
            f"peers {sum(turn.num_peer_tokens for turn in later)}"
        )
        found += [
            Finding(
                what=f"{where}: computed beyond new and a block per worker left, worst turn",
                value=max(turn.num_excess_tokens for turn in later),
                unit="tokens",
                bar=0,
                is_upper=True,
                detail=f"beyond new: {[t.num_computed_tokens - t.num_new_tokens for t in later]}",
            ),
            Finding(
                what=f"{where}: share of later prompts not computed",
                value=1
                - sum(turn.num_computed_tokens for turn in later)
                / sum(turn.num_prompt_tokens for turn in later),
                detail=sources,
            ),
            Finding(
                what=f"{where}: usage against what engines computed, worst turn",
                value=max(
                    (
                        abs(turn.num_computed_tokens - (turn.num_engine_tokens or 0))
                        for turn in told
                    ),
                    default=0,
                ),
                unit="tokens",
                bar=0 if told else None,
                is_upper=True,
                detail=f"{len(told)} of {len(chat)} turns told by every step",
            ),
            Finding(
                what=f"{where}: TTFT of the first turn over the later ones' worst",
                value=chat[0].ttft_ms / max(turn.ttft_ms for turn in later),
                detail=f"{chat[0].ttft_ms:.0f} ms; {[round(turn.ttft_ms) for turn in later]}",
            ),
        ]
        if asked == TEXT:
            changed = [turn for turn in later if turn.num_changed_tokens]
            found.append(
                Finding(
                    what=f"{where}: answers that their text tokenizes differently",
                    value=len(changed),
                    detail=f"of {len(later)}, {sum(t.num_changed_tokens for t in changed)} tokens",
                )
            )
    return found


def print_turns(turns: Mapping[tuple[str, str], Sequence[Turn]]) -> None:
    """A table for each chat."""
    for (placement, asked), chat in turns.items():
        print(f"{placement}, by {asked}")
        print(
            "  turn  prompt   new  own pool  peers  computed  left  TTFT ms  prefilled, decoded on"
        )
        for turn in chat:
            print(
                f"  {turn.number:4}  {turn.num_prompt_tokens:6}  {turn.num_new_tokens:4}  "
                f"{turn.num_device_tokens:8}  {turn.num_peer_tokens:5}  "
                f"{turn.num_computed_tokens:8}  {turn.num_left:4}  {turn.ttft_ms:7.0f}  "
                + ", ".join(turn.workers)
            )
        print()


async def measure(
    setting: Setting, chat: Chat, *, peer_reads: PeerReads
) -> dict[tuple[str, str], Sequence[Turn]]:
    """All four chats."""
    turns: dict[tuple[str, str], Sequence[Turn]] = {}
    for placement in (PLACED, IN_TURNS):
        async with open_runner(setting, placement, chat, peer_reads=peer_reads) as runner:
            turns[placement, TOKENS] = await runner.by_tokens()
            turns[placement, TEXT] = await runner.by_text()
        progress(f"{placement}: done")
    return turns


async def _experiment(setting: Setting, options: argparse.Namespace) -> None:
    chat = Chat(
        num_turns=3 if setting.is_quick else 8,
        opening_tokens=300 if setting.is_quick else options.opening,
        question_tokens=options.question,
        answer_tokens=8 if setting.is_quick else options.answer,
    )
    turns = await measure(setting, chat, peer_reads=options.peer_reads)
    findings = findings_of(turns)
    print_turns(turns)
    publish(
        scale={
            "model": setting.model.name,
            "dtype": setting.dtype,
            "peer_reads": options.peer_reads,
            **asdict(chat),
        },
        findings=findings,
        samples={
            f"{placement}, by {asked}": [asdict(turn) for turn in chat_turns]
            for (placement, asked), chat_turns in turns.items()
        },
        is_quick=setting.is_quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="moonpool_loadtest.experiments.multi_turn")
    parser.add_argument("--opening", type=int, default=1_024, help="tokens of the first prompt")
    parser.add_argument("--question", type=int, default=96, help="tokens that each turn adds")
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--peer-reads", choices=("auto", "always", "never"), default="auto")
    return run("multi-turn", _experiment, parser)


if __name__ == "__main__":
    sys.exit(main())
