"""The build hook: a wheel with the C library where there is a compiler, one without where not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def build_wheel(
    project: Path, version: str = "standard", **environment: str
) -> tuple[str, set[str]]:
    """The wheel's file name, and the files in it."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", f"wheel:{version}", "-d", "dist"],
        cwd=project,
        env={**os.environ, "CFLAGS": "-O0 -DXXH_NO_INLINE_HINTS=1", **environment},
        capture_output=True,
        check=True,
    )
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, set(archive.namelist())


@needs_compiler
def test_where_there_is_a_compiler_the_library_is_used() -> None:
    """Without it the tests of compiled kernels are skipped, one and all."""
    assert native.status().is_compiled, native.status().message


@needs_compiler
def test_the_wheel_has_the_library_and_is_for_this_platform_but_any_python(project: Path) -> None:
    name, files = build_wheel(project)
    assert f"moonpool/native/{LIBRARY_NAME}" in files
    assert name.startswith("moonpool-0-py3-none-linux_")
    assert not (project / "libs/moonpool/native" / LIBRARY_NAME).exists()


def test_without_a_compiler_the_wheel_is_pure_python(project: Path) -> None:
    name, files = build_wheel(project, CC="no-such-compiler")
    assert name == "moonpool-0-py3-none-any.whl"
    assert not any(file.endswith(".so") for file in files)
    assert "moonpool/native/fallback.py" in files


@needs_compiler
def test_an_editable_install_builds_into_the_tree(project: Path) -> None:
    _, files = build_wheel(project, "editable")
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
