"""gRPC: servers, channels, calls with deadlines, and errors mapped at the boundary."""

import os

# Its C core writes lines of its own format to stderr, where ours are JSON: only errors, unless the
# operator asks for more. Read when grpc is first imported, hence here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
