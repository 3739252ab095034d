"""Frames that a sleeping service has not taken yet: merged, not queued."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moonpool.core.protocol import (
    ChunkPlanned,
    CoreFrame,
    Reply,
    TokensReady,
)
from moonpool.kv.events import merge_cache_events
from moonpool.wire.engine_messages import TimedFrame


def merge_frames(waiting: list[TimedFrame], newest: TimedFrame) -> None:
    """Add a frame to those that could not be sent yet; in place.

    The last waiting one is absorbed by the newest unless it plans chunks: a ChunkPlanned belongs to
    its frame's step. So the list stays as short as the prefill work that was accepted, and a frame
    holds one run of tokens for each request, however long the reader sleeps.
    """
    if waiting and not _plans_chunks(waiting[-1].frame):
        newest = _merged(waiting.pop(), newest)
    waiting.append(newest)


def _plans_chunks(frame: CoreFrame) -> bool:
    return any(isinstance(reply, ChunkPlanned) for reply in frame.replies)


def _merged(older: TimedFrame, newer: TimedFrame) -> TimedFrame:
    frame = replace(
        newer.frame,
        replies=_merged_replies(older.frame.replies, newer.frame.replies),
        num_preemptions=older.frame.num_preemptions + newer.frame.num_preemptions,
        cache_events=merge_cache_events(older.frame.cache_events, newer.frame.cache_events),
    )
    return replace(newer, frame=frame)


def _merged_replies(older: Iterable[Reply], newer: Iterable[Reply]) -> tuple[Reply, ...]:
    """In order, but that tokens join the earlier ones of their attempt and choice."""
    replies = list(older)
    place = {
        (reply.attempt_id, reply.run.choice): index
        for index, reply in enumerate(replies)
        if isinstance(reply, TokensReady)
    }
    for reply in newer:
        if isinstance(reply, TokensReady):
            index = place.get((reply.attempt_id, reply.run.choice))
            if index is not None:
                earlier = replies[index]
                assert isinstance(earlier, TokensReady), earlier
                replies[index] = earlier.joined(reply)
                continue
        replies.append(reply)
    return tuple(replies)
