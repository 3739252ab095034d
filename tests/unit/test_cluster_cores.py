from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.cores import CorePlan, plan_cores


def test_two_cores_one_of_them_for_decode_alone() -> None:
    assert plan_cores([0, 1], num_decode_engines=1, num_prefill_engines=1) == CorePlan(
        decode_engines=((1,),), prefill_engines=((0,),), others=(0,)
    )


def test_enough_cores_for_everyone() -> None:
    assert plan_cores(range(8), num_decode_engines=2, num_prefill_engines=2) == CorePlan(
        decode_engines=((6,), (7,)), prefill_engines=((4,), (5,)), others=(0, 1, 2, 3)
    )


def test_more_decode_engines_than_cores_share_all_but_one() -> None:
    assert plan_cores([0, 1, 2], num_decode_engines=3, num_prefill_engines=1) == CorePlan(
        decode_engines=((1,), (2,), (1,)), prefill_engines=((0,),), others=(0,)
    )


def test_prefill_engines_share_with_the_others_what_is_too_little() -> None:
    assert plan_cores([0, 1, 2], num_decode_engines=1, num_prefill_engines=2) == CorePlan(
        decode_engines=((2,),), prefill_engines=((0,), (1,)), others=(0, 1)
    )


@given(num_cores=st.integers(1, 40), num_decode=st.integers(0, 10), num_prefill=st.integers(0, 10))
def test_decode_never_shares_with_anything_but_decode(
    num_cores: int, num_decode: int, num_prefill: int
) -> None:
    plan = plan_cores(
        range(num_cores), num_decode_engines=num_decode, num_prefill_engines=num_prefill
    )
    assert len(plan.decode_engines) == num_decode
    assert len(plan.prefill_engines) == num_prefill
    if num_cores > 1:
        assert plan.others
        engines = plan.decode_engines + plan.prefill_engines
        assert all(len(cores) == 1 for cores in engines), "one thread"
        decode = {core for cores in plan.decode_engines for core in cores}
        assert not decode & set(plan.others)
        assert not decode & {core for cores in plan.prefill_engines for core in cores}
