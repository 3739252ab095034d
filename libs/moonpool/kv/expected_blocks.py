"""ExpectedBlocks: what one worker must hold by now, though its events have not said so yet.

A router sees a request end before the worker has told of its last blocks: events are merged, and go over the
bus. The next turn of a chat may come in between. What the router knows from the request itself stands here
until the worker has been heard of often enough to have said it, and it is believed as what was said is:
the worker may have evicted it already, which costs a recompute.
"""

from __future__ import annotations

from moonpool.kv.block_key import KeyArray

#: A message that was on its way when the block was made, a heartbeat beside it, and the one that tells of it.
_NUM_WORDS = 3
#: 130 bytes each; what a worker computes in seconds. A bus that is away for longer is asked past (see
#: dispatch/index_follower.py).
MAX_BLOCKS = 8_192


class ExpectedBlocks:
    """See the file's head. Of one incarnation of a worker."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._num_words = 0
        #: Key -> the number of words after which it is expected no longer, which only grows. Of each chain the end
        #: stands first.
        self._until: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: KeyArray) -> None:
        """The worker holds these, a chain from its beginning. Of too many the oldest chains' ends go: a block is of use
        only with all before it.
        """
        until = self._num_words + _NUM_WORDS
        for key in reversed(keys[: self._max_blocks].tolist()):
            self._until.pop(key, None)
            self._until[key] = until
        while len(self._until) > self._max_blocks:
            del self._until[next(iter(self._until))]

    def on_word(self) -> None:
        """The worker was heard of: a batch, a heartbeat or a snapshot."""
        self._num_words += 1
        while self._until:
            key, until = next(iter(self._until.items()))
            if until > self._num_words:
                break
            del self._until[key]

    def remove(self, keys: KeyArray) -> None:
        """The worker said that it holds these no more."""
        for key in keys.tolist():
            self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()

    def run_end(self, keys: KeyArray, start: int) -> int:
        """Where the run of expected blocks that begins at keys[start] ends; `start` if there is none."""
        end = start
        while end < len(keys) and int(keys[end]) in self._until:
            end += 1
        return end

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        untils = list(self._until.values())
        assert len(untils) <= self._max_blocks
        assert untils == sorted(untils)
        assert all(self._num_words < until <= self._num_words + _NUM_WORDS for until in untils), (
            untils
        )
