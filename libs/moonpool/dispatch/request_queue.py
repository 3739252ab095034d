"""RequestQueue: the requests of a router that wait for workers, oldest first, and who is worth a look.

A look at a request is a placement over the whole fleet. One that waits for a prefill worker is passed by
those that need none, and is not looked at again before there is news of who may be asked: with a long
queue each freed block would else cost a look at everybody in it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from moonpool.ids import RequestId
from moonpool.inference.request import Age

#: So many requests that wait for a prefill worker may be passed by those that need none.
_MAX_PASSED = 32


class RequestQueue:
    """See the file's head."""

    def __init__(self) -> None:
        #: Oldest first.
        self._ages: list[Age] = []
        #: Of these: looked at since the last news, and found to wait for a prefill worker.
        self._passed: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._ages)

    def add(self, age: Age) -> None:
        insort(self._ages, age)

    def remove(self, age: Age) -> None:
        """Raises ValueError: It is not here."""
        self._ages.remove(age)
        self._passed.discard(age.request_id)

    def next(self) -> RequestId | None:
        """The oldest that is worth a look; None: nobody is for now."""
        ids = (age.request_id for age in self._ages[: _MAX_PASSED + 1])
        return next((request_id for request_id in ids if request_id not in self._passed), None)

    def pass_over(self, request_id: RequestId) -> None:
        """It waits for a prefill worker, and no worker is to be had."""
        self._passed.add(request_id)

    def look_again(self) -> None:
        """Another worker may be asked, or one may no more: everybody is worth a look."""
        self._passed.clear()

    def fork(self) -> RequestQueue:
        """An independent copy."""
        fork = RequestQueue()
        fork._ages = list(self._ages)
        fork._passed = set(self._passed)
        return fork

    def key(self) -> tuple[RequestId, ...]:
        """Equal for queues of the same requests that behave alike."""
        return tuple(sorted(self._passed))

    def validate(self, ages: Iterable[Age]) -> None:
        """Check that these are the ones that wait."""
        assert self._ages == sorted(ages), (self._ages, ages)
        assert self._passed <= {age.request_id for age in self._ages}, self._passed
