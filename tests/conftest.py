"""The order of a whole run, the type checker beside it, and what holds for every property test.

Whatever is pure comes first: it fails soonest and needs nothing. The type checker takes the time of a
hundred tests and one core; it starts with the run, and its test waits for it.
"""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from support.type_check import TYPE_CHECK, TypeCheck

_TESTS = Path(__file__).parent
_ORDER = ("unit", "property", "architecture", "service", "integration", "e2e")

# How long an example takes is the machine's affair; what hangs meets the timeout of its test.
hypothesis.settings.register_profile("moonpool", deadline=None)
hypothesis.settings.load_profile("moonpool")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        kind = item.path.relative_to(_TESTS).parts[0]
        return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)

    items.sort(key=rank)


def pytest_collection_finish(session: pytest.Session) -> None:
    is_wanted = any(item.name == "test_mypy_strict" for item in session.items)
    if is_wanted and not session.config.option.collectonly:
        session.config.stash[TYPE_CHECK] = TypeCheck.start()


def pytest_unconfigure(config: pytest.Config) -> None:
    check = config.stash.get(TYPE_CHECK, None)
    if check is not None:
        check.stop()
