"""What the handoff machines want done. A shell performs effects in the order given."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.core.protocol import Command
from moonpool.handoff.events import ReadId
from moonpool.handoff.messages import (
    Open,
    RouterKey,
    SourceMessage,
    SourceRef,
    StreamId,
    WorkerMessage,
)
from moonpool.ids import AttemptId, BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    """Both roles. To this worker's core, in order."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToRouter:
    """Both roles. On the router's stream; dropped if that stream is gone."""

    router: RouterKey
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOnStream:
    """Prefill. To the reader; the shell fills in the digests of Opened and LayersReady."""

    stream_id: StreamId
    message: SourceMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """Prefill. End the stream after what was sent; no StreamClosed is expected any more."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Decode. Connect to the source and send `open`; failure to connect is StreamBroken."""

    attempt_id: AttemptId
    source: SourceRef
    open: Open


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Decode. End the stream of this attempt; its reads may be cut short, each still tells ReadDone."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRead:
    """Decode. Copy layers [first_layer, end_layer) of each source block to its target, then verify.

    The two lists have the same length. `digests[i]` holds the expected leaves of block i: its layers
    ascending, within a layer the shards of KV heads.
    """

    read_id: ReadId
    source: SourceRef
    source_block_ids: tuple[BlockId, ...]
    target_block_ids: tuple[BlockId, ...]
    first_layer: int
    end_layer: int
    digests: tuple[bytes, ...]


PrefillEffect = SendCommand | SendToRouter | SendOnStream | EndStream
DecodeEffect = SendCommand | SendToRouter | OpenStream | CloseStream | StartRead
HandoffEffect = PrefillEffect | DecodeEffect
