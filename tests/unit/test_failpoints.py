"""Failpoints: the rules' grammar, when they act, and what happens to the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.errors import ConfigError
from moonpool.failpoints import FailpointError, Failpoints, forget_claims


def parse(spec: str, state_dir: Path | None = None) -> Failpoints:
    return Failpoints.parse(spec, is_allowed=True, state_dir=state_dir)


def test_off_does_nothing() -> None:
    assert Failpoints.off().hit("transport.read") is None
    assert parse("").hit("transport.read") is None


def test_they_are_refused_unless_allowed() -> None:
    with pytest.raises(ConfigError, match="--unsafe-failpoints"):
        Failpoints.parse("transport.read=flip", is_allowed=False)
    Failpoints.parse(" ; ", is_allowed=False)


def test_hits_are_counted_and_values_compared() -> None:
    failpoints = parse("transport.read(3)=drop@2; transport.read=flip@5")
    values = [0, 3, 1, 3, 3]
    assert [failpoints.hit("transport.read", value) for value in values] == [
        None, None, None, "drop", "flip",
    ]  # fmt: skip
    assert failpoints.hit("decode.after_read") is None


def test_without_a_count_each_hit_acts() -> None:
    failpoints = parse("transport.read=drop")
    assert [failpoints.hit("transport.read") for _ in range(2)] == ["drop", "drop"]


def test_error_raises_like_a_bug() -> None:
    with pytest.raises(FailpointError, match="boom"):
        parse("transport.read=error:boom").hit("transport.read")


def test_sleep_goes_on_to_the_next_rule() -> None:
    assert parse("transport.read=sleep:1;transport.read=flip").hit("transport.read") == "flip"


def test_once_is_once_for_all_processes(tmp_path: Path) -> None:
    spec = "transport.read=flip,once"
    first, second = parse(spec, tmp_path), parse(spec, tmp_path)
    assert [first.hit("transport.read"), second.hit("transport.read")] == ["flip", None]
    assert parse("transport.read=drop,once", tmp_path).hit("transport.read") == "drop"
    # Another cluster of the same data directory.
    forget_claims(tmp_path)
    assert parse(spec, tmp_path).hit("transport.read") == "flip"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transport.reed=flip", "did you mean transport.read"),
        ("transport.read=explode", "are kill, exit, error, sleep, flip, drop"),
        ("decode.after_token=flip", "allowed at decode.after_token are kill, exit, error, sleep$"),
        ("transport.read", "is no rule"),
        ("transport.read=sleep:soon", "needs milliseconds"),
        ("transport.read=exit:no", "needs an exit code"),
        ("fetch.read=delay", "needs milliseconds"),
        ("fetch.read=limit:fast", "needs bytes a second"),
        ("transport.read=delay:5", "allowed at transport.read are"),
        ("transport.read=flip@0", "count from 1"),
        ("transport.read=flip,once", "no directory"),
        ("__import__('os')=kill", "is no rule"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec)


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit:7", 7)])
def test_the_process_ends(action: str, status: int) -> None:
    code = (
        "from moonpool.failpoints import Failpoints\n"
        f"f = Failpoints.parse('transport.read={action}@2', is_allowed=True)\n"
        "f.hit('transport.read'); print('once', flush=True); f.hit('transport.read'); print('twice')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (status, "once\n")


@pytest.mark.parametrize("what", ["delay:20", "limit:1000000", "flip"])
def test_what_a_place_carries_out_comes_with_its_argument(what: str) -> None:
    assert parse(f"fetch.read={what}").hit("fetch.read") == what
