"""`moonpool up`: a cluster from flags and a file, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.cli.failure import EXIT_INTERRUPTED, EXIT_OK, describe
from moonpool.cli.ports import check_ports
from moonpool.cli.pull import resolve_shown
from moonpool.cli.terminal import make_console, print_json
from moonpool.cli.up_view import ClusterFacts, UpView, make_view
from moonpool.cluster.local_cluster import LocalCluster
from moonpool.cluster.run_file import RunFile, process_start_ticks, published, running_clusters
from moonpool.config.load import FLAG_BY_KEY, LoadedConfig, load_cluster_config
from moonpool.config.schema import ClusterConfig, RoleName, StoreGroup, WorkerGroup
from moonpool.errors import ConfigError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line says."""

    file: Path | None
    #: Dotted keys; None for flags that were not given.
    flags: Mapping[str, object]
    num_prefill: int | None = None
    num_decode: int | None = None
    num_stores: int | None = None
    only_shows_config: bool = False


def run_up(options: UpOptions, *, is_json: bool) -> int:
    """Start it, wait for a signal, stop it.

    Raises:
        ConfigError: A value is wrong.
        ModelError: The model cannot be had.
        UnavailableError: A port is taken, or a part did not start.
    """
    loaded = load_cluster_config(options.file, environ=os.environ, flags=options.flags)
    config = with_worker_counts(
        loaded.config, num_prefill=options.num_prefill, num_decode=options.num_decode
    )
    config = with_store_count(config, options)
    if options.only_shows_config:
        return _show_config(loaded, is_json=is_json)
    check_ports(config, running_clusters(config.data_dir))
    model = resolve_shown(config.model, config.data_dir, is_json=is_json)
    name = config.router.served_model_name or model.name
    view = make_view(config, is_json=is_json)
    with asyncio.Runner() as runner:
        try:
            return runner.run(_live(config, name, view))
        finally:
            view.on_stopped()


def with_worker_counts(
    config: ClusterConfig, *, num_prefill: int | None, num_decode: int | None
) -> ClusterConfig:
    """The configuration with as many workers of a role as the flags say.

    Raises:
        ConfigError: The file has several groups of the role, or nobody is left to decode.
    """
    groups = list(config.workers)
    wanted: tuple[tuple[RoleName, int | None], ...] = (
        ("prefill", num_prefill),
        ("decode", num_decode),
    )
    for role, count in wanted:
        if count is None:
            continue
        own = [group for group in groups if group.role == role]
        if len(own) > 1:
            raise ConfigError(
                f"--{role} {count}: the file has {len(own)} groups of role {role}; "
                "set their counts there"
            )
        group = own[0] if own else WorkerGroup(role=role, settings=config.worker)
        at = groups.index(own[0]) if own else len(groups)
        groups[at : at + 1] = [group.model_copy(update={"count": count})] if count else []
    if not any(group.role != "prefill" for group in groups):
        raise ConfigError("--decode 0: a cluster needs a worker of role decode or both")
    return config.model_copy(update={"workers": tuple(groups)})


def with_store_count(config: ClusterConfig, options: UpOptions) -> ClusterConfig:
    """The configuration with as many store nodes as the flags say.

    Raises:
        ConfigError: The file has several groups of stores, or flags are for stores that nobody starts.
    """
    count = options.num_stores
    if count is not None:
        if len(config.stores) > 1:
            raise ConfigError(
                f"--stores {count}: the file has {len(config.stores)} groups of stores; "
                "set their counts there"
            )
        group = config.stores[0] if config.stores else StoreGroup(settings=config.store)
        stores = (group.model_copy(update={"count": count}),) if count else ()
        config = config.model_copy(update={"stores": stores})
    given = [key for key, value in options.flags.items() if value is not None]
    idle = [FLAG_BY_KEY[key] for key in given if key.startswith("store.")]
    if idle and not config.stores:
        raise ConfigError(f"{', '.join(idle)}: there is no store; start one with --stores 1")
    return config


async def _live(config: ClusterConfig, model: str, view: UpView) -> int:
    cluster = LocalCluster(config, on_event=view.on_part)
    signals = _Signals(cluster, view)
    signals.install()
    try:
        async with cluster:
            signals.is_ready = True
            facts = ClusterFacts(
                config=config,
                model=model,
                endpoints=cluster.endpoints,
                run_dir=str(cluster.run_dir),
            )
            with published(_run_file(facts, key=cluster.door_key)):
                view.on_ready(facts)
                await signals.wait()
    except UnavailableError as error:
        raise UnavailableError(
            f"{describe(error)} (logs: {cluster.run_dir})", code=error.code
        ) from error
    except asyncio.CancelledError:
        if not signals.num_received:
            raise
        signals.main.uncancel()
        return EXIT_INTERRUPTED
    return EXIT_INTERRUPTED if signals.num_received > 1 else EXIT_OK


class _Signals:
    """The first one drains (or ends the start), the second forces."""

    def __init__(self, cluster: LocalCluster, view: UpView) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.main = task
        self.num_received = 0
        self.is_ready = False
        self._cluster = cluster
        self._view = view
        self._received = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    async def wait(self) -> None:
        await self._received.wait()

    def _on_signal(self) -> None:
        self.num_received += 1
        if self.num_received == 1:
            self._view.on_draining()
            self._received.set()
            if not self.is_ready:
                self.main.cancel()
        else:
            self._view.on_forced()
            self._cluster.force()


def _run_file(facts: ClusterFacts, *, key: str | None) -> RunFile:
    return RunFile(
        name=facts.config.name,
        model=facts.model,
        pid=os.getpid(),
        pid_start_ticks=process_start_ticks(os.getpid()),
        started_unix_s=time.time(),
        grpc_address=facts.endpoints.grpc_address,
        http_url=facts.endpoints.http_url,
        nats_url=facts.endpoints.nats_url,
        api_key=key,
        run_dir=facts.run_dir,
    )


def _show_config(loaded: LoadedConfig, *, is_json: bool) -> int:
    rows = list(loaded.rows())
    if is_json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
        return EXIT_OK
    console = make_console()
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        console.print(f"{key:{width}}  {value}  ({origin})", soft_wrap=True, markup=False)
    return EXIT_OK
