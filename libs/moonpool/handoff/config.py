"""HandoffConfig: sizes and patience of the handoff, the same for both roles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Validated in config/; here only asserted."""

    num_layers: int
    block_size: int = 16
    #: So many layers of a chunk are announced together (the last group may be smaller).
    layers_per_group: int = 4
    #: How long an Open waits for its Prefill.
    park_s: float = 2.0
    #: How long an ended attempt is remembered, so that what comes late is not taken for new.
    remember_s: float = 2.0
    #: How long a finished prefill waits for its reader.
    unclaimed_s: float = 10.0
    #: How long a Decode waits for the core's answer, holding nothing.
    core_answer_s: float = 2.0
    #: The source is lost if its stream says nothing for so long.
    progress_s: float = 5.0
    #: A reader that hears nothing else is told this often that the engine moves, if it does.
    waiting_s: float = 1.0
    #: A worker ends an attempt so long after the router should have.
    deadline_grace_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.num_layers > 0, self.num_layers
        assert self.block_size > 0, self.block_size
        assert self.layers_per_group > 0, self.layers_per_group
        assert self.waiting_s < self.progress_s, (self.waiting_s, self.progress_s)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
