#!/usr/bin/env bash
# Regenerate libs/moonpool/api/v1 from proto/. The output is committed; a test checks that it is fresh.
#   proto/generate.sh [OUTPUT_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-libs}
python -m grpc_tools.protoc -Iproto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/moonpool/api/v1/*.proto
