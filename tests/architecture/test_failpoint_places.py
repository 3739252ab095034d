"""Every place at which the code can be broken is in the list that operators' rules are checked against."""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.failpoints import PLACES

_REPO = Path(__file__).parents[2]
_HIT = re.compile(r"""\.hit\(\s*["']([a-z_.]+)["']""")


def test_every_hit_is_listed_and_every_place_is_hit() -> None:
    found = {
        place
        for root in ("libs/moonpool", "services")
        for path in sorted((_REPO / root).rglob("*.py"))
        if "failpoints" not in path.relative_to(_REPO).parts
        for place in _HIT.findall(path.read_text())
    }
    assert found == set(PLACES)
