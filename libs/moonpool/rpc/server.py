"""RpcServer: one grpc.aio server with health, reflection, error mapping and bounded messages.

server = RpcServer(host="127.0.0.1", port=0)
server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, "moonpool.api.v1.Worker")
await server.start()               # health NOT_SERVING; server.port is the real one
await server.set_serving(True)
...
await server.set_serving(False)
await server.stop(grace_s=5)       # refuses what is new, waits for what runs, then cancels it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from moonpool.config.api_keys import ApiKeys
from moonpool.config.values import host_port, is_loopback
from moonpool.errors import ConfigError, UnavailableError
from moonpool.rpc.auth import KeyInterceptor
from moonpool.rpc.interceptor import ErrorInterceptor
from moonpool.rpc.options import INTERNAL_MESSAGE_BYTES, server_options


class RpcServer:
    """Add services, start, stop. Not restartable.

    Args:
        host: Address to bind; anything but loopback needs a `key`.
        port: 0 takes a free one; read `port` after `start`.
        key: The cluster key, or the keys of a door; None accepts every caller.
        operator_services: Services that only an operator's key opens, if there are keys.
        max_message_bytes: Bound of one message, both ways.
        max_calls: Calls at once; one more is refused with RESOURCE_EXHAUSTED. None: no bound.
        max_calls_per_tenant: Of these, with the keys of one tenant; None: all.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | ApiKeys | None = None,
        operator_services: Collection[str] = (),
        max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
        max_calls: int | None = None,
        max_calls_per_tenant: int | None = None,
    ) -> None:
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"host = {host!r}: binding an address that others can reach needs a key; "
                "allowed without one: 127.0.0.1, ::1, localhost"
            )
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if key is not None:
            keys = ApiKeys.single(key) if isinstance(key, str) else key
            guard = KeyInterceptor(
                keys,
                operator_services=operator_services,
                max_calls_per_tenant=max_calls_per_tenant,
            )
            interceptors.insert(0, guard)
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=server_options(max_message_bytes),
            maximum_concurrent_rpcs=max_calls,
        )
        self._host = host
        self._requested_port = port
        self._port: int | None = None
        self._service_names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def port(self) -> int:
        """The bound port. Only after `start`."""
        assert self._port is not None, "start() has not returned"
        return self._port

    @property
    def address(self) -> str:
        """`host:port` for peers. Only after `start`."""
        return host_port(self._host, self.port)

    def add(
        self,
        add_to_server: Callable[[Any, grpc.aio.Server], None],  # Any: generated code is untyped
        servicer: object,
        service_name: str,
    ) -> None:
        """Add a generated service. Before `start`."""
        add_to_server(servicer, self._server)
        self._service_names.append(service_name)

    def add_generic(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add handlers without serializers (raw bytes). Before `start`."""
        self._server.add_generic_rpc_handlers(tuple(handlers))

    async def start(self) -> int:
        """Bind and listen, health NOT_SERVING. Returns the real port.

        Raises:
            UnavailableError: The address cannot be bound.
        """
        await self.set_serving(False)
        reflection.enable_server_reflection(
            (*self._service_names, reflection.SERVICE_NAME), self._server
        )
        target = host_port(self._host, self._requested_port)
        try:
            self._port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise UnavailableError(
                f"Cannot listen on {target}: the port is taken or the address is not this host's.",
                code="address_in_use",
            ) from error
        await self._server.start()
        return self.port

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers, for "" and every service added."""
        state = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._service_names):
            await self._health.set(name, state)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, wait `grace_s` for the running ones, cancel the rest. Idempotent."""
        await self._server.stop(grace_s)
