"""The serving end of the gRPC transport: KvPlane.Read, a stream of raw bytes out of our pool.

    reader   Open(source, credit)   Spans   Spans   Credit ...
    server   empty message          bytes of the first spans in order   bytes of the second ...

Rules
1. The empty message says that Open was accepted: the source named is this incarnation.
2. The spans' bytes come in order, in messages of up to MESSAGE_BYTES. Never more bytes are under way than credit allows.
3. The stream's only other end is an error: FAILED_PRECONDITION for another incarnation, OUT_OF_RANGE
   for spans outside of the pool, INVALID_ARGUMENT for what no reader sends.
4. The server reads its own memory as it is. Whether the bytes are those that were announced is for
   the reader's digest to tell.

It needs no task of its own: it takes a request only when it can send nothing, since it has no work or
no credit, and what the reader sends meanwhile waits in the stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from moonpool.errors import FailedPreconditionError
from moonpool.ids import WorkerKey
from moonpool.memory.heap import keep_freed_memory
from moonpool.native import Gathering, Kernels, RangeError
from moonpool.transport.base import ByteArray
from moonpool.wire import kv_read
from moonpool.wire.fields import InvalidMessageError

#: Smaller messages cost more of Python. Larger ones gain nothing where both ends keep freed memory, as
#: they do, and fall out of the cache between copies.
MESSAGE_BYTES = 1 << 20
#: Most spans that wait to be served on one stream: ten gigabytes of a small model's blocks. A reader that is
#: one asks for more only when little is under way.
MAX_WAITING_SPANS = 1 << 20
#: A stream must say whom it means within this time.
OPEN_TIMEOUT_S = 5.0

#: The pool of the incarnation named, uint8[pool_bytes].
#: Raises FailedPreconditionError if it is not the one that lives here.
PoolOf = Callable[[WorkerKey], ByteArray]


def kv_read_handler(pool_of: PoolOf, kernels: Kernels) -> grpc.GenericRpcHandler:
    """The handler to add to a grpc.aio server, raw bytes both ways.

    The process keeps freed memory from then on: each message is a new buffer, and gRPC copies it to
    another one.
    """
    keep_freed_memory()

    async def read(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        try:
            await _serve(requests, context.write, pool_of, kernels)
        except FailedPreconditionError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except RangeError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except InvalidMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no ReadOpen came")

    return grpc.method_handlers_generic_handler(
        kv_read.SERVICE, {"Read": grpc.stream_stream_rpc_method_handler(read)}
    )


def _next_message_bytes(num_left: int) -> int:
    """Messages of nearly the same size: a small last one would cost as much as a large one."""
    return -(-num_left // -(-num_left // MESSAGE_BYTES))


async def _serve(
    requests: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[None]],
    pool_of: PoolOf,
    kernels: Kernels,
) -> None:
    async with asyncio.timeout(OPEN_TIMEOUT_S):
        first = await anext(requests, None)
    opened = None if first is None else kv_read.decode(first)
    if not isinstance(opened, kv_read.OpenRead):
        raise InvalidMessageError("the first message of a read stream is ReadOpen")
    pool = pool_of(opened.source)
    credit = opened.credit_bytes
    #: Each with its spans.
    reads: deque[tuple[Gathering, int]] = deque()
    num_waiting = 0
    await write(b"")
    while True:
        while reads and credit >= (count := _next_message_bytes(reads[0][0].num_left)):
            credit -= count
            gathering, num_spans = reads[0]
            await write(gathering.take(count))
            if not gathering.num_left:
                reads.popleft()
                num_waiting -= num_spans
        request = await anext(requests, None)
        if request is None:
            return
        match kv_read.decode(request):
            case kv_read.ReadSpans(spans=spans):
                num_waiting += len(spans)
                if num_waiting > MAX_WAITING_SPANS:
                    raise InvalidMessageError(
                        f"{num_waiting} spans wait for credit on one stream; at most {MAX_WAITING_SPANS} may"
                    )
                reads.append((kernels.gather(pool, spans), len(spans)))
            case kv_read.GrantCredit(credit_bytes=more):
                credit += more
            case kv_read.OpenRead():
                raise InvalidMessageError("a read stream is opened once")
