"""A service that does what its failpoints text says: for tests of the supervisor only.

`serve` listens until SIGTERM, `exit` ends at once, `crash` reports ready and ends, `hang` never reports.
"""

from __future__ import annotations

import signal
import sys

from moonpool.config.process import RouterConfig, read_document
from moonpool.service.ready import notify_ready


def main() -> int:
    config = read_document(sys.argv[sys.argv.index("--config") + 1], RouterConfig)
    mode = config.common.failpoints or "serve"
    stop = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    if mode == "exit":
        sys.stderr.write("cannot start: no such thing\n")
        return 3
    if mode != "hang":
        port = config.router.grpc_port or 40_000
        notify_ready("router-0", {"grpc_address": f"127.0.0.1:{port}", "grpc_port": port})
    if mode == "crash":
        return 1
    signal.sigwait(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
