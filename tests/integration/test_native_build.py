"""The build hook: a wheel with the C library where there is a compiler, one without where not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moonpool
from moonpool import native
from moonpool.native import build
from moonpool.native.binding import LoadError, load_library
from moonpool.native.loading import LIBRARY_NAME

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "moonpool"
version = "0"
requires-python = ">=3.11"
[tool.hatch.build.targets.wheel]
packages = ["libs/moonpool"]
dev-mode-dirs = ["libs"]
[tool.hatch.build.targets.wheel.hooks.custom]
path = "libs/moonpool/native/hatch_build.py"
"""

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with only moonpool.native in it."""
    package = tmp_path / "libs" / "moonpool"
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "libs/moonpool/native", package / "native", ignore=without)
    (package / "__init__.py").touch()
    (tmp_path / ".gitignore").write_text("*.so\n")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def build_wheel(project: Path, dist: Path, version: str = "standard", **environment: str) -> Path:
    """The wheel, built into `dist`."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", f"wheel:{version}", "-d", str(dist)],
        cwd=project,
        env={**os.environ, "CFLAGS": "-O0 -DXXH_NO_INLINE_HINTS=1", **environment},
        capture_output=True,
        check=True,
    )
    (wheel,) = dist.glob("*.whl")
    return wheel


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@needs_compiler
def test_where_there_is_a_compiler_the_library_is_used() -> None:
    """Without it the tests of compiled kernels are skipped, one and all."""
    assert native.status().is_compiled, native.status().message


@needs_compiler
def test_the_wheel_of_this_project_is_whole(tmp_path: Path) -> None:
    """With the library, for this platform but any Python."""
    wheel = build_wheel(ROOT, tmp_path)
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("moonpool", moonpool.__version__, "py3", "none")
    assert platform.startswith("linux_")
    files = files_of(wheel)
    assert f"moonpool/native/{LIBRARY_NAME}" in files
    info = f"moonpool-{version}.dist-info"
    assert {file.partition("/")[0] for file in files} == {
        *("moonpool", "moonpool_router", "moonpool_prefill", "moonpool_decode"),
        *("moonpool_kvstore", "moonpool_loadtest", info),
    }
    assert {file for file in files if file.endswith("LICENSE")} >= {
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/libs/moonpool/native/third_party/xxhash/LICENSE",
    }
    with zipfile.ZipFile(wheel) as archive:
        assert (
            "moonpool = moonpool.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        )


def test_without_a_compiler_the_wheel_is_pure_python(project: Path) -> None:
    wheel = build_wheel(project, project / "dist", CC="no-such-compiler")
    files = files_of(wheel)
    assert wheel.name == "moonpool-0-py3-none-any.whl"
    assert not any(file.endswith(".so") for file in files)
    assert "moonpool/native/fallback.py" in files


@needs_compiler
def test_an_editable_install_builds_into_the_tree(project: Path) -> None:
    files = files_of(build_wheel(project, project / "dist", "editable"))
    library = project / "libs/moonpool/native" / LIBRARY_NAME
    assert load_library(library).brief.mp_abi_version() > 0
    assert not any(file.endswith(".so") for file in files)


def test_a_library_that_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="not built"):
        load_library(tmp_path / LIBRARY_NAME)
    (tmp_path / LIBRARY_NAME).write_bytes(b"not a library")
    with pytest.raises(LoadError, match="cannot be loaded"):
        load_library(tmp_path / LIBRARY_NAME)


@needs_compiler
def test_a_compiler_error_is_told(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="false"):
        build.compile_library(tmp_path / LIBRARY_NAME, "/bin/false")
    assert list(tmp_path.iterdir()) == []


def test_names_agree() -> None:
    assert build.LIBRARY_NAME == LIBRARY_NAME


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one variant only")
def test_a_compiler_from_before_bfloat16_builds_the_other_variants(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    old = tmp_path / "old-cc"
    old.write_text(
        '#!/bin/sh\ncase "$*" in *avx512bf16*) echo "unrecognized option" >&2; exit 1;; esac\n'
        f'exec {compiler} "$@"\n'
    )
    old.chmod(0o755)
    for name, is_new in ((str(compiler), True), (str(old), False)):
        library = tmp_path / str(is_new) / LIBRARY_NAME
        build.compile_library(library, name, isas=("avx2", "avx512_bf16"))
        working = load_library(library).working
        assert hasattr(working, "mp_multiply_avx2")
        assert hasattr(working, "mp_multiply_avx512_bf16") is is_new
