"""Loading: defaults < file < environment < flags, and where each value came from.

Environment: `MOONPOOL_` and the key in capitals, `__` between levels (`MOONPOOL_ROUTER__HTTP_PORT`).
Flags come as dotted keys (`router.http_port`); FLAG_BY_KEY has their spelling, vLLM's where it has one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from moonpool.config.explain import describe_errors, keys_at, unknown_key
from moonpool.config.schema import ClusterConfig, default_data_dir
from moonpool.config.values import without_credentials
from moonpool.errors import ConfigError

ENV_PREFIX = "MOONPOOL_"

#: Variables of that prefix which are no configuration keys: read by single adapters.
OTHER_ENV = frozenset(
    {
        "MOONPOOL_ADDRESS",
        "MOONPOOL_API_KEY",
        "MOONPOOL_DEBUG",
        "MOONPOOL_HOME",
        "MOONPOOL_READY_FD",
    }
)

FLAG_BY_KEY = {
    "name": "--name",
    "data_dir": "--data-dir",
    "model": "--model",
    "dtype": "--dtype",
    "compute_dtype": "--compute-dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "local_prefill_tokens": "--local-prefill-tokens",
    "nats.url": "--nats-url",
    "nats.port": "--nats-port",
    "router.host": "--host",
    "router.http_port": "--port",
    "router.grpc_port": "--grpc-port",
    "router.api_key": "--api-key",
    "router.served_model_name": "--served-model-name",
    "router.is_strict": "--strict",
    "router.max_queued_requests": "--max-queued-requests",
    "router.request_timeout_s": "--request-timeout-s",
    "router.placement.mode": "--router-mode",
    "router.placement.disagg": "--disagg-policy",
    "router.placement.slo_tpot_ms": "--slo-tpot-ms",
    "router.placement.expected_output_tokens": "--expected-output-tokens",
    "router.placement.cache_threshold": "--cache-threshold",
    "router.placement.balance_abs_threshold": "--balance-abs-threshold",
    "router.placement.balance_rel_threshold": "--balance-rel-threshold",
    "router.placement.kv_overlap_score_weight": "--kv-overlap-score-weight",
    "router.placement.router_temperature": "--router-temperature",
    "worker.device": "--device",
    "worker.allow_unverified": "--allow-unverified",
    "worker.block_size": "--block-size",
    "worker.num_blocks": "--num-blocks",
    "worker.kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "worker.kv_eviction_policy": "--kv-eviction-policy",
    "worker.max_num_batched_tokens": "--max-num-batched-tokens",
    "worker.max_num_seqs": "--max-num-seqs",
    "worker.max_model_len": "--max-model-len",
    "worker.layers_per_group": "--layers-per-group",
    "worker.transports": "--transports",
    "worker.is_transport_strict": "--transport-strict",
    "store.host_bytes": "--host-size",
    "store.ssd_dir": "--ssd",
    "store.ssd_bytes": "--ssd-size",
    "store.ssd_write_bytes_per_day": "--ssd-write-per-day",
    "store.is_ssd_strict": "--ssd-strict",
    "telemetry.otlp_traces_endpoint": "--otlp-traces-endpoint",
    "telemetry.log_level": "--log-level",
    "telemetry.log_format": "--log-format",
    "failpoints": "--failpoints",
    "unsafe_failpoints": "--unsafe-failpoints",
}

MAX_FILE_BYTES = 1 << 20

#: Lists of groups, and the tables that hold their defaults.
_DEFAULTS_BY_GROUPS = {"workers": "worker", "stores": "store"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """The configuration and its provenance."""

    config: ClusterConfig
    #: Dotted key -> `cluster.toml`, `environment MOONPOOL_X`, `flag --x`. What is absent is a default.
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(key, value, origin) of every key, in the schema's order; secrets are not shown."""
        for key, value in _leaves(self.config, ""):
            if key == "router.api_keys":
                value = tuple(one.tenant for one in self.config.router.api_keys)
            shown = "(set)" if key == "router.api_key" and value is not None else _shown(value)
            yield key, shown, self.origin_of(key)

    def origin_of(self, key: str) -> str:
        """A key of a group of workers or stores may come from `[worker]` or `[store]`."""
        return _origin_of(self.origins, key)


def load_cluster_config(
    path: Path | None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Read, merge and check.

    Args:
        path: A TOML or YAML file (by its ending), or None.
        environ: `os.environ`, or a test's.
        flags: Dotted keys; None values are flags that were not given. `workers` takes a whole list.

    Raises:
        ConfigError: With one line per mistake.
    """
    origins: dict[str, str] = {}
    tree: dict[str, Any] = {}
    mistakes: list[str] = []
    if path is not None:
        tree = _read_file(path)
        for key in _keys_of(tree, ""):
            origins[key] = path.name
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_ENV:
            continue
        key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        origin = f"environment {variable}"
        if (mistake := _check_key(key, origin)) is not None:
            mistakes.append(mistake)
        else:
            _put(tree, key, value)
            origins[key] = origin
    for key, flag_value in (flags or {}).items():
        if flag_value is None:
            continue
        assert _check_key(key, "flag") is None, key
        _put(tree, key, flag_value)
        origins[key] = f"flag {FLAG_BY_KEY.get(key, key)}"
    tree.setdefault("data_dir", default_data_dir(environ))
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        mistakes.append(
            describe_errors(error, ClusterConfig, where=lambda key: _origin_of(origins, key))
        )
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return LoadedConfig(config=config, origins=origins)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(data.decode())
        if path.suffix in (".yaml", ".yml"):
            tree = yaml.safe_load(data)
        else:
            raise ConfigError(f"{path}: the name must end in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file must be a table of keys, not a {type(tree).__name__}")
    return tree


def _check_key(key: str, origin: str) -> str | None:
    """The mistake in a dotted key, if there is one."""
    parts = tuple(key.split("."))
    allowed = keys_at(ClusterConfig, parts[:-1])
    if key in _DEFAULTS_BY_GROUPS or (parts[-1] in allowed and parts[0] not in _DEFAULTS_BY_GROUPS):
        return None
    if parts[0] in _DEFAULTS_BY_GROUPS:
        return f"{key} ({origin}): single {parts[0]} can only be set in a file"
    return unknown_key(key, allowed or keys_at(ClusterConfig, ()), origin)


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    *tables, last = key.split(".")
    for name in tables:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[last] = value


def _keys_of(tree: Any, prefix: str) -> Iterator[str]:  # Any: parsed file
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _keys_of(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, value in enumerate(tree):
            yield from _keys_of(value, f"{prefix}[{index}]")
    else:
        yield prefix


def _origin_of(origins: Mapping[str, str], key: str) -> str:
    if key in origins:
        return origins[key]
    head, bracket, rest = key.partition("]")
    groups = head.partition("[")[0]
    if bracket and groups in _DEFAULTS_BY_GROUPS:
        # `stores = 2` says how many there are.
        shared = origins.get(groups if rest == ".count" else _DEFAULTS_BY_GROUPS[groups] + rest)
        if shared is not None:
            return shared
    below = {origin for name, origin in origins.items() if name.startswith((f"{key}.", f"{key}["))}
    if not key or len(below) > 1:
        return ", ".join(sorted(below or set(origins.values()))) or "default"
    return below.pop() if below else "default"


def _leaves(section: BaseModel, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        key = prefix if name == "settings" else f"{prefix}.{name}" if prefix else name
        if isinstance(value, BaseModel):
            yield from _leaves(value, key)
        elif name in _DEFAULTS_BY_GROUPS:
            for index, group in enumerate(value):
                yield from _leaves(group, f"{name}[{index}]")
        else:
            yield key, value


def _shown(value: object) -> str:
    if value is None:
        return "(none)"
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return without_credentials(shown)
