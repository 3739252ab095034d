"""How much the operator lets in, as the router's parts take it, and one tenant's part of it."""

from __future__ import annotations

from moonpool.config.schema import RouterSettings
from moonpool_router.pipeline import MAX_REQUESTS, PipelineLimits


def tenant_part(number: int, share: float) -> int | None:
    """Of so many, how many may be one tenant's; None: all of them.

    Where it is all, whoever finds them taken is told that the router is full, not that the fault is its own. It is
    at least one: a tenant that may have nothing would have no key.
    """
    part = max(int(number * share), 1)
    return part if part < number else None


def pipeline_limits(settings: RouterSettings) -> PipelineLimits:
    """The settings, which are valid."""
    return PipelineLimits(
        max_requests_per_tenant=tenant_part(MAX_REQUESTS, settings.max_tenant_share),
        request_timeout_s=settings.request_timeout_s,
        queue_timeout_s=settings.queue_timeout_s,
    )
