"""FetchReads: the reader's side of all reads of prefixes from peers, in the service process.

It stands between the core (which reserves blocks for what a peer may hold, and computes the rest), the
holder (any worker, over one lease per fetch) and the transport. The attempt itself is a prefill or a
decode and lives in its own machine; that one has named the peer to the core. Events in, effects out;
`now` is an argument; no IO.

Rules
- A fetch is a way to compute less, never a condition: however it ends, the attempt goes on from what is
  verified; the router is only told, with the tokens, how much of it the peer no longer held.
- Exactly one FetchEnded per FetchReserved, when no read is outstanding; or exactly one ReadEnded after
  Abort or Revoked, when none is. Until then its blocks are not freed: the transport may still write them.
- Only what is verified counts, and only as a prefix. What is read piece by piece is told as it comes.
- The lease stays open until the last read has ended, since it is the lock on the holder's blocks;
  unless the blocks are not wanted any more.
- Who waits for its turn has a store told what it will want, so that its disk is read while the request queues.
- It is timed: when the first piece, or the next, takes longer than it may (FetchChooser), or the rest
  would be computed sooner, the reads are stopped; what has come stays.

Life of one fetch

    state      event                                   effects and next state
    -          the core was told of a peer                                                -> ASKED
    ASKED      it has waited for its turn for a while  TellAhead                          -> ASKED
    ASKED      core FetchReserved, computing is faster core FetchEnded                    -> ended
    ASKED      core FetchReserved                      OpenStream                         -> OPENING
    ASKED      the core starts the attempt without                                        -> ended
    OPENING    PrefixStaging, worth waiting for                                           -> OPENING
    OPENING    PrefixStaging, not worth it, or time    CloseStream, OpenStream for what   -> OPENING
               is up while it is waited for            is ready; nothing is: as below
    OPENING    PrefixOpened                            StartRead*                         -> READING
    OPENING    PrefixOpened with no block, or failed,  CloseStream, core FetchEnded       -> ended
               or stream lost, or time is up
    READING    ReadDone                                core BlocksFetched, StartRead      -> READING
    READING    time is up                              StopReads                          -> READING
    READING    ... and no read is outstanding or due   CloseStream, core FetchEnded       -> ended
    any        Abort, core Revoked, attempt ended      CloseStream, StopReads             -> ENDING
    ENDING     no read is outstanding                  core ReadEnded                     -> ended

What it deliberately does not do: it asks one peer, once for all and perhaps once more for what is ready,
never mixes sources within a block, and never looks into a digest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moonpool.core.protocol import (
    BlocksFetched,
    Command,
    FetchEnded,
    FetchReserved,
    HandedBack,
    PrefillFailed,
    PrefillStarted,
    PrefixLocked,
    ReadEnded,
    Refused,
    Reply,
    Revoked,
    TokensReady,
)
from moonpool.handoff.arrival import Arrival
from moonpool.handoff.config import FetchConfig, FetchMode, HandoffConfig
from moonpool.handoff.effects import (
    CloseStream,
    FetchEffect,
    FetchOutcome,
    OpenStream,
    SendCommand,
    StartRead,
    StopReads,
    TellAhead,
)
from moonpool.handoff.events import (
    AttemptAborted,
    CoreFrameReceived,
    FetchEvent,
    HolderMessageReceived,
    PeerNamed,
    ReadDone,
    ReadId,
    StreamBroken,
)
from moonpool.handoff.fetch import Fetch, FetchState
from moonpool.handoff.fetch_choice import FetchChooser, Tier
from moonpool.handoff.fetch_end import learn, record_of
from moonpool.handoff.messages import (
    HolderMessage,
    PeerPrefix,
    PrefixFailed,
    PrefixOpen,
    PrefixOpened,
    PrefixStaging,
)
from moonpool.ids import AttemptId, BlockHash, WorkerKey
from moonpool.inference.request import InferenceRequest

#: The block hashes of a request's prompt + emitted, as the core has them.
HashChain = Callable[[InferenceRequest], Sequence[BlockHash]]


class FetchReads:
    """All prefixes that this worker reads from peers.

    Args:
        key: This worker's id and incarnation: the reader on its leases.
        namespace: Fingerprint of all that changes the values of this worker's KV.
        secret_fingerprint: Of the cluster's secret.
        hash_chain: None: peers are not told of what will be wanted.
    """

    def __init__(
        self,
        *,
        key: WorkerKey,
        namespace: str,
        secret_fingerprint: str,
        config: HandoffConfig,
        fetch: FetchConfig,
        hash_chain: HashChain | None = None,
    ) -> None:
        self._key = key
        self._namespace = namespace
        self._secret_fingerprint = secret_fingerprint
        self._config = config
        self._fetch_config = fetch
        self._hash_chain = hash_chain
        #: What is known of peers and of this worker's own speed; the shell tells it the latter.
        self.chooser = FetchChooser(fetch, block_size=config.block_size)
        self._fetches: dict[AttemptId, Fetch] = {}
        self._effects: list[FetchEffect] = []

    # -- the interface --

    def worth_asking(self, peer: PeerPrefix | None, now: float) -> PeerPrefix | None:
        """The peer if its prefix may be worth a fetch: whether it is, is decided with the blocks."""
        if peer is None or peer.key == self._key:
            return None
        plan = self.chooser.choose(peer, num_cached_tokens=0, num_tokens=peer.num_tokens, now=now)
        if plan is None:
            self.chooser.passed_over(peer.key)
            return None
        return peer

    def handle(self, event: FetchEvent, now: float) -> list[FetchEffect]:
        """Take one event; returns what is to be done, in order."""
        match event:
            case PeerNamed(attempt_id=attempt_id, peer=peer, request=request):
                assert attempt_id not in self._fetches, attempt_id
                can_tell = peer.is_store and request is not None and self._hash_chain is not None
                self._fetches[attempt_id] = Fetch(
                    attempt_id=attempt_id,
                    peer=peer,
                    request=request if can_tell else None,
                    ahead_at=now + self._fetch_config.ahead_s if can_tell else None,
                )
            case AttemptAborted(attempt_id=attempt_id):
                fetch = self._wanted(attempt_id)
                if fetch is not None:
                    self._drop(fetch, now)
            case CoreFrameReceived(replies=replies):
                for reply in replies:
                    if not isinstance(reply, PrefixLocked):
                        self._on_reply(reply, now)
            case HolderMessageReceived(message=message):
                self._on_holder_message(message, now)
            case StreamBroken(attempt_id=attempt_id):
                self._on_stream_broken(attempt_id, now)
            case ReadDone():
                self._on_read_done(event, now)
        return self._take_effects()

    def tick(self, now: float) -> list[FetchEffect]:
        """Do what is due. Call at `next_wakeup()` or later; too early or too often does nothing."""
        for fetch in list(self._fetches.values()):
            if fetch.ahead_at is not None and fetch.ahead_at <= now:
                self._tell_ahead(fetch, now)
            if fetch.stop_at is not None and fetch.stop_at <= now:
                self._on_time_up(fetch, now)
        return self._take_effects()

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, or None."""
        return min(self._wakeups(), default=None)

    def is_reading(self, attempt_id: AttemptId) -> bool:
        """Reads of this attempt are reads of a prefix."""
        fetch = self._fetches.get(attempt_id)
        return fetch is not None and fetch.arrival is not None

    @property
    def num_fetches(self) -> int:
        """Prefixes that are read, or were and have reads outstanding."""
        return sum(fetch.arrival is not None for fetch in self._fetches.values())

    @property
    def num_open_reads(self) -> int:
        """Reads that the transport has not ended."""
        return sum(f.arrival.num_open_reads for f in self._fetches.values() if f.arrival)

    @property
    def is_quiet(self) -> bool:
        """No attempt with a peer, stream or read is open here."""
        return not self._fetches

    def fork(self) -> FetchReads:
        """An independent copy, for exploration."""
        fork = copy.copy(self)
        fork.chooser = self.chooser.fork()
        fork._fetches = {key: fetch.fork() for key, fetch in self._fetches.items()}
        fork._effects = []
        return fork

    def key(self) -> tuple[object, ...]:
        """Equal for machines that behave alike, times and what is known of peers apart."""
        return tuple(sorted((f.attempt_id, f.key()) for f in self._fetches.values()))

    def validate(self) -> None:
        """Check every invariant; for tests and debugging."""
        assert not self._effects
        self.chooser.validate(
            num_fetching=sum(fetch.ticket is not None for fetch in self._fetches.values())
        )
        for attempt_id, fetch in self._fetches.items():
            assert fetch.attempt_id == attempt_id, fetch
            is_live = fetch.state in (FetchState.OPENING, FetchState.READING)
            assert (fetch.arrival is None) == (fetch.state is FetchState.ASKED), fetch
            assert (fetch.ticket is not None) == is_live, fetch
            assert (fetch.opened is not None) == (fetch.state is FetchState.READING), fetch
            assert is_live or not fetch.is_stream_open, fetch
            assert is_live or fetch.stop_at is None, fetch
            assert fetch.state is FetchState.ASKED or fetch.ahead_at is None, fetch
            assert (fetch.request is None) == (fetch.ahead_at is None), fetch
            assert fetch.state is not FetchState.OPENING or fetch.is_stream_open, fetch
            assert fetch.state is not FetchState.OPENING or fetch.stop_at is not None, fetch
            if fetch.arrival is not None:
                fetch.arrival.validate()
                is_reading = fetch.state is not FetchState.OPENING
                assert bool(fetch.arrival.num_open_reads) == is_reading, fetch

    # -- the core --

    def _on_reply(self, reply: Reply, now: float) -> None:
        assert not isinstance(reply, PrefixLocked)
        fetch = self._wanted(reply.attempt_id)
        if fetch is None:
            return
        match reply:
            case FetchReserved():
                self._on_reserved(fetch, reply, now)
            case Revoked() | Refused() | HandedBack() | PrefillFailed():
                if fetch.state is FetchState.ASKED and not isinstance(reply, Revoked):
                    # It has never had blocks for this.
                    del self._fetches[fetch.attempt_id]
                else:
                    self._drop(fetch, now)
            case PrefillStarted() | TokensReady():
                assert fetch.state is FetchState.ASKED, fetch
                del self._fetches[fetch.attempt_id]
            case _:
                pass

    def _on_reserved(self, fetch: Fetch, reply: FetchReserved, now: float) -> None:
        assert fetch.state is FetchState.ASKED, fetch
        fetch.request, fetch.ahead_at = None, None
        fetch.reserved = reply
        plan = self.chooser.choose(
            fetch.peer,
            num_cached_tokens=reply.num_cached_tokens,
            num_tokens=reply.num_tokens,
            now=now,
        )
        if plan is None:
            self.chooser.passed_over(fetch.peer.key)
            del self._fetches[fetch.attempt_id]
            self._command(
                FetchEnded(attempt_id=fetch.attempt_id, num_tokens=reply.num_cached_tokens)
            )
            self._effects.append(
                record_of(
                    fetch,
                    FetchOutcome.RECOMPUTE,
                    num_tokens=reply.num_cached_tokens,
                    block_size=self._config.block_size,
                    elapsed_s=0.0,
                )
            )
            return
        fetch.state = FetchState.OPENING
        fetch.plan, fetch.begun_at = plan, now
        fetch.ticket = self.chooser.begin(
            fetch.peer.key,
            num_bytes=fetch.num_wanted_blocks(self._config.block_size) * self._block_bytes,
            now=now,
        )
        fetch.num_told_tokens = reply.num_cached_tokens
        fetch.arrival = Arrival(
            num_tokens=reply.num_tokens,
            num_held_tokens=reply.num_cached_tokens,
            target_block_ids=reply.block_ids,
            block_size=self._config.block_size,
            num_layers=self._config.num_layers,
        )
        fetch.stop_at = now + plan.patience_s
        self._open_lease(fetch, fetch.num_wanted_blocks(self._config.block_size))

    def _open_lease(self, fetch: Fetch, num_blocks: int) -> None:
        """Ask for so many blocks from the first that is wanted."""
        reserved = fetch.reserved
        assert reserved is not None, fetch
        first = reserved.num_cached_tokens // self._config.block_size
        fetch.is_stream_open, fetch.num_open_blocks = True, num_blocks
        self._effects.append(
            OpenStream(
                attempt_id=fetch.attempt_id,
                source=fetch.peer.ref,
                open=self._prefix_open(fetch, reserved.hashes[: first + num_blocks], first=first),
            )
        )

    def _prefix_open(
        self, fetch: Fetch, hashes: tuple[BlockHash, ...], *, first: int
    ) -> PrefixOpen:
        return PrefixOpen(
            attempt_id=fetch.attempt_id,
            reader=self._key,
            holder=fetch.peer.key,
            namespace=self._namespace,
            secret_fingerprint=self._secret_fingerprint,
            hashes=hashes,
            first=first,
        )

    # -- the holder --

    def _tell_ahead(self, fetch: Fetch, now: float) -> None:
        """It waits for its turn: tell the store what it will want."""
        request, fetch.request, fetch.ahead_at = fetch.request, None, None
        assert request is not None, fetch
        assert self._hash_chain is not None, fetch
        if not self.chooser.may_tell(fetch.peer.key, now):
            return
        hashes = tuple(self._hash_chain(request))
        hashes = hashes[: fetch.peer.num_tokens // self._config.block_size]
        if hashes:
            self._effects.append(
                TellAhead(
                    source=fetch.peer.ref,
                    open=self._prefix_open(fetch, hashes, first=len(hashes)),
                )
            )

    def _on_holder_message(self, message: HolderMessage, now: float) -> None:
        fetch = self._wanted(message.attempt_id)
        if fetch is None or not fetch.is_stream_open or fetch.outcome is not None:
            return
        match message:
            case PrefixStaging() if fetch.state is FetchState.OPENING:
                self._on_staging(fetch, message, now)
            case PrefixOpened() if fetch.state is FetchState.OPENING:
                self._on_opened(fetch, message, now)
            case PrefixStaging() | PrefixOpened():
                # The lock is told once: this one is not to be trusted.
                self._stop(fetch, FetchOutcome.LOST, now)
            case PrefixFailed():
                fetch.refusal, fetch.message = message.reason, message.message
                self._stop(fetch, FetchOutcome.REFUSED, now)

    def _on_staging(self, fetch: Fetch, message: PrefixStaging, now: float) -> None:
        """Part of it comes from the holder's disk first: wait for that, or read only what is ready."""
        ticket, reserved = fetch.ticket, fetch.reserved
        assert ticket is not None, fetch
        assert reserved is not None, fetch
        if fetch.has_left_disk:
            # What was ready is so no more.
            self._stop(fetch, FetchOutcome.ABSENT, now)
            return
        if fetch.staging is not None or message.num_blocks > fetch.num_open_blocks:
            self._stop(fetch, FetchOutcome.LOST, now)
            return
        fetch.staging = message
        plan = self.chooser.choose_disk(
            ticket,
            num_cached_tokens=reserved.num_cached_tokens,
            num_tokens=self._num_tokens_of(reserved, message.num_blocks),
            now=now,
        )
        if plan is None:
            self._leave_disk(fetch, FetchOutcome.RECOMPUTE, now)
            return
        fetch.plan = plan
        fetch.ticket = self.chooser.waits_for_disk(ticket, now)
        fetch.stop_at = min(now + plan.patience_s, fetch.begun_at + plan.limit_s)

    def _leave_disk(self, fetch: Fetch, outcome: FetchOutcome, now: float) -> None:
        """Read what the holder had ready; if that is nothing, this is the end."""
        staging, plan, ticket, reserved = fetch.staging, fetch.plan, fetch.ticket, fetch.reserved
        assert staging is not None, fetch
        assert plan is not None, fetch
        assert ticket is not None, fetch
        assert reserved is not None, fetch
        num_blocks = staging.num_ready_blocks
        if not num_blocks and ticket.tier is Tier.DISK:
            self._stop(fetch, outcome, now)
            return
        fetch.ticket = self.chooser.leaves_disk(
            ticket, num_bytes=num_blocks * self._block_bytes, now=now
        )
        if not num_blocks:
            self._stop(fetch, outcome, now)
            return
        recompute_s = self.chooser.recompute_s(
            num_cached_tokens=reserved.num_cached_tokens,
            num_tokens=self._num_tokens_of(reserved, num_blocks),
        )
        if recompute_s is None or self._fetch_config.mode is FetchMode.ALWAYS:
            limit_s = plan.limit_s
        else:
            limit_s = recompute_s
        fetch.plan = replace(plan, limit_s=now - fetch.begun_at + limit_s)
        fetch.stop_at = now + min(plan.patience_s, limit_s)
        self._close_stream(fetch)
        self._open_lease(fetch, num_blocks)

    def _on_time_up(self, fetch: Fetch, now: float) -> None:
        if fetch.state is FetchState.OPENING and fetch.is_waiting_for_disk:
            self._leave_disk(fetch, FetchOutcome.SLOW, now)
        else:
            self._stop(fetch, FetchOutcome.SLOW, now)

    def _on_opened(self, fetch: Fetch, message: PrefixOpened, now: float) -> None:
        num_blocks = len(message.block_ids)
        assert fetch.ticket is not None, fetch
        if not num_blocks:
            self._stop(fetch, FetchOutcome.ABSENT, now)
        elif num_blocks > fetch.num_open_blocks or len(message.digests) % num_blocks:
            self._stop(fetch, FetchOutcome.LOST, now)
        else:
            if fetch.is_waiting_for_disk and num_blocks <= fetch.num_ready_blocks:
                # It waited for its disk as long as it does, in vain.
                fetch.ticket = self.chooser.leaves_disk(
                    fetch.ticket, num_bytes=num_blocks * self._block_bytes, now=now
                )
            fetch.state = FetchState.READING
            fetch.opened, fetch.opened_at = message, now
            fetch.ticket = self.chooser.opened(fetch.ticket, now)
            self._ask(fetch)

    def _ask(self, fetch: Fetch) -> None:
        """Ask for the next pieces, as many as may be under way."""
        opened, arrival, reserved = fetch.opened, fetch.arrival, fetch.reserved
        assert opened is not None, fetch
        assert arrival is not None, fetch
        assert reserved is not None, fetch
        num_blocks = len(opened.block_ids)
        share = len(opened.digests) // num_blocks
        while (
            fetch.outcome is None
            and fetch.num_asked_blocks < num_blocks
            and arrival.num_open_reads < self._fetch_config.max_reads
        ):
            first = fetch.num_asked_blocks
            end = min(first + self._fetch_config.span_blocks, num_blocks)
            fetch.num_asked_blocks = end
            wanted = arrival.announce(
                start=reserved.num_cached_tokens + first * self._config.block_size,
                block_ids=opened.block_ids[first:end],
                first_layer=0,
                end_layer=self._config.num_layers,
                digests=opened.digests[first * share : end * share],
            )
            assert wanted is not None, (fetch, first, end)
            self._effects.append(
                StartRead(
                    read_id=ReadId(fetch.attempt_id, wanted.number),
                    source=fetch.peer.ref,
                    source_block_ids=wanted.source_block_ids,
                    target_block_ids=wanted.target_block_ids,
                    first_layer=wanted.first_layer,
                    end_layer=wanted.end_layer,
                    digests=wanted.digests,
                    is_prefix=True,
                )
            )

    def _on_stream_broken(self, attempt_id: AttemptId, now: float) -> None:
        fetch = self._wanted(attempt_id)
        if fetch is None or not fetch.is_stream_open:
            return
        fetch.is_stream_open = False
        if fetch.outcome is None:
            self._stop(fetch, FetchOutcome.LOST, now)

    # -- the transport --

    def _on_read_done(self, event: ReadDone, now: float) -> None:
        attempt_id, number = event.read_id
        fetch = self._fetches[attempt_id]
        arrival = fetch.arrival
        assert arrival is not None, event
        num_blocks = arrival.num_blocks_of(number)
        arrival.end_read(number, is_ok=event.is_ok, bad_indices=event.bad_indices)
        if fetch.state is FetchState.ENDING:
            if not arrival.num_open_reads:
                del self._fetches[attempt_id]
                self._command(ReadEnded(attempt_id=attempt_id))
            return
        assert fetch.ticket is not None, fetch
        if event.is_ok:
            num_bytes = num_blocks * self._block_bytes
            fetch.num_bytes += num_bytes
            self.chooser.came(fetch.ticket, num_bytes)
        if fetch.outcome is None:
            if not event.is_ok:
                fetch.outcome = FetchOutcome.LOST
            elif event.bad_indices:
                fetch.outcome = FetchOutcome.DAMAGED
            else:
                self._judge_pace(fetch, now)
        self._ask(fetch)
        if self._end_if_read(fetch, now):
            return
        num_tokens = arrival.num_verified_tokens
        if num_tokens > fetch.num_told_tokens:
            fetch.num_told_tokens = num_tokens
            self._command(BlocksFetched(attempt_id=attempt_id, num_tokens=num_tokens))

    def _judge_pace(self, fetch: Fetch, now: float) -> None:
        """A piece is here: go on as long as the rest comes sooner than it is computed."""
        opened, arrival, reserved = fetch.opened, fetch.arrival, fetch.reserved
        assert opened is not None, fetch
        assert arrival is not None, fetch
        assert reserved is not None, fetch
        assert fetch.plan is not None, fetch
        end = self._num_tokens_of(reserved, len(opened.block_ids))
        num_rest_bytes = len(opened.block_ids) * self._block_bytes - fetch.num_bytes
        s_per_byte = (now - fetch.opened_at) / fetch.num_bytes
        rest_s = self.chooser.recompute_s(
            num_cached_tokens=arrival.num_verified_tokens, num_tokens=end
        )
        limit_at = fetch.begun_at + fetch.plan.limit_s
        if self._fetch_config.mode is FetchMode.ALWAYS:
            fetch.stop_at = limit_at
            return
        if rest_s is None:
            fetch.stop_at = min(limit_at, now + self._fetch_config.blind_s)
            return
        pace_s = max(num_rest_bytes * s_per_byte, 0.0)
        if pace_s > max(rest_s, self._fetch_config.min_pace_s):
            self._stop_reads(fetch, FetchOutcome.SLOW)
            return
        span_s = self._fetch_config.span_blocks * self._block_bytes * s_per_byte
        # A peer that stands still for a moment, as any process does, is waited for in proportion to what
        # giving up would cost.
        patience_s = max(
            self._fetch_config.slack * span_s,
            self._fetch_config.probe_share * rest_s,
            self._fetch_config.min_pace_s,
        )
        fetch.stop_at = min(limit_at, now + patience_s)

    # -- ends --

    def _stop(self, fetch: Fetch, outcome: FetchOutcome, now: float) -> None:
        """Ask for no more; end with what is verified, at once or after the last read."""
        self._stop_reads(fetch, outcome)
        self._end_if_read(fetch, now)

    def _stop_reads(self, fetch: Fetch, outcome: FetchOutcome) -> None:
        fetch.outcome = fetch.outcome or outcome
        fetch.stop_at = None
        if fetch.arrival is not None and fetch.arrival.num_open_reads:
            self._effects.append(StopReads(attempt_id=fetch.attempt_id))

    def _end_if_read(self, fetch: Fetch, now: float) -> bool:
        """FetchEnded, once all is read or no more is asked for, and no read is outstanding."""
        assert fetch.arrival is not None, fetch
        if fetch.arrival.num_open_reads:
            return False
        if fetch.outcome is None:
            assert fetch.opened is not None, fetch
            num_blocks = len(fetch.opened.block_ids)
            assert fetch.num_asked_blocks == num_blocks, fetch
            if num_blocks == fetch.num_wanted_blocks(self._config.block_size):
                fetch.outcome = FetchOutcome.WHOLE
            elif fetch.has_left_disk:
                fetch.outcome = FetchOutcome.MEMORY_ONLY
            else:
                fetch.outcome = FetchOutcome.SHORT
        self._close_stream(fetch)
        del self._fetches[fetch.attempt_id]
        num_tokens = fetch.arrival.num_verified_tokens
        self._command(FetchEnded(attempt_id=fetch.attempt_id, num_tokens=num_tokens))
        self._learn(fetch, fetch.outcome, num_tokens, now)
        return True

    def _drop(self, fetch: Fetch, now: float) -> None:
        """The core has ended it, or is told to: it is owed a ReadEnded.

        An attempt that is only ASKED gets one too: its FetchReserved may be on its way.
        """
        num_open_reads = fetch.arrival.num_open_reads if fetch.arrival is not None else 0
        self._close_stream(fetch)
        if fetch.ticket is not None:
            self._learn(fetch, FetchOutcome.CANCELLED, fetch.num_told_tokens, now)
        fetch.ticket, fetch.opened, fetch.stop_at = None, None, None
        if num_open_reads:
            fetch.state = FetchState.ENDING
            self._effects.append(StopReads(attempt_id=fetch.attempt_id))
        else:
            del self._fetches[fetch.attempt_id]
            self._command(ReadEnded(attempt_id=fetch.attempt_id))

    def _learn(self, fetch: Fetch, outcome: FetchOutcome, num_tokens: int, now: float) -> None:
        """Remember how it went, and tell the books."""
        learn(fetch, outcome, self.chooser, num_tokens=num_tokens, now=now)
        self._effects.append(
            record_of(
                fetch,
                outcome,
                num_tokens=num_tokens,
                block_size=self._config.block_size,
                elapsed_s=now - fetch.begun_at,
            )
        )

    # -- plumbing --

    def _num_tokens_of(self, reserved: FetchReserved, num_blocks: int) -> int:
        """Tokens of the request up to the end of so many of the blocks that are wanted."""
        return reserved.num_cached_tokens + num_blocks * self._config.block_size

    @property
    def _block_bytes(self) -> int:
        return self._fetch_config.block_bytes

    def _wanted(self, attempt_id: AttemptId) -> Fetch | None:
        """The attempt's fetch, if its end is still to be told."""
        fetch = self._fetches.get(attempt_id)
        return fetch if fetch is not None and fetch.state is not FetchState.ENDING else None

    def _close_stream(self, fetch: Fetch) -> None:
        if fetch.is_stream_open:
            fetch.is_stream_open = False
            self._effects.append(CloseStream(attempt_id=fetch.attempt_id))

    def _wakeups(self) -> Iterator[float]:
        for fetch in self._fetches.values():
            if fetch.ahead_at is not None:
                yield fetch.ahead_at
            if fetch.stop_at is not None:
                yield fetch.stop_at

    def _command(self, command: Command) -> None:
        self._effects.append(SendCommand(command=command))

    def _take_effects(self) -> list[FetchEffect]:
        effects, self._effects = self._effects, []
        return effects
