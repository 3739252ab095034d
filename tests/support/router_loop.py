"""A router's dispatch loop over its real machines, which one worker has joined. No IO."""

from __future__ import annotations

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.clock import Clock, ManualClock
from moonpool.core.protocol import BlockLedger
from moonpool.dispatch.config import DispatchConfig
from moonpool.dispatch.dispatcher import Dispatcher
from moonpool.dispatch.membership import Announcement, Membership, MembershipConfig
from moonpool.failpoints import Failpoints
from moonpool.handoff.messages import RouterMessage
from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.telemetry.spans import TraceRing
from moonpool.wire.session import WorkerFrame, router_message_to_pb
from moonpool.wire.worker import LoadReport, WorkerHello
from moonpool_router.compatibility import Compatibility
from moonpool_router.dispatch_loop import DispatchLoop, FleetWatcher
from support.fake_worker import make_hello

#: Where the worker lives, and who it is.
ADDRESS = "127.0.0.1:1"
HELLO = make_hello(WorkerKey(WorkerId("d0"), Incarnation("i1")))

_IDLE = LoadReport(ledger=BlockLedger(num_total=100, num_free=100, num_cached=0, num_referenced=0))


class EncodingLinks:
    """Streams that encode as real ones do, and end there."""

    def __init__(self) -> None:
        self.sent: list[pb.RouterMessage] = []

    def open(self, address: str) -> None: ...

    def close(self, address: str) -> None: ...

    def send(self, address: str, message: RouterMessage) -> None:
        self.sent.append(router_message_to_pb(message))

    @property
    def decoding(self) -> list[str]:
        """Requests that were sent to be decoded, in order."""
        decodes = [message.decode for message in self.sent if message.HasField("decode")]
        return [decode.request.request_id for decode in decodes]


def hear(loop: DispatchLoop, address: str, hello: WorkerHello, *, sequence: int = 1) -> None:
    """A worker announces itself, and says hello where it is dialled."""
    loop.on_announced(
        Announcement(
            key=hello.worker,
            role=hello.role,
            address=address,
            sequence=sequence,
            valid_for_s=3.0,
        )
    )
    loop.on_hello(address, hello)


def joined_loop(
    links: EncodingLinks, watcher: FleetWatcher, *, clock: Clock | None = None
) -> DispatchLoop:
    """`HELLO` lives at `ADDRESS` and is idle."""
    loop = DispatchLoop(
        Dispatcher(DispatchConfig()),
        Membership(MembershipConfig()),
        links=links,
        watcher=watcher,
        compatibility=Compatibility(
            model_fingerprint=HELLO.namespace.model_fingerprint,
            secret_fingerprint=HELLO.secret_fingerprint,
        ),
        traces=TraceRing(max_traces=0),
        clock=clock or ManualClock(),
        failpoints=Failpoints.off(),
    )
    hear(loop, ADDRESS, HELLO)
    loop.on_frame(ADDRESS, HELLO.worker, WorkerFrame(reports=(), load=_IDLE))
    return loop
