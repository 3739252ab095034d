"""The directory on Redis (or Valkey), for store nodes on several hosts.

    moonpool.<cluster>.stores                        set: the names of records that may be there
    moonpool.<cluster>.store.<store>@<incarnation>   string with a life time: one record, MessagePack

Life: entering the context starts to connect and returns at once, whether a server is there or not. It is
tried again for ever; while there is no connection every call fails at once, and a call that
fails, or is late, ends the connection. So a call never waits for a connection to be made, and what
was late is never taken for the answer to another call.

Rules
- Plain commands only: SADD, SREM, SET, DEL, SMEMBERS, MGET, PEXPIRE, PING. A server may forbid this user
  everything else and all keys but those of its cluster.
- Who may write to the server may name addresses that store nodes then connect to. Protect it as the bus.
- A record that cannot be read is left out and counted: its writer speaks another version, or is
  not one of ours.

Only composition roots of store nodes import this module; everything else sees `Directory`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from moonpool.bus.subjects import token
from moonpool.errors import ConfigError
from moonpool.ids import WorkerKey
from moonpool.store.directory import CALL_TIMEOUT_S, LIFE_TIME_S
from moonpool.tiering.store_record import RingView, StoreRecord

CONNECT_TIMEOUT_S = 2.0
RECONNECT_WAIT_S = 0.25
CLOSE_TIMEOUT_S = 1.0
#: Records that one `read` takes, in order of their names; more are not of one cluster's store nodes.
MAX_RECORDS = 256

_SCHEMES = ("redis", "rediss", "unix")
_AnswerT = TypeVar("_AnswerT")

log = structlog.get_logger("moonpool.store")


class RedisDirectory:
    """Implements Directory.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://` over TLS, or `unix://`.
        cluster: Part of every key: several clusters can share a server.

    Raises:
        ConfigError: Not such a URL or name.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str,
        life_time_s: float = LIFE_TIME_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        if urlsplit(url).scheme not in _SCHEMES:
            raise ConfigError(
                f"store.redis_url: the scheme must be one of {', '.join(_SCHEMES)}, as in "
                "redis://host:6379/0"
            )
        self._root = f"moonpool.{token(cluster, 'cluster name')}"
        self._life_time_ms = max(int(life_time_s * 1e3), 1)
        self._call_timeout_s = call_timeout_s
        try:
            self._client = Redis.from_url(
                url,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=4,
            )
        except ValueError as error:
            raise ConfigError(f"store.redis_url: {error}") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StoreRecord)
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._connecting: asyncio.Task[None] | None = None
        self._num_failed_calls = 0
        #: What was last in the way, so that it is logged once.
        self._problem = ""
        self._num_bad_records = 0

    @property
    def num_failed_calls(self) -> int:
        return self._num_failed_calls

    @property
    def num_bad_records(self) -> int:
        return self._num_bad_records

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    async def wait_connected(self) -> None:
        """Return when a server is there; the caller sets the deadline."""
        await self._connected.wait()

    async def publish(self, record: StoreRecord) -> bool:
        name = str(record.member.key)
        data = self._encoder.encode(record)

        async def write() -> bool:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(self._names_key, name)
                # When the cluster is gone, so is this.
                pipeline.pexpire(self._names_key, 2 * self._life_time_ms)
                pipeline.set(self._record_key(name), data, px=self._life_time_ms)
                await pipeline.execute()
            return True

        return await self._call(write) is not None

    async def withdraw(self, key: WorkerKey) -> bool:
        name = str(key)

        async def remove() -> bool:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.delete(self._record_key(name))
                pipeline.srem(self._names_key, name)
                await pipeline.execute()
            return True

        return await self._call(remove) is not None

    async def read(self) -> RingView | None:
        async def fetch() -> dict[bytes, bytes]:
            names = sorted(map(_as_bytes, await self._client.smembers(self._names_key)))
            names = names[:MAX_RECORDS]
            if not names:
                return {}
            keys = [self._record_key(name.decode(errors="replace")) for name in names]
            found = dict(zip(names, await self._client.mget(keys), strict=True))
            ended = [name for name, value in found.items() if value is None]
            if ended:
                # One that comes back right now is heard of again at its next beat.
                await self._client.srem(self._names_key, *ended)
            return {name: _as_bytes(value) for name, value in found.items() if value is not None}

        values = await self._call(fetch)
        if values is None:
            return None
        decoded = (self._decode(name, value) for name, value in values.items())
        return RingView.of(record for record in decoded if record is not None)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._connecting = self._tasks.create_task(self._keep_connected(), name="redis-connect")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._connecting is not None
        self._connecting.cancel()
        try:
            await asyncio.wait((self._connecting,))
            self._connected.clear()
            with suppress(TimeoutError, OSError, RedisError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._client.aclose()
        finally:
            await self._tasks.__aexit__(exc_type, exc, traceback)

    # -- parts --

    @property
    def _names_key(self) -> str:
        return f"{self._root}.stores"

    def _record_key(self, name: str) -> str:
        return f"{self._root}.store.{name}"

    async def _call(self, call: Callable[[], Awaitable[_AnswerT]]) -> _AnswerT | None:
        """The answer; None if there was none in time."""
        swallowed = _SwallowedCancel()
        if self.is_connected:
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    answer = await call()
                swallowed.check()
                return answer
            except ResponseError as error:
                # It is there and does not want to: the connection is as good as before.
                self._warn_once("directory.refused", error)
            except (TimeoutError, OSError, RedisError) as error:
                self._lose(error)
            swallowed.check()
        self._num_failed_calls += 1
        return None

    def _decode(self, name: bytes, value: bytes) -> StoreRecord | None:
        try:
            record = self._decoder.decode(value)
        except msgspec.DecodeError:
            self._num_bad_records += 1
            return None
        if str(record.member.key).encode() != name:
            self._num_bad_records += 1
            return None
        return record

    def _warn_once(self, event: str, error: Exception) -> None:
        """Until it is something else that is in the way."""
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            self._problem = problem
            log.warning(event, why=problem)

    def _lose(self, error: Exception) -> None:
        if self.is_connected:
            log.warning("directory.lost", error=type(error).__name__)
            self._connected.clear()
            self._lost.set()

    async def _keep_connected(self) -> None:
        swallowed = _SwallowedCancel()
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._client.connection_pool.disconnect()
                    await self._client.ping()
            except (TimeoutError, OSError, RedisError) as error:
                swallowed.check()
                log.debug("directory.not_connected", error=type(error).__name__)
                # A password that the server does not take comes this way, too.
                self._warn_once("directory.unreachable", error)
                await asyncio.sleep(RECONNECT_WAIT_S)
                continue
            swallowed.check()
            log.info("directory.connected")
            self._problem = ""
            self._lost.clear()
            self._connected.set()
            await self._lost.wait()


class _SwallowedCancel:
    """The client waits with asyncio.wait_for, which on Python 3.11 loses a cancellation that comes together
    with the answer: whoever cancelled would wait for ever.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_before = task.cancelling()

    def check(self) -> None:
        """Raises CancelledError: the task was cancelled since, and nobody told it."""
        if self._task.cancelling() > self._num_before:
            raise asyncio.CancelledError


def _as_bytes(value: bytes | str) -> bytes:
    """The client gives bytes, as it is set up; its types allow both."""
    return value if isinstance(value, bytes) else value.encode()
