"""Compile the C library: `python -m moonpool.native.build` for developers, hatch_build.py for wheels.

Standard library only, and no import of Moonpool: the build hook loads this file by path in an
environment that holds nothing but the build backend.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY_NAME = "libmoonpool_native.so"

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "src"
_XXHASH = _HERE / "third_party" / "xxhash"
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # A product that is added at once is one fused operation: results differ by nothing but the machine.
    "-ffp-contract=fast",
)
#: Files that are compiled for other instruction sets too; src/dispatch.c chooses at load time.
_VARIED = (
    *("attention", "bfloat16_attention", "bfloat16_linear", "chunk_attention", "copy"),
    *("leaf_digest", "linear", "rows", "sample"),
)
_AVX512 = ("-mavx512f", "-mavx2", "-mfma")
_X86_VARIANTS = (
    ("avx2", ("-mavx2", "-mfma")),
    ("avx512", _AVX512),
    ("avx512_bf16", (*_AVX512, "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")),
)
_ISAS = tuple(isa for isa, _ in _X86_VARIANTS)


class BuildError(Exception):
    """The compiler refused a file; the message is its own."""


def find_compiler() -> str | None:
    """The C compiler: `$CC` if set, else `cc`; None if there is none."""
    return shutil.which(os.environ.get("CC") or "cc")


def compile_library(target: Path, compiler: str, *, isas: Container[str] = _ISAS) -> None:
    """Compile src/ into the shared library `target`, replacing it in one move.

    Kernels come for the machine's baseline and those of `isas` that this compiler knows and whose machines it
    compiles for.

    A process that has the old file mapped keeps it. `$CFLAGS` is added to the flags, those of the
    linker too.

    Raises:
        BuildError: A compiler run failed.
    """
    more_flags = shlex.split(os.environ.get("CFLAGS", ""))
    flags = [*_FLAGS, *more_flags]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    variants = [one for one in _X86_VARIANTS if is_x86 and one[0] in isas]
    # Compilers from before 2020 do not know it, and are as good for the others.
    if "avx512_bf16" in dict(variants) and not _knows_bfloat16(compiler):
        variants = [one for one in variants if one[0] != "avx512_bf16"]
    have = [f"-DMP_HAVE_{isa.upper()}" for isa, _ in variants]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        objects: list[str] = []
        commands: list[list[str]] = []

        def compile_one(source: Path, name: str, *more: str) -> None:
            objects.append(str(Path(folder) / f"{name}.o"))
            commands.append(
                [
                    compiler,
                    *flags,
                    *more,
                    f"-I{_SOURCES}",
                    f"-I{_XXHASH}",
                    "-c",
                    str(source),
                    "-o",
                    objects[-1],
                ]
            )

        for source in sorted(_SOURCES.glob("*.c")):
            compile_one(source, source.stem, *have)
        for isa, flags_of_isa in variants:
            for stem in _VARIED:
                source = _SOURCES / f"{stem}.c"
                compile_one(source, f"{stem}-{isa}", f"-DMP_ISA={isa}", *flags_of_isa)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(_run, commands):
                pass
        library = Path(folder) / LIBRARY_NAME
        _run([compiler, *more_flags, "-shared", "-pthread", *objects, "-o", str(library)])
        library.replace(target)


def _knows_bfloat16(compiler: str) -> bool:
    """It has the instructions, and can ask a machine for them, as src/dispatch.c does."""
    asking = 'int main(void) { return __builtin_cpu_supports("avx512bf16"); }'
    command = [compiler, "-mavx512bf16", "-x", "c", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=asking, capture_output=True, text=True, check=False)
    return done.returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def main() -> int:
    """Build the library into the package, where native/loading.py looks for it."""
    compiler = find_compiler()
    if compiler is None:
        sys.stderr.write("no C compiler: set CC or install cc\n")
        return 1
    try:
        compile_library(_HERE / LIBRARY_NAME, compiler)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"built {_HERE / LIBRARY_NAME}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
