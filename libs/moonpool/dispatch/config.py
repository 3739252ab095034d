"""DispatchConfig: patience and limits of the router's request machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.routing.config import RoutingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Validated in config/; here only asserted."""

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    #: Failures that end a request: a decode worker lost, or a source that failed the handoff.
    max_failures: int = 3
    #: A request of which so many attempts lost a worker is taken for the cause.
    max_deaths: int = 2
    #: Bound of all placements, refused ones included: a cluster that always refuses is not asked
    #: for ever.
    max_attempts: int = 1000
    #: A worker that failed on a request path is avoided so long, if there are others.
    inhibit_s: float = 5.0
    #: A worker that refused is asked again after so long even if no report shows room.
    refused_s: float = 1.0
    #: Requests that wait here for room; one more is refused.
    max_queued_requests: int = 1024
    #: Of these, how many may be one tenant's; None: all.
    max_queued_per_tenant: int | None = None
    #: The placements of so many requests are kept, the newest, for whoever asks why.
    num_kept_decisions: int = 256

    def __post_init__(self) -> None:
        assert self.max_failures >= 1, self
        assert self.max_deaths >= 1, self
        assert self.max_attempts >= 1, self
