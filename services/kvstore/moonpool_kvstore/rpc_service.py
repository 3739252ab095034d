"""StoreServicer: what a store node answers beside Worker: offers of blocks, pins, and what it has counted.

Until the node serves, and once it has ended, every method answers UNAVAILABLE.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc

from moonpool.api.v1 import store_pb2 as pb
from moonpool.api.v1 import store_pb2_grpc
from moonpool.errors import FailedPreconditionError, UnavailableError
from moonpool.ids import WorkerKey
from moonpool.tiering.protocol import Unpin
from moonpool.wire.store import (
    StoreReport,
    pin_answer_to_pb,
    pin_chain_from_pb,
    put_answer_to_pb,
    put_offer_from_pb,
    store_report_to_pb,
    unpin_chain_from_pb,
)
from moonpool_kvstore.store_engine import StoreEngine

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Store"].full_name


class StoreServicer(store_pb2_grpc.StoreServicer):
    """Serves once `open` was called, until `close`.

    Args:
        report: What the node says of its tiers. While it serves.
    """

    def __init__(self, report: Callable[[], StoreReport]) -> None:
        self._report = report
        self._engine: StoreEngine | None = None
        self._key: WorkerKey | None = None

    def open(self, key: WorkerKey, engine: StoreEngine) -> None:
        self._key, self._engine = key, engine

    def close(self) -> None:
        self._engine = None

    async def Put(  # noqa: N802 - the method's name in the schema
        self, request: pb.PutRequest, context: grpc.aio.ServicerContext
    ) -> pb.PutReply:
        engine = self._opened()
        offer = put_offer_from_pb(request)
        self._check_meant(offer.store)
        return put_answer_to_pb(await engine.put(offer))

    async def Pin(  # noqa: N802 - the method's name in the schema
        self, request: pb.PinRequest, context: grpc.aio.ServicerContext
    ) -> pb.PinReply:
        engine = self._opened()
        pin = pin_chain_from_pb(request)
        self._check_meant(pin.store)
        return pin_answer_to_pb(await engine.pin(pin))

    async def Unpin(  # noqa: N802 - the method's name in the schema
        self, request: pb.UnpinRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnpinReply:
        engine = self._opened()
        unpin = unpin_chain_from_pb(request)
        self._check_meant(unpin.store)
        engine.send(Unpin(pin_id=unpin.pin_id))
        return pb.UnpinReply()

    async def Stats(  # noqa: N802 - the method's name in the schema
        self, request: pb.StoreStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.StoreStatsReply:
        self._opened()
        return store_report_to_pb(self._report())

    def _check_meant(self, store: WorkerKey) -> None:
        if store != self._key:
            raise FailedPreconditionError(f"This is {self._key}, not {store}.")

    def _opened(self) -> StoreEngine:
        if self._engine is None:
            raise UnavailableError("The store is starting or stopping.", code="store_not_ready")
        return self._engine
