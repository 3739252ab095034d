"""The C library's tests again, on a library with the address and undefined-behaviour sanitizers.

    pytest tests/integration/test_native_sanitized.py

It is built into a temporary copy of the package (links to all files but the library), which stands before
the real one on the path of a second pytest. Python's and numpy's memory comes from malloc there, so
that a byte read or written beside an array ends that process, and so does the first undefined operation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool import native
from moonpool.native import build
from moonpool.native.loading import LIBRARY_NAME

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = Path(native.__file__).resolve().parents[1]
CFLAGS = (
    "-O0 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    " -DXXH_NO_INLINE_HINTS=1"
)
#: Whatever loads the library and nothing that loads torch.
SUITES = (
    "property/test_native_arithmetic.py",
    "property/test_native_kernels.py",
    "unit/test_copy_queue.py",
)
#: What runs on this machine's own variant, and no Python.
WANTED = "not FallbackKernels and not baseline"
#: What the sanitizers need in memory before Python is: libstdc++ for its exceptions.
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")


def runtimes(compiler: str) -> list[str]:
    """Their paths; the test is skipped where the compiler has none."""
    found = []
    for name in RUNTIMES:
        told = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if told == name:
            pytest.skip(f"{compiler} has no {name}: no sanitizers")
        found.append(str(Path(told).resolve()))
    return found


def link_package(target: Path) -> None:
    """Links to all of moonpool, but for the library."""
    (target / "native").mkdir(parents=True)
    for source, folder in ((PACKAGE, target), (PACKAGE / "native", target / "native")):
        for entry in source.iterdir():
            if entry.name not in (LIBRARY_NAME, "native", "__pycache__"):
                (folder / entry.name).symlink_to(entry)


@pytest.mark.timeout(300)
@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
def test_the_library_does_nothing_that_the_sanitizers_forbid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    preload = ":".join(runtimes(compiler))
    package = tmp_path / "path" / "moonpool"
    link_package(package)
    monkeypatch.setenv("CFLAGS", CFLAGS)
    build.compile_library(package / "native" / LIBRARY_NAME, compiler, isas=(native.status().isa,))
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "PYTHONPATH": str(package.parent),
        "PYTHONMALLOC": "malloc",
        # What Python keeps until its end is not lost.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    seen = subprocess.run(
        [sys.executable, "-c", "import moonpool.native as n; print(n.__file__, n.status())"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(package) in seen.stdout, seen
    assert "is_compiled=True" in seen.stdout, seen
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WANTED, *SUITES],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
def test_the_sanitizers_are_at_work(tmp_path: Path) -> None:
    """They see a read behind an array of numpy's, through a library that Python loads."""
    compiler = build.find_compiler()
    assert compiler is not None
    preload = ":".join(runtimes(compiler))
    source, library = tmp_path / "read.c", tmp_path / "read.so"
    source.write_text("int read_at(const int *values, long i) { return values[i]; }\n")
    subprocess.run(
        [compiler, *CFLAGS.split(), "-fPIC", "-shared", str(source), "-o", str(library)], check=True
    )
    code = (
        "import ctypes, numpy, sys; values = numpy.zeros(1000, numpy.int32);"
        f"ctypes.CDLL({str(library)!r}).read_at("
        "ctypes.c_void_p(values.ctypes.data), ctypes.c_long(int(sys.argv[1])))"
    )
    for index, is_bad in ((999, False), (1000, True)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(index)],
            env={**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("heap-buffer-overflow" in done.stderr) is is_bad, done.stderr
