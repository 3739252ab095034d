"""What a worker has learnt of times, on its way to a router."""

from __future__ import annotations

import math

import pytest

from moonpool.api.v1 import worker_pb2 as pb
from moonpool.core.protocol import BlockLedger
from moonpool.latency.costs import TransferCost
from moonpool.routing.worker_view import WorkerFits
from moonpool.wire.fields import InvalidMessageError
from moonpool.wire.fits import fits_from_pb, fits_to_pb
from moonpool.wire.worker import LoadReport, load_from_pb, load_to_pb
from support.fleet import DECODE, PREFILL, make_key

FITS = WorkerFits(
    prefill=PREFILL,
    decode=DECODE,
    transfers=((make_key("p"), TransferCost(latency_s=0.25, bytes_per_s=1e9)),),
)


@pytest.mark.parametrize("fits", [WorkerFits(), WorkerFits(decode=DECODE), FITS])
def test_fits_come_back_as_they_were(fits: WorkerFits) -> None:
    message = pb.Fits.FromString(fits_to_pb(fits).SerializeToString())
    assert fits_from_pb(message) == fits


def test_a_load_takes_fits_along_only_where_they_are_news() -> None:
    ledger = BlockLedger(num_total=10, num_free=4, num_cached=5, num_referenced=1, num_prefills=2)
    load = LoadReport(ledger=ledger, fits=FITS)
    assert load_from_pb(load_to_pb(load)).fits is None
    read = load_from_pb(load_to_pb(load, tells_fits=True))
    assert read == load
    assert read.worker_load.fits == FITS
    assert (read.worker_load.num_free_blocks, read.worker_load.num_available_blocks) == (4, 9)
    assert read.worker_load.num_prefills == 2


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("prefill", "base_s", -1.0),
        ("prefill", "per_token_s", math.inf),
        ("prefill", "per_work_s", math.nan),
        ("prefill", "max_step_tokens", 0),
        ("decode", "per_request_s", -1e-9),
        ("transfers", "latency_s", math.nan),
        ("transfers", "bytes_per_s", 0.0),
    ],
)
def test_a_cost_that_cannot_be_is_refused(part: str, field: str, value: float) -> None:
    message = fits_to_pb(FITS)
    target = message.transfers[0] if part == "transfers" else getattr(message, part)
    setattr(target, field, value)
    with pytest.raises(InvalidMessageError, match=rf"fits\.{part}.*\.{field}"):
        fits_from_pb(message)
