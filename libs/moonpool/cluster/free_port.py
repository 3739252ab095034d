"""A port of loopback for a server that starts later, or again and again."""

from __future__ import annotations

import contextlib
import random
import socket

#: Below those that the system gives to clients (32,768 and up unless it was told otherwise).
_PORTS = range(12_000, 32_000)


def free_port() -> int:
    """One that nobody listens on. No connection takes it by chance while its server is away."""
    rng = random.SystemRandom()
    while True:
        port = rng.choice(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
