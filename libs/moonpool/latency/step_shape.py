"""StepShape: what a step computed, in the terms of the latency model. Four sums, nothing per token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sums over the rows of one step."""

    #: Tokens of prefill chunks.
    num_prefill_tokens: int = 0
    #: Of those chunks, the sum of `prefill_work`.
    prefill_work: int = 0
    #: Rows that go on from a drawn token.
    num_decodes: int = 0
    #: Tokens that those rows attend to, together.
    num_context_tokens: int = 0
