"""Writes tests/support/flashinfer_signatures.json: the signatures of what we call of FlashInfer.

    pip download --no-deps flashinfer-python==0.7.4 && python tests/gpu/flashinfer_signatures.py WHEEL

They are read out of the wheel's sources, which takes no GPU, and 100 MB of wheel once instead of
855 MB installed in each test run. The stand-in that the tests use (tests/support/flashinfer_stand_in.py)
takes no call that these signatures do not. `differences` compares a FlashInfer that can be imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "support" / "flashinfer_signatures.json"
FUNCTIONS = (
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fused_add_rmsnorm",
    "rmsnorm",
    "silu_and_mul",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
)
CLASSES = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
METHODS = ("__init__", "plan", "run")
#: Where `plan(*args, **kwargs)` hands its keywords on to.
_BEHIND = {"plan": "_plan_impl"}

Parameter = dict[str, Any]


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as archive:
        exports = _exports(archive)
        modules = {
            name: ast.parse(archive.read(exports[name]).decode()) for name in (*FUNCTIONS, *CLASSES)
        }
    found = {
        "version": re.sub(r"^flashinfer_python-([^-]+)-.*", r"\1", wheel.name),
        "functions": {name: _parameters(_last(modules[name].body, name)) for name in FUNCTIONS},
        "classes": {name: _methods(modules[name], name) for name in CLASSES},
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


def differences(flashinfer: ModuleType) -> list[str]:
    """What this FlashInfer does not take, of what the signatures written down do."""
    known = json.loads(OUTPUT.read_text())
    calls = {name: (getattr(flashinfer, name), known["functions"][name]) for name in FUNCTIONS}
    for name in CLASSES:
        for method, parameters in known["classes"][name].items():
            calls[f"{name}.{method}"] = (getattr(getattr(flashinfer, name), method), parameters)
    found = []
    for name, (call, parameters) in calls.items():
        taken = inspect.signature(call).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
            continue
        missing = [one["name"] for one in parameters if one["name"] not in taken]
        if missing:
            found.append(f"flashinfer.{name} does not take {', '.join(missing)}")
    return found


def _exports(archive: zipfile.ZipFile) -> dict[str, str]:
    """File of each name that `import flashinfer` gives."""
    found, names = {}, set(archive.namelist())
    for node in ast.walk(ast.parse(archive.read("flashinfer/__init__.py").decode())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            module = f"flashinfer/{node.module.replace('.', '/')}"
            file = f"{module}.py" if f"{module}.py" in names else f"{module}/__init__.py"
            found |= {alias.asname or alias.name: file for alias in node.names}
    return found


def _methods(module: ast.Module, name: str) -> dict[str, list[Parameter]]:
    (found,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = {}
    for method in METHODS:
        parameters = _parameters(_last(found.body, method))[1:]
        if any(p["kind"] == "VAR_KEYWORD" for p in parameters) and method in _BEHIND:
            parameters = _parameters(_last(found.body, _BEHIND[method]))[1:]
        methods[method] = parameters
    return methods


def _last(body: list[ast.stmt], name: str) -> ast.FunctionDef:
    """The definition that counts: overloads come before it."""
    return [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name][-1]


def _parameters(function: ast.FunctionDef) -> list[Parameter]:
    args = function.args
    plain = [(arg, "POSITIONAL_ONLY") for arg in args.posonlyargs]
    plain += [(arg, "POSITIONAL_OR_KEYWORD") for arg in args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    found = [
        _parameter(arg, kind, default)
        for (arg, kind), default in zip(plain, [*defaults, *args.defaults], strict=True)
    ]
    if args.vararg:
        found.append(_parameter(args.vararg, "VAR_POSITIONAL", None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg, "KEYWORD_ONLY", default))
    if args.kwarg:
        found.append(_parameter(args.kwarg, "VAR_KEYWORD", None))
    return found


def _parameter(arg: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    found: Parameter = {"name": arg.arg, "kind": kind}
    if default is not None:
        found["default"] = ast.unparse(default)
    return found


if __name__ == "__main__":
    main()
