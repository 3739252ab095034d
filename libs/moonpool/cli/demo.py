"""`moonpool demo`: one prefill and one decode worker continue a long conversation.

Life
  1. The model is pulled if it is not here.
  2. NATS, a router, a prefill and a decode worker start on free ports of 127.0.0.1.
  3. A conversation of over 1,000 tokens gets one more question; the answer streams to stdout.
  4. The request's trace is fetched from the router, and what happened is shown.
  5. Everything stops; nothing is left running.
"""

from __future__ import annotations

import asyncio
import sys

from moonpool.cli.ask import Reply, ask
from moonpool.cli.demo_cluster import DemoModel, DemoScreen, demo_config, whole_trace
from moonpool.cli.demo_text import QUESTION, TITLE, TURNS, demo_messages
from moonpool.cli.failure import EXIT_OK
from moonpool.cli.journey import Journey, make_journey
from moonpool.cli.journey_view import journey_json, journey_lines
from moonpool.cli.pull import resolve_shown
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.config.schema import ClusterConfig
from moonpool.inference.generation import SamplingOptions

#: Room for the text and the answer, several times over; less memory to fault in than the default.
_POOL_BYTES = 192 * 2**20


def run_demo(served: DemoModel, *, max_tokens: int, is_json: bool) -> int:
    """Live through the five steps.

    Raises:
        MoonpoolError: A step failed; nothing is left running.
    """
    config = demo_config(served, {"worker.kv_cache_memory_bytes": _POOL_BYTES})
    resolve_shown(config.model, config.data_dir, is_json=is_json)
    asyncio.run(_demo(config, max_tokens, DemoScreen(is_json=is_json)))
    return EXIT_OK


async def _demo(config: ClusterConfig, max_tokens: int, screen: DemoScreen) -> None:
    async with LocalCluster(config, on_event=screen.on_part) as cluster:
        screen.on_ready(cluster)
        screen.say(
            f"The prompt: {TITLE}, {len(TURNS)} questions with answers, and then:", style="dim"
        )
        screen.say(f"> {QUESTION}\n", style="bold")
        reply = await ask(
            demo_messages(),
            SamplingOptions(temperature=0.0, max_tokens=max_tokens),
            address=cluster.endpoints.grpc_address,
            api_key=None,
            on_text=_ignore if screen.is_json else _write,
        )
        spans = await whole_trace(cluster.endpoints.grpc_address, reply.done.request_id)
        _show(screen, reply, make_journey(reply.done, spans, token_times_s=reply.token_times_s))
    screen.on_stopped()


def _show(screen: DemoScreen, reply: Reply, journey: Journey) -> None:
    screen.result({"question": QUESTION, "answer": reply.text, "journey": journey_json(journey)})
    screen.say("\n")
    screen.say("What happened", style="bold")
    for line in journey_lines(journey, screen.glyphs):
        screen.say(line)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(_text: str) -> None:
    """The answer comes as JSON, whole."""
