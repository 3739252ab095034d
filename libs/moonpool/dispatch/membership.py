"""Membership: which workers a router knows, which of them it is joined to, and why not the others.

What it is: a machine without IO. Announcements, hellos, frames and cut streams go in; streams to open
and close, and WorkerJoined and WorkerLost for the request machine, come out.

Rules
- Announcements only tell where to knock. Who a worker is, its own address says: the hello on a
  stream to that address. A worker counts as live while its stream stands.
- A stream that is cut means dead, at once. A stream that is silent means dead once the
  announcements are silent too, for `dead_after_s`. Nobody is heard by a router that was itself stopped:
  after a late tick everyone has `GRACE_S` to be heard.
- Losing the bus loses nobody: known addresses are tried again for ever while it is away.
- One incarnation of a worker at a time: the hello that comes last wins, and an incarnation that was
  replaced is never accepted again, whatever arrives late. An announcement older than one already
  seen of its incarnation is dropped.
- What does not fit, in our eyes or in its own, is refused in words; it is asked again when it comes
  back as another incarnation, and now and then. A second address of a worker that lives is not: it is
  asked once that worker is lost.
- Who may announce is the broker's to say (docs/adr/0009-broker-token.md). What one that announces nonsense
  costs is bounded all the same: of addresses where nobody is joined, `max_unjoined` are tried; others have
  to announce themselves again.

Life of a link (one per address)

    CONNECTING -> UP         hello fits                          WorkerJoined
               -> REFUSED    does not fit
               -> LOST       no answer, or cut
    UP         -> LOST       cut, silent, or replaced            WorkerLost
    LOST       -> CONNECTING after a pause, or when it announces itself
    REFUSED    -> CONNECTING after a long pause, or when another incarnation announces itself
    LOST, REFUSED -> (gone)  not announced for `forget_after_s` while the bus stands
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moonpool.dispatch.events import WorkerJoined, WorkerLost
from moonpool.ids import WorkerKey
from moonpool.kv.replaced_incarnations import ReplacedIncarnations
from moonpool.routing.worker_view import WorkerInfo, WorkerRole

#: A tick that comes later than this after it was due: this process was stopped, or its loop was held.
LATE_S = 0.1
#: How long what came in meanwhile has to be read before silence counts again.
GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    #: A joined worker whose stream and announcements are both silent is dead after this long.
    dead_after_s: float = 5.0
    #: First pause before a lost address is tried again; doubles up to `max_retry_s`.
    min_retry_s: float = 0.1
    max_retry_s: float = 1.0
    #: Pause before a refused worker is asked again: what did not fit may have been mended.
    retry_refused_s: float = 10.0
    #: A lost address that nobody announces is forgotten after this long.
    forget_after_s: float = 30.0
    #: Addresses that are tried at a time, seeds apart.
    max_unjoined: int = 256
    #: Addresses from the configuration: tried for ever, announced or not.
    seeds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A worker said over the bus that it lives."""

    key: WorkerKey
    role: WorkerRole
    address: str
    #: Counts within an incarnation.
    sequence: int
    valid_for_s: float
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLink:
    """Open a stream to this address; its hello, its end and every frame are reported."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """Close the stream to this address; what it still reports is ignored."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreAddress:
    """So many are tried that this address is not. Told of the first one since one was taken."""

    address: str
    num_unjoined: int


MembershipEffect = OpenLink | CloseLink | IgnoreAddress | WorkerJoined | WorkerLost


class LinkState(enum.StrEnum):
    CONNECTING = "connecting"
    UP = "up"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a router knows about one address, for status."""

    address: str
    state: LinkState
    #: From the hello if there was one, else from the announcement; None for a silent seed.
    key: WorkerKey | None
    role: WorkerRole | None
    #: Why it is refused or lost.
    because: str
    is_leaving: bool


@dataclass(slots=True)
class _Link:
    address: str
    is_seed: bool
    state: LinkState = LinkState.CONNECTING
    info: WorkerInfo | None = None
    announced: Announcement | None = None
    #: Last announcement, hello or frame; later if this silence was forgiven.
    heard_at: float = 0.0
    #: Once for each silence: a router that is always late would else hold a dead worker for alive.
    is_forgiven: bool = False
    announced_at: float | None = None
    retry_at: float = 0.0
    num_failures: int = 0
    because: str = ""
    #: Who was refused, if known; another incarnation is asked again at once.
    refused_key: WorkerKey | None = None

    def hear(self, now: float) -> None:
        self.heard_at, self.is_forgiven = now, False


class Membership:
    """See the file's head. Every method returns the effects, in order."""

    def __init__(self, config: MembershipConfig) -> None:
        self._config = config
        self._links: dict[str, _Link] = {}
        self._incarnations = ReplacedIncarnations()
        self._is_bus_connected = False
        #: The last unknown address was ignored.
        self._is_ignoring = False

    # -- what happens --

    def start(self, now: float) -> list[MembershipEffect]:
        """Connect to the seeds."""
        effects: list[MembershipEffect] = []
        for address in self._config.seeds:
            if address not in self._links:
                effects += self._open(self._new_link(address, is_seed=True), now)
        return effects

    def on_bus_changed(self, is_connected: bool, now: float) -> list[MembershipEffect]:
        """The bus came or went. When it comes back, everyone has a full time to announce itself."""
        if is_connected and not self._is_bus_connected:
            for link in self._links.values():
                if link.announced_at is not None:
                    link.announced_at = now
        self._is_bus_connected = is_connected
        return []

    def on_announced(self, announcement: Announcement, now: float) -> list[MembershipEffect]:
        key = announcement.key
        if self._incarnations.is_replaced(key):
            return []
        link = self._links.get(announcement.address)
        if link is None:
            return [] if announcement.is_leaving else self._on_new_address(announcement, now)
        last = link.announced
        if last is not None and last.key == key and last.sequence >= announcement.sequence:
            return []
        self._note(link, announcement, now)
        match link.state:
            case LinkState.UP:
                return self._on_role_announced(link, announcement)
            case LinkState.LOST if not announcement.is_leaving and now >= link.retry_at:
                return self._open(link, now)
            case LinkState.REFUSED if key != link.refused_key:
                return self._open(link, now)
            case _:
                return []

    def on_hello(
        self, address: str, info: WorkerInfo, incompatibility: str, now: float
    ) -> list[MembershipEffect]:
        """Who lives at `address` has said who it is.

        Args:
            incompatibility: In words, what does not fit; empty if all does.
        """
        link = self._links.get(address)
        if link is None or link.state is not LinkState.CONNECTING:
            return []
        link.hear(now)
        link.info = replace(info, address=address)
        link.num_failures = 0
        refusal = incompatibility or self._conflict(link, info.key)
        if refusal:
            self._refuse(link, info.key, refusal, now)
            return [CloseLink(address=address, reason=refusal)]
        effects = self._replace_others(link, info.key, now)
        link.state = LinkState.UP
        link.because = ""
        link.refused_key = None
        return [*effects, WorkerJoined(info=link.info)]

    def on_refused(self, address: str, reason: str, now: float) -> list[MembershipEffect]:
        """The worker there ended the stream: this router does not fit it."""
        link = self._links.get(address)
        if link is None or link.state is not LinkState.CONNECTING:
            return self.on_closed(address, reason, now)
        self._refuse(link, link.announced.key if link.announced else None, reason, now)
        return []

    def on_frame(self, address: str, now: float) -> None:
        """Something came on the stream."""
        link = self._links.get(address)
        if link is not None and link.state is LinkState.UP:
            link.hear(now)

    def on_closed(self, address: str, reason: str, now: float) -> list[MembershipEffect]:
        """The stream to `address` could not be opened, or was cut."""
        link = self._links.get(address)
        if link is None or link.state not in (LinkState.CONNECTING, LinkState.UP):
            return []
        return self._lose(link, reason, now)

    def tick(self, now: float) -> list[MembershipEffect]:
        """Due at `next_due`; early or late ticks do no harm."""
        due = self.next_due()
        if due is not None and now > due + LATE_S:
            heard_at = now + GRACE_S - self._config.dead_after_s
            for link in self._up_links():
                if link.heard_at < heard_at and not link.is_forgiven:
                    link.heard_at, link.is_forgiven = heard_at, True
        effects: list[MembershipEffect] = []
        for link in tuple(self._links.values()):
            match link.state:
                case LinkState.UP if now >= link.heard_at + self._config.dead_after_s:
                    reason = f"silent for {self._config.dead_after_s:g} s"
                    effects.append(CloseLink(address=link.address, reason=reason))
                    effects += self._lose(link, reason, now)
                case LinkState.LOST | LinkState.REFUSED if self._is_forgotten(link, now):
                    del self._links[link.address]
                case LinkState.REFUSED if now >= link.retry_at and self._is_alias(link):
                    link.retry_at = now + self._config.retry_refused_s
                case LinkState.LOST | LinkState.REFUSED if now >= link.retry_at:
                    effects += self._open(link, now)
                case _:
                    pass
        return effects

    # -- what is known --

    def next_due(self) -> float | None:
        """When `tick` has something to do at the earliest; None: not before another event."""
        due = [
            link.heard_at + self._config.dead_after_s
            if link.state is LinkState.UP
            else link.retry_at
            for link in self._links.values()
            if link.state is not LinkState.CONNECTING
        ]
        return min(due, default=None)

    def members(self) -> tuple[Member, ...]:
        """Everyone known, by address."""
        return tuple(
            Member(
                address=link.address,
                state=link.state,
                key=link.info.key if link.info else link.announced.key if link.announced else None,
                role=(
                    link.info.role if link.info else link.announced.role if link.announced else None
                ),
                because=link.because,
                is_leaving=link.announced is not None and link.announced.is_leaving,
            )
            for _, link in sorted(self._links.items())
        )

    @property
    def live(self) -> tuple[WorkerInfo, ...]:
        """Joined workers, by address."""
        return tuple(
            link.info
            for _, link in sorted(self._links.items())
            if link.state is LinkState.UP and link.info is not None
        )

    def validate(self) -> None:
        """One live incarnation per worker, none of them replaced."""
        live = [info.key for info in self.live]
        assert len({key.worker_id for key in live}) == len(live), live
        for key in live:
            assert not self._incarnations.is_replaced(key), key
            assert self._incarnations.is_latest(key), key
        for address, link in self._links.items():
            assert address == link.address
            assert link.refused_key is None or link.state is LinkState.REFUSED, link
        self._incarnations.validate()

    # -- parts --

    def _on_new_address(self, announcement: Announcement, now: float) -> list[MembershipEffect]:
        num_unjoined = sum(
            not link.is_seed and link.state is not LinkState.UP for link in self._links.values()
        )
        if num_unjoined >= self._config.max_unjoined:
            was_ignoring, self._is_ignoring = self._is_ignoring, True
            ignored = IgnoreAddress(address=announcement.address, num_unjoined=num_unjoined)
            return [] if was_ignoring else [ignored]
        self._is_ignoring = False
        link = self._new_link(announcement.address, is_seed=False)
        self._note(link, announcement, now)
        return self._open(link, now)

    def _new_link(self, address: str, *, is_seed: bool) -> _Link:
        link = _Link(address=address, is_seed=is_seed or address in self._config.seeds)
        self._links[address] = link
        return link

    def _note(self, link: _Link, announcement: Announcement, now: float) -> None:
        link.announced = announcement
        link.announced_at = now
        if link.info is None or link.info.key == announcement.key:
            link.hear(now)

    def _open(self, link: _Link, now: float) -> list[MembershipEffect]:
        link.state = LinkState.CONNECTING
        link.refused_key = None
        link.hear(now)
        return [OpenLink(address=link.address)]

    def _lose(self, link: _Link, reason: str, now: float) -> list[MembershipEffect]:
        was_up = link.state is LinkState.UP
        pause = self._config.min_retry_s * 2.0 ** min(link.num_failures, 16)
        link.state = LinkState.LOST
        link.because = reason
        link.retry_at = now + min(pause, self._config.max_retry_s)
        link.num_failures += 1
        if not was_up:
            return []
        assert link.info is not None, link
        self._incarnations.lose(link.info.key)
        return [WorkerLost(key=link.info.key)]

    def _refuse(self, link: _Link, key: WorkerKey | None, reason: str, now: float) -> None:
        link.state = LinkState.REFUSED
        link.because = reason
        link.refused_key = key
        link.retry_at = now + self._config.retry_refused_s

    def _is_forgotten(self, link: _Link, now: float) -> bool:
        if link.is_seed or not self._is_bus_connected:
            return False
        if link.announced_at is None:
            return True
        assert link.announced is not None, link
        silence_s = max(self._config.forget_after_s, link.announced.valid_for_s)
        return now >= link.announced_at + silence_s

    def _conflict(self, link: _Link, key: WorkerKey) -> str:
        """Why this incarnation is not accepted, whatever else fits; empty if it is."""
        if self._incarnations.is_replaced(key):
            return f"incarnation {key.incarnation} of {key.worker_id} was replaced by a later one"
        for other in self._up_links():
            if other is not link and other.info is not None and other.info.key == key:
                return f"{key} is already joined at {other.address}"
        return ""

    def _is_alias(self, link: _Link) -> bool:
        """Whoever was refused there lives at another address."""
        return any(
            other.info is not None and other.info.key == link.refused_key
            for other in self._up_links()
        )

    def _replace_others(self, link: _Link, key: WorkerKey, now: float) -> list[MembershipEffect]:
        """Whoever had this worker id before is out for good."""
        effects: list[MembershipEffect] = []
        if self._incarnations.take(key) is not None:
            for other in tuple(self._links.values()):
                info = other.info
                if other is link or info is None or info.key.worker_id != key.worker_id:
                    continue
                reason = f"replaced by {key}"
                if other.state in (LinkState.UP, LinkState.CONNECTING):
                    effects.append(CloseLink(address=other.address, reason=reason))
                    effects += self._lose(other, reason, now)
                if not other.is_seed:
                    del self._links[other.address]
        return effects

    def _on_role_announced(self, link: _Link, announcement: Announcement) -> list[MembershipEffect]:
        """A worker may change its role while it lives; only its own incarnation may say so."""
        assert link.info is not None, link
        if announcement.key != link.info.key or announcement.role == link.info.role:
            return []
        link.info = replace(link.info, role=announcement.role)
        return [WorkerJoined(info=link.info)]

    def _up_links(self) -> Iterable[_Link]:
        return (link for link in self._links.values() if link.state is LinkState.UP)
