"""gRPC options: keepalive both ways, bounded messages, no retries behind our back.

A peer is dead after KEEPALIVE_TIME + KEEPALIVE_TIMEOUT = 5 s of silence. Both ends ping: a worker must
notice a router's death too. A server that is not told otherwise answers pings on a quiet stream with
GOAWAY (too_many_pings) after 10 s, hence MIN_PING_INTERVAL.
"""

from __future__ import annotations

KEEPALIVE_TIME_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 3_000

#: Must stay at or below KEEPALIVE_TIME_MS / 2: pings arrive early by a clock's jitter.
MIN_PING_INTERVAL_MS = 1_000

#: Between the cluster's own processes: a 1 M token request, a snapshot.
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024

#: At the public door.
PUBLIC_MESSAGE_BYTES = 8 * 1024 * 1024

#: Most metadata of one call.
MAX_METADATA_BYTES = 32 * 1024

#: Streams of one connection beyond this wait: a peer cannot open streams without bound.
MAX_CONCURRENT_STREAMS = 4_096

RECONNECT_MIN_MS = 100
RECONNECT_MAX_MS = 1_000

Options = list[tuple[str, int]]


def _shared(max_message_bytes: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # The keepalive's own timeout is not enough: an unanswered ping has one too, of a minute.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ]


def server_options(max_message_bytes: int) -> Options:
    return [
        *_shared(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # Two processes that bind one port would share its connections at random.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_shared(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MIN_MS),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        # A channel of its own for each peer object: closing one must not touch another's.
        ("grpc.use_local_subchannel_pool", 1),
        # Worker addresses are inside the cluster; no proxy of the environment applies to them.
        ("grpc.enable_http_proxy", 0),
    ]
