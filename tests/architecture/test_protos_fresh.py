"""libs/moonpool/api/v1 is what proto/generate.sh makes of proto/, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
API = Path("moonpool/api/v1")


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / "proto/generate.sh", tmp_path], env={**os.environ, "PATH": path}, check=True
    )
    fresh = {file.name: file.read_bytes() for file in (tmp_path / API).iterdir()}
    committed = {file.name: file.read_bytes() for file in (ROOT / "libs" / API).glob("*_pb2*")}
    assert committed.keys() == fresh.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []
