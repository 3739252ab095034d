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


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"import of {name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            yield node.lineno, f"call of {ast.unparse(node.func)}"


def test_nothing_unsafe_and_no_task_without_a_group() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {what}"
        for file in python_files()
        for line, what in violations(ast.parse(file.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize("source", ["import pickle", "torch.load('x')", "asyncio.create_task(f())"])
def test_the_rule_above_can_fail(source: str) -> None:
    assert list(violations(ast.parse(source)))


def test_paths_named_in_the_documents_exist() -> None:
    missing = []
    for document in ("ARCHITECTURE.md", "README.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(
            r"`((?:libs|services|proto|deploy|tests|loadtest|docs)/[\w./-]*)`", text
        ):
            if not (ROOT / path).exists():
                missing.append(f"{document}: {path}")
    assert missing == []


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 400
