"""PeerConnector: makes a Peer of the address of a worker or a store, or says in words why not."""

from __future__ import annotations

import logging
from functools import partial

import structlog

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.api.v1 import worker_pb2_grpc
from moonpool.errors import TransferError
from moonpool.handoff.messages import SourceRef
from moonpool.kv.layout import IncompatibleLayoutError, KvLayout, plan
from moonpool.rpc.channel import make_channel
from moonpool.rpc.errors import errors_from
from moonpool.rpc.metadata import call_metadata
from moonpool.rpc.store import store_stub
from moonpool.transport.select import TransportSelector
from moonpool.wire.worker import WorkerHello, worker_hello_from_pb
from moonpool.worker.compatibility import IncompatiblePeerError, check_namespace, check_secret
from moonpool.worker.peers import CONNECT_S, Peer
from moonpool.worker.reader_leases import ReaderLeases

log = structlog.get_logger("moonpool.worker")


class PeerConnector:
    """Callable: see PeerDirectory.

    Args:
        hello: Who this worker is; the peer must fit.
        layout: Of our pool, which the peer's blocks are copied to.
        rpc_key: The cluster's, for calls to peers.
    """

    def __init__(
        self,
        *,
        hello: WorkerHello,
        layout: KvLayout,
        selector: TransportSelector,
        rpc_key: str,
    ) -> None:
        self._hello = hello
        self._layout = layout
        self._selector = selector
        self._metadata = call_metadata(key=rpc_key)

    async def __call__(self, source: SourceRef) -> Peer:
        """Connect to the incarnation that `source` names.

        Raises:
            MoonpoolError: Nobody there, another incarnation, or it does not fit.
        """
        channel = make_channel(source.address)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]  # generated
            with errors_from(str(source.key)):
                described = await stub.Describe(
                    pb.DescribeRequest(), timeout=CONNECT_S, metadata=self._metadata
                )
            theirs = worker_hello_from_pb(described)
            self._check(source, theirs)
            (region, *others) = theirs.regions
            copy_plan = plan(region.layout, self._layout)
            if others or not copy_plan.is_complete:
                raise IncompatibleLayoutError(
                    [f"ranks: {len(theirs.regions)} that hold a part of the heads each, 1 here"]
                )
            connection = await self._selector.connect(region, timeout_s=CONNECT_S)
        except BaseException:
            await channel.close()
            raise
        choice = connection.choice
        log.log(
            logging.WARNING if choice.is_fallback else logging.INFO,
            "kv.transport_chosen",
            peer=choice.peer,
            wanted=choice.wanted,
            taken=choice.taken,
            why=choice.reason,
            is_same_layout=region.layout.groups == self._layout.groups,
        )
        return Peer(
            key=source.key,
            channel=channel,
            stub=stub,
            store_stub=store_stub(channel),
            prefixes=ReaderLeases(
                partial(stub.ReadPrefixes, metadata=self._metadata), peer=str(source.key)
            ),
            kv=connection.peer,
            plan=copy_plan,
            transport=choice.taken,
        )

    def _check(self, source: SourceRef, theirs: WorkerHello) -> None:
        if theirs.worker != source.key:
            raise TransferError(
                f"{source.address} is {theirs.worker}, not {source.key}.", code="kv_peer_lost"
            )
        peer = str(source.key)
        check_secret(peer, theirs.secret_fingerprint, self._hello.secret_fingerprint)
        check_namespace(peer, theirs.namespace, self._hello.namespace)
        ours = self._hello.regions[0]
        for region in theirs.regions:
            if region.digest_kind != ours.digest_kind:
                raise IncompatiblePeerError(
                    f"{peer} makes digests of kind {region.digest_kind}, this worker checks "
                    f"{ours.digest_kind}: run one version of Moonpool in the cluster.",
                    code="incompatible_digest",
                )
