"""`python -m moonpool_router --config FILE`: one router process."""

from __future__ import annotations

import sys

from moonpool.config.process import RouterConfig
from moonpool.service.main import main
from moonpool_router.app import build

if __name__ == "__main__":
    sys.exit(main(build, RouterConfig, program="moonpool_router", about=__doc__))
