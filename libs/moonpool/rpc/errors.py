"""Errors of calls: `errors_from` turns a peer's gRPC failure into the MoonpoolError it was.

The server's half is interceptor.py. This half imports no logging: the client SDK stands on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from moonpool.errors import MoonpoolError
from moonpool.wire import status as wire_status

#: Where google.rpc.Status travels in trailing metadata, by gRPC's convention.
STATUS_DETAILS = "grpc-status-details-bin"


def error_from(failure: grpc.RpcError, peer: str) -> MoonpoolError:
    """The error that the peer raised, or one that says what the transport saw.

    Args:
        peer: Named in messages of the transport's, which do not name it themselves.
    """
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return wire_status.from_rpc_status(status_pb2.Status.FromString(value))
    code: int = failure.code().value[0]
    return wire_status.from_rpc_status(
        status_pb2.Status(code=code, message=f"{peer}: {failure.details()}")
    )


@contextlib.contextmanager
def errors_from(peer: str) -> Iterator[None]:
    """Raise the MoonpoolError behind a failed call to `peer`."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from(failure, peer) from failure
