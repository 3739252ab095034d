"""Failpoints: parse the rules, count the hits, act.

Grammar, rules separated by `;`:

    place[(value)]=action[:argument][@n][,once]

    prefill.after_layer(3)=kill       SIGKILL for this process when layer 3 is done
    decode.after_token=kill@5         at the fifth hit
    transport.read=flip@1             the place itself damages what it holds (flip, drop)
    fetch.read=limit:20000000         the place itself is slow, and blocks nobody (delay, limit)
    engine.after_step=sleep:200       blocks the calling thread for 200 ms at each hit
    router.after_token=error:boom     raises FailpointError
    engine.after_step=exit:3          ends the process without clean-up
    decode.after_token=kill@5,once    once per cluster: a restarted process does not die again

`(value)` matches only hits with that value; `@n` counts the hits that match. `once` claims a file in the
state directory before it acts, so the first process to get there is the only one; who starts a cluster
calls `forget_claims` first, else a rule that has acted in an earlier life would never act again.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moonpool.errors import ConfigError
from moonpool.failpoints.places import ACTIONS_BY_PLACE, PLACES

#: Actions that end, stop or raise here, at any place.
OWN_ACTIONS = ("kill", "exit", "error", "sleep")

#: Actions that need a number, and what it is.
_NUMBERS = {"sleep": "milliseconds", "delay": "milliseconds", "limit": "bytes a second"}

_CLAIM_PREFIX = "failpoint-"

_RULE = re.compile(
    r"(?P<place>[a-z_.]+)(?:\((?P<value>-?\d+)\))?"
    r"=(?P<action>[a-z]+)(?::(?P<argument>[^@,;]*))?(?:@(?P<nth>\d+))?(?P<once>,once)?"
)


class FailpointError(RuntimeError):
    """What `error` raises: an unexpected exception, as a bug would."""


@dataclass(slots=True)
class _Rule:
    text: str
    value: int | None
    action: str
    argument: str
    #: Which matching hit acts; None: each.
    nth: int | None
    once_file: Path | None
    num_hits: int = 0

    def is_due(self, value: int | None) -> bool:
        """Count a hit with `value`; True if the rule acts at it."""
        if self.value is not None and self.value != value:
            return False
        self.num_hits += 1
        return self.nth is None or self.num_hits == self.nth


class Failpoints:
    """The rules of one process. Not thread-safe: hit it from the thread that owns the place."""

    def __init__(self, rules: dict[str, list[_Rule]]) -> None:
        self._rules = rules

    @classmethod
    def off(cls) -> Failpoints:
        return cls({})

    @classmethod
    def parse(cls, spec: str, *, is_allowed: bool, state_dir: Path | None = None) -> Failpoints:
        """Read the rules.

        Args:
            spec: See the file's head; empty for none.
            is_allowed: `unsafe_failpoints` of the configuration.
            state_dir: Shared by the cluster; needed by `once`.

        Raises:
            ConfigError: Not allowed, or a rule that makes no sense.
        """
        texts = [text.strip() for text in spec.split(";") if text.strip()]
        if texts and not is_allowed:
            raise ConfigError(
                "failpoints are set: allowed only with unsafe_failpoints = true "
                "(--unsafe-failpoints)"
            )
        rules: dict[str, list[_Rule]] = {}
        for text in texts:
            place, rule = _parse_rule(text, state_dir)
            rules.setdefault(place, []).append(rule)
        return cls(rules)

    def hit(self, place: str, value: int | None = None) -> str | None:
        """Pass a place: act if a rule says so.

        Returns:
            The action that the place must carry out itself, with its argument if it has one (`flip`,
            `delay:200`), or None.

        Raises:
            FailpointError: The rule says `error`.
        """
        if not self._rules:
            return None
        # Every rule counts the hit, also those after one that raises or has its place act.
        due = [rule for rule in self._rules.get(place, ()) if rule.is_due(value)]
        for rule in due:
            if rule.once_file is not None and not _claim(rule.once_file):
                continue
            result = _act(rule)
            if result is not None:
                return result
        return None


def _parse_rule(text: str, state_dir: Path | None) -> tuple[str, _Rule]:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"failpoints: {text!r} is no rule; allowed is place[(value)]=action[:argument][@n][,once]"
        )
    place, action, argument = match["place"], match["action"], match["argument"] or ""
    if place not in PLACES:
        close = difflib.get_close_matches(place, PLACES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"failpoints: there is no place {place!r}; {hint}allowed are {', '.join(sorted(PLACES))}"
        )
    allowed = (*OWN_ACTIONS, *ACTIONS_BY_PLACE.get(place, ()))
    if action not in allowed:
        raise ConfigError(
            f"failpoints: {action!r} in {text!r} is no action; allowed at {place} are "
            f"{', '.join(allowed)}"
        )
    if (action in _NUMBERS or (action == "exit" and argument)) and not argument.isdigit():
        what = _NUMBERS.get(action, "an exit code")
        raise ConfigError(f"failpoints: {text!r} needs {what}, like {action}:3")
    if match["nth"] == "0":
        raise ConfigError(f"failpoints: {text!r}: hits count from 1")
    once_file = None
    if match["once"]:
        if state_dir is None:
            raise ConfigError(f"failpoints: {text!r}: this process has no directory for ,once")
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        once_file = state_dir / f"{_CLAIM_PREFIX}{place}-{digest}"
    return place, _Rule(
        text=text,
        value=int(match["value"]) if match["value"] is not None else None,
        action=action,
        argument=argument,
        nth=int(match["nth"]) if match["nth"] is not None else None,
        once_file=once_file,
    )


def _act(rule: _Rule) -> str | None:
    match rule.action:
        case "kill":
            _kill_self()
        case "exit":
            os._exit(int(rule.argument or "1"))
        case "error":
            raise FailpointError(rule.argument or rule.text)
        case "sleep":
            time.sleep(int(rule.argument) / 1_000)
            return None
        case _:
            return f"{rule.action}:{rule.argument}" if rule.argument else rule.action


def _kill_self() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    # The signal is on its way; nothing more may happen in this thread.
    while True:
        signal.pause()


def forget_claims(state_dir: Path) -> None:
    """Let every `once` rule act again. When a cluster starts, before its processes."""
    for claim in state_dir.glob(f"{_CLAIM_PREFIX}*"):
        claim.unlink(missing_ok=True)


def _claim(path: Path) -> bool:
    """True for the first process of the cluster that gets here."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True
    return False
