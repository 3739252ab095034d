"""Which transport reads from which peer: decided once for a peer, and announced with its reason.

A fallback is never silent: the choice says what was wanted, what was taken, and why they differ. In
strict mode a fallback is refused instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.errors import FailedPreconditionError, TransferError
from moonpool.kv.region import KvRegion
from moonpool.transport.base import KvPeer, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """To be logged, and shown by admin calls."""

    peer: str
    wanted: str
    taken: str
    #: Why `wanted` was not taken, one sentence for each transport tried before; empty if it was.
    reason: str

    @property
    def is_fallback(self) -> bool:
        return self.taken != self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connected peer and how it came about."""

    peer: KvPeer
    choice: TransportChoice


class TransportSelector:
    """Tries transports in order of preference.

    Args:
        transports: First is wanted most.
        is_strict: Refuse to take any but the first.
    """

    def __init__(self, transports: Sequence[Transport], *, is_strict: bool = False) -> None:
        assert transports
        self._transports = tuple(transports)
        self._is_strict = is_strict

    async def connect(self, region: KvRegion, *, timeout_s: float) -> Connection:
        """Connect by the first transport that reaches the region.

        Raises:
            FailedPreconditionError: Strict, and the wanted transport does not reach it.
            TransferError: None reaches it in `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        wanted = self._transports[0].name
        reasons: list[str] = []
        failure: TransferError | None = None
        for transport in self._transports:
            reason = transport.why_not(region)
            if reason is None:
                try:
                    peer = await transport.connect(
                        region, timeout_s=max(0.0, deadline - time.monotonic())
                    )
                except TransferError as error:
                    failure, reason = error, error.message
                else:
                    choice = TransportChoice(
                        peer=str(region.worker),
                        wanted=wanted,
                        taken=transport.name,
                        reason="; ".join(reasons),
                    )
                    return Connection(peer=peer, choice=choice)
            reasons.append(f"{transport.name}: {reason}")
            if self._is_strict:
                raise FailedPreconditionError(
                    f"transport {wanted} is required, and does not reach {region.worker}: {reason}",
                    code="transport_required",
                )
        raise TransferError(
            f"no transport reaches {region.worker}: {'; '.join(reasons)}",
            code=failure.code if failure is not None else "kv_transport_unusable",
        )
