"""Progress of a replay: a line now and then."""

from __future__ import annotations

import sys
import time

_PROGRESS_S = 5.0


class Progress:
    """Called with the number of requests that have arrived."""

    def __init__(self, name: str, num_requests: int) -> None:
        self._name = name
        self._num_requests = num_requests
        self._told_at = time.monotonic()

    def __call__(self, num_arrived: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_S or num_arrived == self._num_requests:
            self._told_at = now
            print(f"{self._name}: {num_arrived} of {self._num_requests} requests", file=sys.stderr)
