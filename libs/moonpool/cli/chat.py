"""`moonpool chat`: one question, or a conversation, with a running cluster."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from moonpool.cli.ask import Reply, ask
from moonpool.cli.failure import EXIT_OK, describe
from moonpool.cli.journey import summarize_gaps
from moonpool.cli.target import Target
from moonpool.cli.terminal import format_ms, make_console, print_json
from moonpool.errors import MoonpoolError, UnavailableError
from moonpool.inference.generation import ChatMessage, SamplingOptions

_HELP = "/reset begins again, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the command line says."""

    message: str | None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    @property
    def sampling(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )


def run_chat(options: ChatOptions, *, target: Target, is_json: bool) -> int:
    """One answer for a message or for what is piped in, else a conversation.

    Raises:
        MoonpoolError: The one question failed. In a conversation it is told and the next may come.
    """
    message = options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None or is_json:
        return _answer_once(options, message or "", target=target, is_json=is_json)
    return Conversation(options, target).run()


def footer(reply: Reply) -> str:
    """What there is to know about an answer, in one line."""
    done = reply.done
    placement = done.placement
    where = (
        f"prefilled on {placement.prefill_worker}, decoded on {placement.decode_worker}"
        if placement.prefill_worker
        else f"on {placement.decode_worker}"
    )
    gaps = summarize_gaps(reply.gaps_ms)
    rate = f", {1_000 / gaps.p50_ms:,.0f} tokens/s" if gaps is not None and gaps.p50_ms else ""
    return (
        f"{done.usage.num_prompt_tokens} tokens in ({done.usage.num_cached_tokens} cached), "
        f"{done.usage.num_completion_tokens} out, {where}, first token "
        f"{format_ms(done.timing.ttft_ms)}{rate}; moonpool trace {done.request_id}"
    )


def reply_json(reply: Reply) -> dict[str, Any]:
    """An answer for programs."""
    done = reply.done
    gaps = summarize_gaps(reply.gaps_ms)
    return {
        "request_id": done.request_id,
        "model": done.model,
        "text": reply.text,
        "finish_reason": done.finish_reason.value,
        "usage": {
            "prompt_tokens": done.usage.num_prompt_tokens,
            "completion_tokens": done.usage.num_completion_tokens,
            "cached_tokens": done.usage.num_cached_tokens,
            "cached_tokens_by_source": done.usage.num_cached_tokens_by_source,
        },
        "ttft_ms": done.timing.ttft_ms,
        "ttft_parts_ms": done.timing.ttft_parts_ms,
        "itl_p50_ms": gaps.p50_ms if gaps is not None else None,
        "prefill_worker": done.placement.prefill_worker,
        "decode_worker": done.placement.decode_worker,
        "reason": done.placement.reason,
    }


def _messages(system: str | None, *rest: ChatMessage) -> tuple[ChatMessage, ...]:
    first = (ChatMessage(role="system", content=system),) if system else ()
    return (*first, *rest)


def _answer_once(options: ChatOptions, message: str, *, target: Target, is_json: bool) -> int:
    reply = asyncio.run(
        ask(
            _messages(options.system, ChatMessage(role="user", content=message)),
            options.sampling,
            address=target.address,
            api_key=target.api_key,
            on_text=_silent if is_json else _write,
        )
    )
    if is_json:
        print_json(reply_json(reply))
        return EXIT_OK
    _write("\n")
    notes = make_console(is_error=True)
    if notes.is_terminal:
        notes.print(footer(reply), style="dim", soft_wrap=True)
    return EXIT_OK


class Conversation:
    """Turns until the user leaves. A turn that failed or was stopped is not remembered."""

    def __init__(self, options: ChatOptions, target: Target) -> None:
        self._options = options
        self._target = target
        self._console: Console = make_console()
        self._history: list[ChatMessage] = []

    def run(self) -> int:
        with contextlib.suppress(ImportError):
            # Importing it is what gives input() a history and line editing.
            import readline  # noqa: F401
        self._console.print(_HELP, style="dim")
        with asyncio.Runner() as runner:
            while True:
                try:
                    message = input("> ").strip()
                except (EOFError, KeyboardInterrupt):
                    _write("\n")
                    return EXIT_OK
                if message in ("/exit", "/quit"):
                    return EXIT_OK
                if message == "/reset":
                    self._history.clear()
                    self._console.print("(a new conversation)", style="dim")
                elif message.startswith("/"):
                    self._console.print(_HELP, style="dim")
                elif message:
                    self._turn(runner, message)

    def _turn(self, runner: asyncio.Runner, message: str) -> None:
        question = ChatMessage(role="user", content=message)
        try:
            reply = runner.run(
                ask(
                    _messages(self._options.system, *self._history, question),
                    self._options.sampling,
                    address=self._target.address,
                    api_key=self._target.api_key,
                    on_text=_write,
                )
            )
        except KeyboardInterrupt:
            self._console.print("\n(stopped)", style="dim")
            return
        except MoonpoolError as error:
            text = describe(error)
            if isinstance(error, UnavailableError):
                text += " (moonpool status says more)"
            self._console.print(text, style="red", soft_wrap=True, markup=False)
            return
        self._history += [question, ChatMessage(role="assistant", content=reply.text)]
        _write("\n")
        self._console.print(footer(reply), style="dim", soft_wrap=True, markup=False)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _silent(_text: str) -> None:
    """For answers that are printed when they are complete."""
