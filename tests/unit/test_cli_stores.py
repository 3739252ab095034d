"""What the command line knows of stores: how many to start, what to show, and whether a disk will do."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from moonpool.cli.doctor_checks import Finding, Severity, Task, check_ssd
from moonpool.cli.ssd_probe import own_directory_problem
from moonpool.cli.terminal import Glyphs
from moonpool.cli.up import UpOptions, with_store_count
from moonpool.cli.up_view import Board, headline, short_detail
from moonpool.cluster.part import PartEvent, PartState
from moonpool.config.schema import ClusterConfig
from moonpool.errors import ConfigError


def options(num_stores: int | None = None, **flags: object) -> UpOptions:
    return UpOptions(file=None, flags=flags, num_stores=num_stores)


def counts(config: ClusterConfig) -> list[tuple[str, int]]:
    return [(group.name, group.count) for group in config.stores]


def test_store_counts_of_flags_and_of_a_file() -> None:
    none = ClusterConfig()
    assert with_store_count(none, options()) == none
    two = with_store_count(
        ClusterConfig.model_validate({"store": {"host_bytes": "1MiB"}}), options(2)
    )
    assert counts(two) == [("store", 2)]
    assert two.stores[0].settings.host_bytes == 2**20
    of_file = ClusterConfig.model_validate({"stores": [{"name": "kv", "host_bytes": "2MiB"}]})
    assert counts(with_store_count(of_file, options(3))) == [("kv", 3)]
    assert counts(with_store_count(of_file, options(0))) == []
    several = ClusterConfig.model_validate({"stores": [{"name": "a"}, {"name": "b"}]})
    assert with_store_count(several, options()) == several
    with pytest.raises(ConfigError, match="2 groups of stores"):
        with_store_count(several, options(2))


def test_a_disk_for_nobody_is_a_mistake() -> None:
    flags = {"store.ssd_dir": Path("/x"), "store.ssd_bytes": None}
    with pytest.raises(ConfigError, match="--ssd: there is no store; start one with --stores 1"):
        with_store_count(ClusterConfig(), options(**flags))
    assert counts(with_store_count(ClusterConfig(), options(1, **flags))) == [("store", 1)]


def test_stores_are_shown() -> None:
    config = ClusterConfig.model_validate({"stores": 1})
    assert headline(config).endswith("1 prefill + 1 decode + 1 store")
    assert headline(ClusterConfig.model_validate({"stores": 2})).endswith("+ 2 stores")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(Board(config, now=0.0).render(Glyphs(is_unicode=False), now=0.0))
    assert isinstance(console.file, io.StringIO)
    assert "store-0" in console.file.getvalue()
    facts = "grpc_address=127.0.0.1:1 incarnation=x memory=1.0GiB ssd=off"
    event = PartEvent(part="store-0", state=PartState.READY, detail=facts)
    assert short_detail(event) == "127.0.0.1:1, memory 1.0GiB, ssd off"
    told = replace(event, warning="the SSD directory /x cannot be used: it is read-only")
    assert short_detail(told) == (
        "127.0.0.1:1, memory 1.0GiB, ssd off; the SSD directory /x cannot be used: it is read-only"
    )


# -- doctor --


def findings(config: ClusterConfig) -> list[Finding]:
    return list(check_ssd(Task(config=config, is_deep=False)))


def store_on(directory: Path, **settings: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"stores": 1, "store": {"ssd_dir": directory, "ssd_bytes": "1MiB", **settings}}
    )


def test_a_directory_that_will_do(tmp_path: Path) -> None:
    (found,) = findings(store_on(tmp_path))
    # How fast it is depends on the machine.
    assert found.severity in (Severity.OK, Severity.WARNING)
    assert "MB/s" in found.message
    assert list(tmp_path.iterdir()) == []
    named = ClusterConfig.model_validate({"store": {"ssd_dir": tmp_path}})
    assert "MB/s" in findings(named)[-1].message


def test_a_directory_that_will_not_do(tmp_path: Path) -> None:
    (missing,) = findings(store_on(tmp_path / "absent"))
    assert missing.severity is Severity.WARNING
    assert "memory only" in missing.message
    assert missing.fix == f"mkdir -m 700 -p {tmp_path / 'absent'}"
    (strict,) = findings(store_on(tmp_path / "absent", is_ssd_strict=True))
    assert strict.severity is Severity.ERROR
    assert "does not start" in strict.message
    file = tmp_path / "file"
    file.write_text("")
    assert "not a directory" in findings(store_on(file))[0].message

    ssd = tmp_path / "ssd"
    (ssd / "store-0").mkdir(parents=True, mode=0o700)
    assert own_directory_problem(ssd / "store-0") == ""
    (ssd / "store-0").chmod(0o755)
    (open_to_others,) = findings(store_on(ssd))
    assert "open to others" in open_to_others.message
    assert open_to_others.fix == f"chmod 700 {ssd / 'store-0'}"


def test_less_room_than_was_asked_for(tmp_path: Path) -> None:
    first, *_ = findings(store_on(tmp_path, ssd_bytes="1000TiB"))
    assert first.severity is Severity.WARNING
    assert "asked for" in first.message
    assert "--ssd-size" in first.fix


def test_without_stores_or_disks_there_is_little_to_say() -> None:
    assert findings(ClusterConfig()) == []
    (found,) = findings(ClusterConfig.model_validate({"stores": 1}))
    assert (found.severity, "memory only" in found.message) == (Severity.INFO, True)
