"""The cluster schema: precedence, origins, and what an operator reads when something is wrong."""

from __future__ import annotations

import re
import stat
from hashlib import sha256
from pathlib import Path
from typing import get_args

import pytest

from moonpool.config.cpu import has_bfloat16_products
from moonpool.config.load import FLAG_BY_KEY, LoadedConfig, load_cluster_config
from moonpool.config.private_file import create_private
from moonpool.config.process import (
    RouterConfig,
    WorkerConfig,
    read_document,
    router_config,
    worker_configs,
    write_document,
)
from moonpool.config.schema import (
    ApiKeySettings,
    ClusterConfig,
    EvictionPolicyName,
    NatsSettings,
    PlacementSettings,
    RouterMode,
    RouterSettings,
    StoreSettings,
    TelemetrySettings,
    TenantSettings,
    WorkerSettings,
    default_data_dir,
)
from moonpool.config.secret import load_or_create_secret
from moonpool.config.values import format_size, host_port, parse_cpus, parse_size
from moonpool.errors import ConfigError
from moonpool.kv.eviction import EvictionName
from moonpool.routing.config import PolicyName, RoutingConfig
from moonpool.routing.disagg_decider import DisaggConfig
from moonpool_router.placement_config import routing_config

_REPO = Path(__file__).parents[2]
_DIGEST = sha256(b"hunter2!").hexdigest()


def load(
    tmp_path: Path,
    text: str = "",
    *,
    environ: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
    name: str = "cluster.toml",
) -> LoadedConfig:
    path = tmp_path / name
    path.write_text(text)
    return load_cluster_config(path, environ=environ or {}, flags=flags)


def test_defaults_need_no_file() -> None:
    config = load_cluster_config(None, environ={"MOONPOOL_HOME": "/data"}).config
    assert config.data_dir == Path("/data")
    assert [group.role for group in config.workers] == ["prefill", "decode"]
    assert config.router.request_timeout_s == 600
    assert config.local_prefill_tokens == 256
    assert config.nats.is_embedded


def test_every_eviction_policy_can_be_named() -> None:
    assert set(get_args(EvictionPolicyName)) == {name.value for name in EvictionName}


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        'model = "a"\ndtype = "float32"\n[router]\nhttp_port = 1\ngrpc_port = 1\n',
        environ={"MOONPOOL_ROUTER__HTTP_PORT": "2", "MOONPOOL_ROUTER__GRPC_PORT": "2"},
        flags={"router.http_port": 3, "router.api_key": None},
    )
    router = loaded.config.router
    assert (router.http_port, router.grpc_port, router.api_key) == (3, 2, None)
    origins = {key: loaded.origin_of(key) for key in ("model", "name", "router.http_port")}
    assert origins == {
        "model": "cluster.toml",
        "name": "default",
        "router.http_port": "flag --port",
    }
    assert loaded.origin_of("router.grpc_port") == "environment MOONPOOL_ROUTER__GRPC_PORT"


def test_a_group_is_the_defaults_with_its_own_keys_over_them(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
        [worker]
        max_num_seqs = 8
        kv_cache_memory_bytes = "64MiB"
        [[workers]]
        role = "prefill"
        count = 2
        max_num_seqs = 4
        [[workers]]
        role = "decode"
        name = "d"
        """,
    )
    prefill, decode = loaded.config.workers
    assert (prefill.settings.max_num_seqs, decode.settings.max_num_seqs) == (4, 8)
    assert prefill.settings.kv_cache_memory_bytes == 64 * 2**20
    configs = worker_configs(loaded.config, nats_url="nats://127.0.0.1:1")
    assert [config.worker_id for config in configs] == ["prefill-0", "prefill-1", "d-0"]
    assert loaded.origin_of("workers[1].max_num_seqs") == "cluster.toml"


def test_yaml_says_the_same(tmp_path: Path) -> None:
    text = "model: m\nworkers:\n- {role: both, count: 3, engine_cpus: 0-1}\n"
    (group,) = load(tmp_path, text, name="cluster.yaml").config.workers
    assert (group.role, group.count, group.settings.engine_cpus) == ("both", 3, (0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'x'", "modle (cluster.toml): unknown key; did you mean model? allowed here: "),
        ("[router]\nhtp_port = 1", "router.htp_port (cluster.toml): unknown key; did you mean"),
        (
            "[[workers]]\nrole = 'decode'\nmax_seqs = 1",
            "workers[0].max_seqs (cluster.toml): unknown key; did you mean max_num_seqs?",
        ),
        ("dtype = 'fp8'", "dtype = 'fp8' (cluster.toml): input should be 'float32' or 'bfloat16'"),
        (
            "[worker]\nblock_size = 17",
            "worker.block_size = 17 (cluster.toml): allowed are 8, 16, 32, 64, 128",
        ),
        (
            "[worker]\nkv_cache_memory_bytes = '1 cup'",
            "worker.kv_cache_memory_bytes = '1 cup' (cluster.toml): allowed is a number of bytes",
        ),
        ("[[workers]]\nrole = 'chef'", "workers[0].role = 'chef' (cluster.toml): input should be"),
        ("[[workers]]\ncount = 2", "workers[0].role (cluster.toml): is missing"),
        ("workers = []", "at least one"),
        (
            "[[workers]]\nrole='both'\n[[workers]]\nrole='both'",
            "two groups are named 'both'",
        ),
        (
            "[[workers]]\nrole='prefill'\nblock_size=32\n[[workers]]\nrole='decode'",
            "all workers need the same",
        ),
        ("[router]\nhost = '0.0.0.0'", "can be reached by others: allowed with an api_key"),
        ("[worker]\nhost = '0.0.0.0'", "set advertise_host"),
        (
            "[[router.api_keys]]\ntenant = ''\nkey = 'long enough'",
            "router.api_keys[0].tenant = '' (cluster.toml): allowed are 1 to 256 letters",
        ),
        (
            "[[router.api_keys]]\nkey = 'long enough'",
            "router.api_keys[0].tenant (cluster.toml): is missing",
        ),
        (
            "[[router.api_keys]]\ntenant = 'a'",
            "router.api_keys[0]: key, key_sha256: neither is set; allowed is exactly one of them",
        ),
        (
            f"[[router.api_keys]]\ntenant = 'a'\nkey = 'hunter2!'\nkey_sha256 = '{_DIGEST}'",
            "router.api_keys[0]: key, key_sha256: both are set; allowed is exactly one of them",
        ),
        (
            "[router]\napi_keys = [{tenant = 'a', key = 'hunter2!'}, {tenant = 'b', key = 'hunter2!'}]",
            "router: api_keys[0] and api_keys[1] have the same key: each may be named once",
        ),
        (
            "[router]\napi_keys = [{tenant = 'a', key = 'hunter2!'}, "
            f"{{tenant = 'a', key_sha256 = '{_DIGEST}'}}]",
            "router: api_keys[0] and api_keys[1] have the same key: each may be named once",
        ),
        (
            f"[router]\napi_keys = [{{tenant = 'a', key_sha256 = '{_DIGEST}'}}, "
            f"{{tenant = 'b', key_sha256 = '{_DIGEST.upper()}'}}]",
            "router: api_keys[0] and api_keys[1] have the same key: each may be named once",
        ),
        (
            f"[router]\napi_key = 'hunter2!'\napi_keys = [{{tenant = 'a', key_sha256 = '{_DIGEST}'}}]",
            "router: api_key and api_keys[0] have the same key: each may be named once",
        ),
        (
            "[[router.api_keys]]\ntenant = 'a'\nkey = 'hunter2'",
            "router.api_keys[0].key = ... (cluster.toml): string should have at least 8 characters",
        ),
        (
            "[[router.api_keys]]\ntenant = 'a'\nkey_sha256 = 'hunter2!'",
            "router.api_keys[0].key_sha256 = ... (cluster.toml): string should match pattern",
        ),
        (
            "[[router.api_keys]]\ntenant = 'a'\nkeys = 'hunter2!'",
            "router.api_keys[0].keys (cluster.toml): unknown key; did you mean key?",
        ),
        (
            "[router]\napi_keys = ['hunter2!']",
            "router.api_keys[0] = ... ",
        ),
        (
            "[router]\napi_keys = 'hunter2!'",
            "router.api_keys = ... (cluster.toml): input should be",
        ),
        (
            "[worker]\nadvertise_host = '10.0.0.1:80'",
            "worker.advertise_host = '10.0.0.1:80' (cluster.toml): allowed is a name or an IP address",
        ),
        ("[router]\nhost = '[::1'", "allowed is a name or an IP address, without a port"),
        ("[router]\nseeds = ['::1:8001']", "router.seeds[0] = '::1:8001'"),
        ("[worker]\ntransports = ['shm', 'shm']", "each may be named once"),
        (
            "[worker]\ntransports = ['cuda_ipc', 'shm']",
            "cuda_ipc is only for workers with device = 'cuda'",
        ),
        ("[store]\ntransports = ['shm', 'cuda_ipc']", "cuda_ipc is only for workers"),
        ("[worker]\ndevice = 'gpu'", "worker.device = 'gpu' (cluster.toml): "),
        ("[worker]\ndevice = 'cuda'", "allowed only with allow_unverified = true"),
        (
            "dtype = 'float32'\n[worker]\ndevice = 'cuda:1'\nallow_unverified = true",
            "dtype = 'float32': workers on a GPU compute in bfloat16 only",
        ),
        (
            "kv_cache_dtype = 'fp8_e4m3'",
            "kv_cache_dtype = 'fp8_e4m3': allowed only if all workers are on a GPU",
        ),
        (
            "quantization = 'int8'\n[worker]\ndevice = 'cuda'\nallow_unverified = true",
            "quantization = 'int8': allowed only for workers on CPUs",
        ),
        ("[worker]\nmax_num_batched_tokens = 2", "allowed is at most max_num_batched_tokens = 2"),
        (
            "[worker]\nmax_num_batched_tokens = 15\nmax_num_seqs = 1",
            "max_num_batched_tokens = 15: allowed is at least block_size = 16",
        ),
        ("failpoints = 'x=kill'", "allowed only with unsafe_failpoints"),
        ("dtype = 'float32'\ncompute_dtype = 'bfloat16'", "allowed only with dtype = 'bfloat16'"),
        (
            "compute_dtype = 'float32'\n[worker]\ndevice = 'cuda'\nallow_unverified = true",
            "compute_dtype = 'float32': allowed only for workers on CPUs",
        ),
        ("[nats]\nurl = 'http://x'", "nats.url = 'http://x' (cluster.toml): allowed are urls like"),
        ("model = ", "cluster.toml: "),
        ("[router]\nrequest_timeout_s = nan", "router.request_timeout_s = nan"),
    ],
)
def test_a_mistake_names_key_value_source_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert "hunter2" not in caught.value.message
    assert _DIGEST not in caught.value.message.lower()
    assert len(caught.value.message.splitlines()) == 1


def test_workers_on_a_gpu_read_there_first_unless_they_are_told_otherwise(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[[workers]]\nrole = 'prefill'\ndevice = 'cuda'\nallow_unverified = true\n"
        "[[workers]]\nrole = 'decode'\n"
        "[[workers]]\nrole = 'both'\ndevice = 'cuda:1'\nallow_unverified = true\n"
        "transports = 'shm,cuda_ipc'",
    ).config
    assert [group.settings.transports for group in config.workers] == [
        ("cuda_ipc", "shm", "grpc"),
        ("shm", "grpc"),
        ("shm", "cuda_ipc"),
    ]
    on_gpu = load(tmp_path, "[worker]\ndevice = 'cuda'\nallow_unverified = true").config
    assert {group.settings.transports for group in on_gpu.workers} == {("cuda_ipc", "shm", "grpc")}
    everywhere = "[worker]\ndevice = 'cuda'\nallow_unverified = true\ntransports = ['grpc']"
    assert load(tmp_path, everywhere).config.workers[0].settings.transports == ("grpc",)


def test_every_mistake_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            tmp_path,
            "dtype = 'fp8'",
            environ={
                "MOONPOOL_ROUTER__HTP_PORT": "1",
                "MOONPOOL_WORKERS__ROLE": "both",
                "MOONPOOL_WORKER__BLOCK_SIZE": "17",
            },
        )
    assert [line.split(" (")[0] for line in caught.value.message.splitlines()] == [
        "router.htp_port",
        "workers.role",
        "dtype = 'fp8'",
        "worker.block_size = '17'",
    ]


def test_an_api_key_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[router]\napi_key = 'hunter2'")
    assert "hunter2" not in caught.value.message
    loaded = load(tmp_path, "[router]\napi_key = 'correct-horse'")
    assert ("router.api_key", "(set)", "cluster.toml") in list(loaded.rows())
    assert "correct-horse" not in repr(loaded.config)
    text = "[router]\napi_keys = [{tenant = 'a', key = 'correct-horse'}, {tenant = 'b', key_sha256 = '%s'}]"
    loaded = load(tmp_path, text % _DIGEST)
    assert ("router.api_keys", "a, b", "cluster.toml") in list(loaded.rows())
    shown = f"{loaded.config!r} {list(loaded.rows())}"
    assert "correct-horse" not in shown
    assert _DIGEST not in shown


def test_credentials_in_a_url_are_never_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        load(tmp_path, "[nats]\nurl = 'http://me:hunter2@host'")
    assert "hunter2" not in failure.value.message
    assert "nats.url = 'http://...@host' (cluster.toml)" in failure.value.message
    loaded = load(tmp_path, "[nats]\nurl = 'nats://me:hunter2@a:1,nats://token@b:2'")
    shown = ("nats.url", "nats://...@a:1,nats://...@b:2", "cluster.toml")
    assert shown in list(loaded.rows())
    document = router_config(loaded.config, nats_url="nats://token@b:2")
    assert "hunter2" not in repr(loaded.config)
    assert "token@" not in repr(document)


@pytest.mark.parametrize("name", ["cluster.ini", "missing.toml"])
def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, name: str) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=name):
        load_cluster_config(tmp_path / name, environ={})


def test_placement_is_one_section_with_its_numbers(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        '[router.placement]\nmode = "dynamo-linear"\nkv_overlap_score_weight = 2.0\n',
        environ={"MOONPOOL_ROUTER__PLACEMENT__DISAGG": "threshold"},
        flags={"router.placement.slo_tpot_ms": 40, "router.placement.mode": None},
    )
    placement = loaded.config.router.placement
    assert (placement.mode, placement.kv_overlap_score_weight) == ("dynamo_linear", 2.0)
    assert (placement.disagg, placement.slo_tpot_ms) == ("threshold", 40)
    assert loaded.origin_of("router.placement.slo_tpot_ms") == "flag --slo-tpot-ms"
    with pytest.raises(ConfigError, match=r"router\.placement\.mode = 'astrology'"):
        load_cluster_config(None, environ={}, flags={"router.placement.mode": "astrology"})
    routing = routing_config(placement, local_prefill_tokens=64)
    assert routing.policy is PolicyName.DYNAMO_LINEAR
    assert routing.dynamo_linear.overlap_score_weight == 2.0
    assert routing.disagg == DisaggConfig(
        threshold_tokens=64, busy_threshold_tokens=1_024, only_thresholds=True
    )
    assert routing.min_ttft.slo_tpot_s == 0.04
    unbound = placement.model_copy(update={"slo_tpot_ms": 0.0})
    assert routing_config(unbound, local_prefill_tokens=64).min_ttft.slo_tpot_s is None
    assert routing_config(PlacementSettings(), local_prefill_tokens=256) == RoutingConfig()


def test_every_mode_is_a_policy() -> None:
    assert set(get_args(RouterMode)) == {policy.value for policy in PolicyName}


def test_every_flag_names_a_key() -> None:
    loaded = load_cluster_config(None, environ={})
    keys = {key for key, _, _ in loaded.rows()}
    assert set(FLAG_BY_KEY) <= keys
    assert len(set(FLAG_BY_KEY.values())) == len(FLAG_BY_KEY)


def test_the_example_file_is_the_defaults_but_for_what_it_says() -> None:
    config = load_cluster_config(_REPO / "deploy" / "cluster.toml", environ={}).config
    defaults = load_cluster_config(None, environ={}).config
    assert config == defaults


@pytest.mark.parametrize(
    ("document", "computed_as"),
    [
        ("dtype = 'float32'", "float32"),
        ("compute_dtype = 'bfloat16'", "bfloat16"),
        ("compute_dtype = 'float32'", "bfloat16-in-float32"),
        ("compute_dtype = 'float32'\nquantization = 'int8'", "bfloat16-int8-in-float32"),
        ("[worker]\ndevice = 'cuda'\nallow_unverified = true", "bfloat16"),
        ("", "bfloat16" if has_bfloat16_products() else "bfloat16-in-float32"),
    ],
)
def test_a_namespace_says_what_is_computed_in(
    tmp_path: Path, document: str, computed_as: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(document)
    cluster = load_cluster_config(path, environ={}).config
    common = router_config(cluster, nats_url="nats://127.0.0.1:1").common
    assert common.computed_as == computed_as


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 fma avx512f avx512bw avx512vl avx512dq", True),
        ("flags\t\t: fpu avx2 fma avx512f", False),
        ("flags\t\t: fpu avx2 fma avx_vnni avx_vnni_int8 avx_ne_convert", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("bogus", False),
        ("", False),
    ],
)
def test_a_cpu_with_bfloat16_products(cpuinfo: str, expected: bool) -> None:
    assert has_bfloat16_products(f"processor\t: 0\n{cpuinfo}\n") is expected


def test_the_example_file_shows_every_key() -> None:
    text = (_REPO / "deploy" / "cluster.toml").read_text()
    sections = (ClusterConfig, NatsSettings, RouterSettings, PlacementSettings, WorkerSettings)
    hidden = {
        key
        for section in (*sections, StoreSettings, TelemetrySettings)
        for key in section.model_fields
        if not re.search(rf"^(# )?{key} = |^\[+(router\.)?{key}\]", text, re.MULTILINE)
    }
    assert hidden == set()
    entries = (*ApiKeySettings.model_fields, *TenantSettings.model_fields)
    assert {key for key in entries if not re.search(rf"\b{key} = ", text)} == set()


def test_one_tenant_may_take_everything_and_of_several_each_a_share() -> None:
    one, two = (ApiKeySettings(tenant=name, key=f"the key of {name}") for name in ("a", "b"))
    other_key = ApiKeySettings(tenant="a", key="another key of a")
    for settings, share in (
        (RouterSettings(), 1.0),
        (RouterSettings(api_key="correct-horse"), 1.0),
        (RouterSettings(api_keys=(one, other_key)), 1.0),
        (RouterSettings(api_key="correct-horse", api_keys=(one,)), 0.5),
        (RouterSettings(api_keys=(one, two)), 0.5),
        (RouterSettings(api_keys=(one, two), tenant_share=0.9), 0.9),
        (RouterSettings(tenant_share=0.1), 0.1),
    ):
        assert settings.max_tenant_share == share
    with pytest.raises(ValueError, match="tenant_share"):
        RouterSettings(tenant_share=0)


def test_documents_come_back_as_they_were(tmp_path: Path) -> None:
    cluster = ClusterConfig.model_validate(
        {
            "data_dir": tmp_path,
            "router": {
                "api_key": "correct-horse",
                "api_keys": [
                    {"tenant": "a", "key": "battery-staple"},
                    {"tenant": "b", "key_sha256": _DIGEST},
                ],
            },
            "workers": [{"role": "both", "max_num_seqs": 3}],
        }
    )
    assert ClusterConfig.model_validate_json(cluster.model_dump_json()) == cluster
    path = tmp_path / "document.json"
    router = router_config(cluster, nats_url="nats://127.0.0.1:1")
    write_document(router, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_document(str(path), RouterConfig) == router
    (worker,) = worker_configs(cluster, nats_url="nats://127.0.0.1:1")
    write_document(worker, path)
    assert read_document(str(path), WorkerConfig) == worker
    with pytest.raises(ConfigError, match=r"router \(.*document.json\): is missing"):
        read_document(str(path), RouterConfig)
    with pytest.raises(ConfigError, match="No such file"):
        read_document(str(tmp_path / "absent"), RouterConfig)


def test_a_document_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    path = tmp_path / "router.json"
    path.symlink_to(elsewhere)
    config = router_config(ClusterConfig(data_dir=tmp_path), nats_url="nats://127.0.0.1:1")
    write_document(config, path)
    assert elsewhere.read_text() == "mine"
    assert (path.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == (False, 0o600)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "router.json"]


def test_who_comes_second_finds_the_first_ones_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_private(path, b"first")
    create_private(path, b"second")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"first", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_the_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    first = load_or_create_secret(tmp_path / "data")
    path = tmp_path / "data" / "cluster.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret(tmp_path / "data") == first
    assert load_or_create_secret(tmp_path / "other").fingerprint != first.fingerprint
    assert first.value.hex() not in repr(first)
    assert len({first.fingerprint, first.rpc_key, first.value.hex()}) == 3
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.secret"]

    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        load_or_create_secret(tmp_path / "data")
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="64 hex digits"):
        load_or_create_secret(tmp_path / "data")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("1k", 1024), ("2MB", 2_000_000), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_and_cpus_have_one_spelling() -> None:
    assert [format_size(size) for size in (2**29, 1024, 1_000, 0)] == [
        "512MiB",
        "1KiB",
        "1000",
        "0",
    ]
    assert parse_cpus("0-2, 5") == (0, 1, 2, 5)
    assert parse_cpus("") == ()
    for bad in ("x", "1-", "-1", "3-1", "0-4096"):
        with pytest.raises(ValueError, match="CPU numbers"):
            parse_cpus(bad)


def test_where_the_data_lies() -> None:
    assert default_data_dir({"MOONPOOL_HOME": "/a", "XDG_DATA_HOME": "/b"}) == Path("/a")
    assert default_data_dir({"XDG_DATA_HOME": "/b"}) == Path("/b/moonpool")
    assert default_data_dir({}) == Path.home() / ".local/share/moonpool"


@pytest.mark.parametrize(
    ("host", "bound", "dialled"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1:80"),
        ("decode-0.local", "decode-0.local", "decode-0.local:80"),
        ("::1", "::1", "[::1]:80"),
        ("[fd00::7]", "fd00::7", "[fd00::7]:80"),
    ],
)
def test_a_host_has_brackets_only_where_a_port_follows(
    tmp_path: Path, host: str, bound: str, dialled: str
) -> None:
    text = f"model = 'm'\n[worker]\nhost = '{host}'\n[router]\nseeds = ['{dialled}']\n"
    config = load(tmp_path, text).config
    assert config.worker.host == bound
    assert host_port(host, 80) == host_port(bound, 80) == dialled
    assert config.router.seeds == (dialled,)
