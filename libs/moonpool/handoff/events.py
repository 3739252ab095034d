"""What happens to the handoff machines. A shell turns IO into these, and calls `handle(event, now)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moonpool.core.protocol import Reply
from moonpool.handoff.messages import (
    HolderMessage,
    LeaseId,
    Open,
    PeerPrefix,
    PrefixOpen,
    RouterKey,
    RouterMessage,
    SourceMessage,
    StreamId,
)
from moonpool.ids import AttemptId
from moonpool.inference.request import InferenceRequest


class ReadId(NamedTuple):
    """One read of one attempt, of a handoff or of a prefix."""

    attempt_id: AttemptId
    #: Counts from 0 within the attempt.
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMessageReceived:
    """Both roles. Each machine acts on its own kind and learns the attempt number from the other."""

    router: RouterKey
    message: RouterMessage
    #: Decode: False if the core is known to have no room, so that it need not be asked.
    has_room: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLost:
    """Both roles. The router's stream was cut: everything it made here dies."""

    router: RouterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFrameReceived:
    """All machines. One frame of the core: `step` is the plan that runs after it."""

    step: int
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersDone:
    """Prefill. The control page: layers [0, num_layers) of `step` are written, and all steps before.

    May run ahead of the step's frame, or be told late or not at all; the latest word counts.
    """

    step: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReceived:
    """Prefill. A reader opened a handoff stream."""

    stream_id: StreamId
    open: Open


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """Prefill. The reader ended its stream, or it was cut. Once per stream that was not ended here."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMessageReceived:
    """Decode. The source says something on the handoff stream of `message.attempt_id`."""

    message: SourceMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroken:
    """Decode, fetch. The stream was cut, could not be opened, or was ended by the other side."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDone:
    """Decode, fetch. A read has ended for good: no byte of it will be written any more.

    Comes exactly once for each StartRead, even if the attempt has ended or the stream is closed.
    """

    read_id: ReadId
    #: Every leaf of these blocks that is not named below lies verified in the target.
    is_ok: bool = True
    #: Indices, in StartRead's lists, of blocks with a leaf that did not match, ascending.
    bad_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNamed:
    """Fetch. The core has been asked for an attempt, and told that a peer may hold its beginning."""

    attempt_id: AttemptId
    peer: PeerPrefix
    #: None: of a store, which asks for blocks and not for a request's.
    request: InferenceRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAborted:
    """Fetch. The core has been sent Abort for this attempt."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLacked:
    """Both roles. An attempt's fetch has ended, and its peer held less than was wanted of it."""

    attempt_id: AttemptId
    #: Leading tokens that it held.
    num_held_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderMessageReceived:
    """Fetch. The holder says something on the lease of `message.attempt_id`."""

    message: HolderMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOpenReceived:
    """Hold. A reader opened a lease."""

    lease_id: LeaseId
    open: PrefixOpen


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLeaseClosed:
    """Hold. The reader gave its lease back, or is gone. Once per lease that was not ended here."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixDelayed:
    """Hold. Part of what a lease asks for is read from this node's disk first; PrefixLocked follows."""

    lease_id: LeaseId
    #: Leading blocks of the chain that could be locked now, and how many will be if all comes.
    num_ready_blocks: int
    num_blocks: int


PrefillEvent = (
    RouterMessageReceived
    | RouterLost
    | CoreFrameReceived
    | LayersDone
    | OpenReceived
    | StreamClosed
    | PeerLacked
)
DecodeEvent = (
    RouterMessageReceived
    | RouterLost
    | CoreFrameReceived
    | SourceMessageReceived
    | StreamBroken
    | ReadDone
    | PeerLacked
)
FetchEvent = (
    PeerNamed | AttemptAborted | CoreFrameReceived | HolderMessageReceived | StreamBroken | ReadDone
)
HoldEvent = CoreFrameReceived | PrefixOpenReceived | PrefixDelayed | PrefixLeaseClosed
#: What a shell may say. PeerNamed, AttemptAborted and PeerLacked are said among the machines of a worker; a
#: store, whose attempts are no router's, says the first two itself, and is the only one to say PrefixDelayed.
HandoffEvent = PrefillEvent | DecodeEvent | FetchEvent | HoldEvent
