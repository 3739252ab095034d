"""Prefill here or elsewhere: the decision for one request whose decode worker is chosen.

Decode worker first, then this decision, over what *that* worker lacks (llm-d's order; deciding
before the decode worker is known mispredicts under reuse).

Where step times are measured, the sooner first token decides, what it costs running decodes included:

    queue + chunked prefill + interference, here  <=  queue + prefill + exposed transfer, elsewhere

Where nothing is measured yet, or no prefill worker has room, thresholds decide.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DisaggReason(enum.StrEnum):
    """Which rule decided, in the order in which they are tried."""

    #: Local: nobody else can prefill.
    NO_PREFILL_WORKER = "no_prefill_worker"
    #: Local, then remote: by what both are predicted to take.
    LOCAL_IS_SOONER = "local_is_sooner"
    REMOTE_IS_SOONER = "remote_is_sooner"
    #: Remote: the chunks would take a token's time of running decodes beyond the SLO.
    KEEPS_TPOT = "keeps_tpot"
    #: Local: at most `threshold_tokens` are not cached on the decode worker.
    BELOW_THRESHOLD = "below_threshold"
    #: Local: the pool is busy, and at most `busy_threshold_tokens` are not cached.
    PREFILL_POOL_BUSY = "prefill_pool_busy"
    #: Remote.
    ABOVE_THRESHOLD = "above_threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggConfig:
    """What decides while nothing is measured."""

    #: So many uncached tokens are prefilled on the decode worker.
    threshold_tokens: int = 256
    #: The pool is busy if its least loaded worker has more uncached tokens queued than this.
    busy_queued_tokens: int = 8192
    #: The threshold while the pool is busy: longer prompts wait in the router rather than stall
    #: everyone's decode.
    busy_threshold_tokens: int = 1024
    #: Thresholds decide even where step times are measured.
    only_thresholds: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.threshold_tokens <= self.busy_threshold_tokens, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Both sides of the decision: seconds until the first token, and what they cost others."""

    local_s: float
    #: Infinite if no prefill worker has room.
    remote_s: float
    #: The time per token of the decode worker, were it prefilled here, is beyond the SLO, and is not
    #: beyond it otherwise.
    breaks_tpot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggDecision:
    """The decision with every term of it."""

    is_remote: bool
    reason: DisaggReason
    #: prompt + emitted, less what the decode worker is believed to have.
    num_uncached_tokens: int
    num_cached_tokens: int
    #: The threshold that applies where nothing is measured.
    threshold_tokens: int
    num_prefill_workers: int
    #: Queue of the prefill worker in question, in uncached tokens; None if none has room.
    least_queued_tokens: int | None
    #: None if it did not decide.
    prediction: Prediction | None = None


def decide(
    config: DisaggConfig,
    *,
    num_tokens: int,
    num_cached_tokens: int,
    num_prefill_workers: int,
    least_queued_tokens: int | None,
    prediction: Prediction | None = None,
) -> DisaggDecision:
    """Choose local or remote prefill.

    Args:
        num_tokens: prompt + emitted.
        num_cached_tokens: Of these, leading tokens that the decode worker is believed to hold.
        num_prefill_workers: Live workers that could prefill, the decode worker not among them.
        least_queued_tokens: Queue of the best of those that have room; None if none has.
        prediction: None while nothing is measured.
    """
    assert 0 <= num_cached_tokens <= num_tokens, (num_cached_tokens, num_tokens)
    num_uncached_tokens = num_tokens - num_cached_tokens
    is_busy = least_queued_tokens is None or least_queued_tokens > config.busy_queued_tokens
    threshold_tokens = config.busy_threshold_tokens if is_busy else config.threshold_tokens
    if prediction is not None and (
        config.only_thresholds or not math.isfinite(prediction.remote_s)
    ):
        prediction = None
    if num_prefill_workers == 0:
        is_remote, reason = False, DisaggReason.NO_PREFILL_WORKER
    elif prediction is not None:
        if prediction.breaks_tpot:
            is_remote, reason = True, DisaggReason.KEEPS_TPOT
        elif prediction.local_s <= prediction.remote_s:
            is_remote, reason = False, DisaggReason.LOCAL_IS_SOONER
        else:
            is_remote, reason = True, DisaggReason.REMOTE_IS_SOONER
    elif num_uncached_tokens <= config.threshold_tokens:
        is_remote, reason = False, DisaggReason.BELOW_THRESHOLD
    elif num_uncached_tokens <= threshold_tokens:
        is_remote, reason = False, DisaggReason.PREFILL_POOL_BUSY
    else:
        is_remote, reason = True, DisaggReason.ABOVE_THRESHOLD
    return DisaggDecision(
        is_remote=is_remote,
        reason=reason,
        num_uncached_tokens=num_uncached_tokens,
        num_cached_tokens=num_cached_tokens,
        threshold_tokens=threshold_tokens,
        num_prefill_workers=num_prefill_workers,
        least_queued_tokens=least_queued_tokens,
        prediction=prediction,
    )
