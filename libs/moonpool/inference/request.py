"""InferenceRequest: one request for tokens, as the router owns it and as workers see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.ids import RequestId
from moonpool.inference.sampling import SamplingParams

#: Whose a request is that came with no key, or with one that names nobody.
DEFAULT_TENANT = "default"


class Age(NamedTuple):
    """Order between requests: the smaller is the older. The same on every worker and router."""

    arrival_unix_s: float
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """Token ids in, token ids out.

    A replay (after preemption, hand-back or a worker's death) is the same request with
    `emitted_token_ids` filled in, never a longer prompt: the next token has position
    `len(emitted_token_ids)` among the answer's.
    """

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    #: Tokens that the client already has, in order, from earlier attempts.
    emitted_token_ids: tuple[int, ...] = ()
    #: Wall clock of the router at arrival: makes the age, which decides who may revoke whom.
    arrival_unix_s: float = 0.0
    tenant: str = DEFAULT_TENANT
    #: Higher is more urgent. 0 for everyone until an issue asks for more.
    priority: int = 0
    #: Narrows the cache namespace; the empty string is the tenant's common namespace.
    cache_salt: str = ""
    #: Name and revision of a LoRA adapter; empty for none.
    adapter: str = ""
    #: W3C trace context of the request's root span; empty if it is not traced.
    traceparent: str = field(default="", compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and emitted tokens: what KV must exist for before the next token."""
        return self.prompt_token_ids + self.emitted_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.emitted_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens may still be drawn."""
        return self.sampling.max_tokens - len(self.emitted_token_ids)

    @property
    def age(self) -> Age:
        return Age(self.arrival_unix_s, self.request_id)
