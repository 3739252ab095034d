"""Ask a router one question and note when each token came: what chat and demo stand on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moonpool.errors import InternalError
from moonpool.inference.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationChunk,
    GenerationDone,
    GenerationRequest,
    Prompt,
    SamplingOptions,
)
from moonpool.rpc.channel import open_channel
from moonpool.rpc.generate import open_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as this client saw it."""

    text: str
    done: GenerationDone
    #: Seconds from the question to each token, in order; tokens of one chunk came together.
    token_times_s: tuple[float, ...]

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Time between each token and the next."""
        return tuple((b - a) * 1_000 for a, b in pairwise(self.token_times_s))


async def ask(
    messages: Sequence[ChatMessage],
    options: SamplingOptions,
    *,
    address: str,
    api_key: str | None,
    on_text: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Reply:
    """Stream the answer to a conversation: see `ask_prompt`."""
    return await ask_prompt(
        ChatPrompt(messages=tuple(messages)),
        options,
        address=address,
        api_key=api_key,
        on_text=on_text,
        clock=clock,
    )


async def ask_prompt(
    prompt: Prompt,
    options: SamplingOptions,
    *,
    address: str,
    api_key: str | None,
    on_text: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Reply:
    """Stream one answer; `on_text` gets each piece as it comes. Cancelling ends the request.

    Raises:
        MoonpoolError: What the router or the transport says.
    """
    request = GenerationRequest(prompt=prompt, options=options)
    text: list[str] = []
    times: list[float] = []
    async with open_channel(address) as channel:
        started = clock()
        async with open_generation(channel, request, peer=address, key=api_key) as events:
            async for event in events:
                match event:
                    case GenerationChunk():
                        times += [clock() - started] * len(event.token_ids)
                        if event.text:
                            text.append(event.text)
                            on_text(event.text)
                    case GenerationDone():
                        return Reply(text="".join(text), done=event, token_times_s=tuple(times))
    raise InternalError(f"{address}: the answer broke off without an end")
