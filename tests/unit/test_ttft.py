from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.inference.ttft import FirstTokenMoments, split_ttft

_MOMENT = st.floats(0.0, 100.0)


def test_parts_in_their_order() -> None:
    timing = split_ttft(
        FirstTokenMoments(
            arrived=10.0,
            tokenized=10.001,
            placed=10.003,
            prefill_started=10.010,
            prefill_ended=10.110,
            first_token=10.112,
        )
    )
    assert timing.ttft_ms == pytest.approx(112)
    assert timing.ttft_parts_ms == pytest.approx(
        {"tokenize": 1, "queue": 2, "worker_queue": 7, "prefill": 100, "deliver": 2}
    )


@given(
    arrived=_MOMENT,
    tokenized=_MOMENT,
    placed=_MOMENT,
    started=st.none() | _MOMENT,
    ended=st.none() | _MOMENT,
    first=_MOMENT,
)
def test_parts_sum_and_none_is_negative_whatever_the_clocks_say(
    arrived: float,
    tokenized: float,
    placed: float,
    started: float | None,
    ended: float | None,
    first: float,
) -> None:
    timing = split_ttft(
        FirstTokenMoments(
            arrived=arrived,
            tokenized=tokenized,
            placed=placed,
            prefill_started=started,
            prefill_ended=ended,
            first_token=first,
        )
    )
    assert all(part >= 0 for part in timing.ttft_parts_ms.values())
    assert sum(timing.ttft_parts_ms.values()) == timing.ttft_ms
    assert timing.ttft_ms == pytest.approx(max(first - arrived, 0) * 1_000, abs=1e-6)
