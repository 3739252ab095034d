"""What parts of a cluster have logged since a moment: whether a fault was met, and by whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.cluster.local_cluster import LocalCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """A moment in the logs of all parts. Made by `now`."""

    cluster: LocalCluster
    #: How long each log was.
    sizes: Mapping[str, int]

    @classmethod
    def now(cls, cluster: LocalCluster) -> LogMark:
        """From here on."""
        names = (*cluster.router_names, *cluster.node_ids)
        paths = {name: cluster.part(name).log_path for name in names}
        return cls(
            cluster=cluster,
            sizes={name: path.stat().st_size for name, path in paths.items() if path.exists()},
        )

    def events(self, part: str, event: str, **fields: object) -> list[dict[str, Any]]:  # Any: JSON
        """What this part has logged under this name since then, in all its lives, with these fields."""
        with self.cluster.part(part).log_path.open("rb") as log:
            log.seek(self.sizes.get(part, 0))
            # Beside events there is what libraries print; the last line may be half written.
            lines = [line for line in log if line.startswith(b"{") and line.endswith(b"}\n")]
        found = map(json.loads, lines)
        wanted = {"event": event, **fields}
        return [one for one in found if wanted.items() <= one.items()]
