"""The cluster's secret: a file in the data directory, made on first use, read by every process.

It seeds the block hashes (so that nobody outside can compute a cache key) and yields the key of
internal calls. Only its fingerprint is ever sent.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.config.private_file import create_private
from moonpool.errors import ConfigError
from moonpool.kv.block_hash import secret_fingerprint

FILE_NAME = "cluster.secret"
_NUM_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSecret:
    """32 bytes that the processes of a cluster share."""

    value: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell whether two processes have the same secret, and nothing else."""
        return secret_fingerprint(self.value)

    @property
    def rpc_key(self) -> str:
        """Bearer token of internal gRPC calls."""
        return hmac.digest(self.value, b"moonpool rpc key 1", "sha256").hex()


def load_or_create_secret(data_dir: Path) -> ClusterSecret:
    """Read `cluster.secret`, or make it (mode 0600). Safe when several processes start at once.

    Raises:
        ConfigError: The file is readable by others, damaged, or cannot be made.
    """
    path = data_dir / FILE_NAME
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_private(path, f"{secrets.token_hex(_NUM_BYTES)}\n".encode())
        mode = path.stat().st_mode & 0o777
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The cluster secret {path} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}: others can read it; allowed is 0600")
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != _NUM_BYTES:
        raise ConfigError(
            f"{path} must hold {2 * _NUM_BYTES} hex digits; delete it to have a new one made "
            "(every cached block is then unknown)"
        )
    return ClusterSecret(value=value)
