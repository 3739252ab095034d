#!/usr/bin/env bash
# For a person with one H100 or H200: is the engine right on it, and how fast. At most 8 minutes.
#
#   tests/gpu/run.sh                 correctness against the CPU engine, then the table G0 to G9
#   tests/gpu/run.sh --self-check    all of it on the CPU, at sizes that take seconds
#   tests/gpu/run.sh --only C,G1     parts of it; --no-flashinfer; --json FILE
#
# It takes the Python that is there ($PYTHON, else python3) with its torch. What else is missing it takes
# from wheels in .whl/ (whose env.sh, if there is one, it sources first), else from the package index,
# into a folder of its own. FlashInfer may be missing: then torch's kernels are checked and measured.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [[ -f .whl/env.sh ]]; then
    set +u
    # shellcheck disable=SC1091
    . .whl/env.sh || echo "run.sh: .whl/env.sh failed; going on with what is there" >&2
    set -u
fi
export PYTHONPATH="$PWD/libs${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch' || { echo "run.sh: $python has no torch" >&2; exit 2; }
needs="import moonpool.engine.device.runner, moonpool.engine.runner, tokenizers"
if ! "$python" -c "$needs" 2>/dev/null; then
    packages=(annotated-types msgspec pydantic pydantic-core safetensors structlog tokenizers
        typing-extensions typing-inspection xxhash)
    target=${TMPDIR:-/tmp}/moonpool-gpu-site
    install=("$python" -m pip install -q --no-deps --upgrade --target "$target")
    "${install[@]}" --no-index --find-links .whl "${packages[@]}" 2>/dev/null ||
        "${install[@]}" "${packages[@]}"
    export PYTHONPATH="$target:$PYTHONPATH"
    "$python" -c "$needs"
fi
exec timeout --signal=INT 480 "$python" tests/gpu/measure.py "$@"
