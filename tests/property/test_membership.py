"""Any order of announcements, hellos, cuts and ticks: what came out always agrees with itself."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.dispatch.events import WorkerJoined, WorkerLost
from moonpool.dispatch.membership import (
    Announcement,
    CloseLink,
    Membership,
    MembershipConfig,
    MembershipEffect,
    OpenLink,
)
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.routing.worker_view import WorkerInfo, WorkerRole

_ADDRESSES = st.sampled_from(["h:1", "h:2", "h:3"])
_KEYS = st.builds(
    WorkerKey,
    st.sampled_from([WorkerId("p0"), WorkerId("d0")]),
    st.sampled_from([Incarnation(f"i{number}") for number in range(4)]),
)
_ROLES = st.sampled_from(WorkerRole)


class MembershipModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = Membership(MembershipConfig(seeds=("h:3",)))
        self.open: set[str] = set()
        self.joined: dict[WorkerKey, WorkerInfo] = {}
        self.gone: set[WorkerKey] = set()
        self.seen: dict[WorkerId, set[Incarnation]] = {}
        self.perform(self.machine.start(0.0))

    def perform(self, effects: list[MembershipEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLink(address=address):
                    assert address not in self.open
                    self.open.add(address)
                case CloseLink(address=address):
                    self.open.discard(address)
                case WorkerLost(key=key):
                    del self.joined[key]
                case WorkerJoined(info=info):
                    assert info.key not in self.gone
                    for other in tuple(self.joined):
                        assert other.worker_id != info.key.worker_id or other == info.key
                    self.joined[info.key] = info
                    self.gone |= {
                        WorkerKey(info.key.worker_id, incarnation)
                        for incarnation in self.seen.get(info.key.worker_id, set())
                        if incarnation != info.key.incarnation
                    }
                    self.seen.setdefault(info.key.worker_id, set()).add(info.key.incarnation)

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.machine.tick(self.now))

    @rule(is_connected=st.booleans())
    def bus_changes(self, is_connected: bool) -> None:
        self.perform(self.machine.on_bus_changed(is_connected, self.now))

    @rule(
        key=_KEYS, address=_ADDRESSES, role=_ROLES, sequence=st.integers(0, 3), leaves=st.booleans()
    )
    def announced(
        self, key: WorkerKey, address: str, role: WorkerRole, sequence: int, leaves: bool
    ) -> None:
        announcement = Announcement(
            key=key,
            role=role,
            address=address,
            sequence=sequence,
            valid_for_s=3.0,
            is_leaving=leaves,
        )
        self.perform(self.machine.on_announced(announcement, self.now))

    @rule(key=_KEYS, address=_ADDRESSES, role=_ROLES, fits=st.booleans())
    def hello(self, key: WorkerKey, address: str, role: WorkerRole, fits: bool) -> None:
        if address in self.open:
            info = WorkerInfo(key=key, role=role, address=address)
            self.perform(self.machine.on_hello(address, info, "" if fits else "other", self.now))

    @rule(address=_ADDRESSES)
    def cut(self, address: str) -> None:
        if address in self.open:
            self.open.discard(address)
            self.perform(self.machine.on_closed(address, "cut", self.now))

    @rule(address=_ADDRESSES)
    def refused(self, address: str) -> None:
        if address in self.open:
            self.open.discard(address)
            self.perform(self.machine.on_refused(address, "no", self.now))

    @rule(address=_ADDRESSES)
    def frame(self, address: str) -> None:
        self.machine.on_frame(address, self.now)

    @invariant()
    def agrees(self) -> None:
        self.machine.validate()
        assert {info.key: info for info in self.machine.live} == self.joined
        assert {info.address for info in self.machine.live} <= self.open


TestMembership = MembershipModel.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=30)
