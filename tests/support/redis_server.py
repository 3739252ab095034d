"""The Redis-like server that tests share with the fault runs."""

from moonpool_loadtest.faults.redis_server import RedisServer, redis_server

__all__ = ["RedisServer", "redis_server"]
