"""`python -m moonpool_kvstore --config FILE`: one store node, a single process."""

from __future__ import annotations

import sys

from moonpool.config.process import KvStoreConfig
from moonpool.service.main import main
from moonpool_kvstore.app import build

if __name__ == "__main__":
    sys.exit(main(build, KvStoreConfig, program="moonpool_kvstore", about=__doc__))
