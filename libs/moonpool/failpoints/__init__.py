"""Failpoints: named places at which a process breaks on purpose, so that a test places a fault exactly.

    failpoints = Failpoints.parse("prefill.after_layer(3)=kill;transport.read=flip@1", is_allowed=True)
    failpoints.hit("prefill.after_layer", layer)

Off (the default) a hit is one attribute read and one comparison. Never called by the domain.
"""

from moonpool.failpoints.failpoints import FailpointError, Failpoints, forget_claims
from moonpool.failpoints.places import PLACES

__all__ = ["PLACES", "FailpointError", "Failpoints", "forget_claims"]
