"""Rules that no linter has: no unsafe deserialization, no bare tasks, paths in ARCHITECTURE.md exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("libs", "services", "loadtest")
GENERATED = "libs/moonpool/api/"

FORBIDDEN_MODULES = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "asyncio.create_task", "asyncio.ensure_future"}


def python_files() -> Iterator[Path]:
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            if not file.relative_to(ROOT).as_posix().startswith(GENERATED):
                yield file


def full_names(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports stand for: `load` -> `torch.load`, `t` -> `torch`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    stand_for = full_names(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"import of {name}"
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            called = stand_for.get(first, first) + dot + rest
            if called.removeprefix("builtins.") in FORBIDDEN_CALLS:
                yield node.lineno, f"call of {called}"


def test_nothing_unsafe_and_no_task_without_a_group() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {what}"
        for file in python_files()
        for line, what in violations(ast.parse(file.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load('x')",
        "asyncio.create_task(f())",
        "from asyncio import create_task; create_task(f())",
        "from torch import load as read; read('x')",
        "import asyncio as aio; aio.ensure_future(f())",
        "import builtins; builtins.eval('1')",
    ],
)
def test_the_rule_above_can_fail(source: str) -> None:
    assert list(violations(ast.parse(source)))


def documents() -> list[Path]:
    """All that describe what is there; decision records (docs/adr/) are of their time."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("performance/*.md")]
    return sorted([*found, *(ROOT / "services").rglob("*.md")])


def test_paths_named_in_the_documents_exist() -> None:
    missing = []
    for document in documents():
        text = document.read_text()
        for path in re.findall(
            r"`((?:libs|services|proto|deploy|tests|loadtest|docs)/[\w./-]*)`", text
        ):
            if not (ROOT / path).exists():
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 400
