from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.ids import Incarnation, WorkerId, WorkerKey
from moonpool.kv.replaced_incarnations import ReplacedIncarnations


def key(worker: object, life: object = 1) -> WorkerKey:
    return WorkerKey(WorkerId(f"w{worker}"), Incarnation(f"i{life}"))


@pytest.fixture
def books() -> Iterator[ReplacedIncarnations]:
    books = ReplacedIncarnations()
    yield books
    books.validate()


def test_who_was_replaced_never_returns(books: ReplacedIncarnations) -> None:
    assert books.take(key("a")) is None
    assert books.take(key("a", 2)) == key("a")
    assert books.is_replaced(key("a"))
    # Late news of the old one are no news of the new one.
    books.lose(key("a"))
    assert books.is_latest(key("a", 2))
    with pytest.raises(AssertionError):
        books.take(key("a"))


def test_who_is_gone_may_return_and_is_replaced_all_the_same(books: ReplacedIncarnations) -> None:
    books.take(key("a"))
    books.lose(key("a"))
    assert books.take(key("a")) is None
    books.lose(key("a"))
    assert books.take(key("a", 2)) == key("a")


def test_memory_is_bounded_and_those_who_are_here_are_kept(books: ReplacedIncarnations) -> None:
    books.take(key("here"))
    books.take(key("here", 2))
    books.take(key("first"))
    books.take(key("first", 2))
    books.lose(key("first", 2))
    for number in range(4_096):
        books.take(key(number))
        books.lose(key(number))
    assert books.is_replaced(key("here"))
    assert not books.is_replaced(key("first"))
    assert not books.is_latest(key("first", 2))
    for life in range(3, 100):
        books.take(key("here", life))
    assert [books.is_replaced(key("here", life)) for life in (34, 35, 98, 99)] == [
        False,
        True,
        True,
        False,
    ]
