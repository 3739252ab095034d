"""Build hook: puts the C library into the wheel (or, for an editable install, into the tree).

Without a C compiler the wheel is pure Python and the library's functions fall back to numpy and
xxhash (native/fallback.py). With one, the wheel is tagged for the platform but for no Python: the
library uses no Python ABI.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = Path("libs", "moonpool", "native")


class NativeBuildHook(
    BuildHookInterface[Any]
):  # Any: the hook reads nothing of the builder's config
    """Called by hatchling before a wheel is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling what to add. `version` is "editable" or "standard"."""
        if self.target_name != "wheel":
            return
        native = Path(self.root) / _NATIVE
        build = _load(native / "build.py")
        compiler = build.find_compiler()
        if compiler is None:
            self.app.display_warning("no C compiler: moonpool.native uses its Python fallback")
            return
        if version == "editable":
            build.compile_library(native / build.LIBRARY_NAME, compiler)
            return
        self._folder = tempfile.TemporaryDirectory(prefix="moonpool-native-")
        library = Path(self._folder.name) / build.LIBRARY_NAME
        build.compile_library(library, compiler)
        build_data["force_include"][str(library)] = f"moonpool/native/{build.LIBRARY_NAME}"
        build_data["pure_python"] = False
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled file; the wheel has it."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("moonpool_native_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
