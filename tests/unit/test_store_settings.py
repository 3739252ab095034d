"""Stores in the cluster schema: how many, with which values, and what an operator reads when one is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from moonpool.config.load import LoadedConfig, load_cluster_config
from moonpool.config.process import KvStoreConfig, read_document, store_configs, write_document
from moonpool.config.schema import ClusterConfig, DiskAdmissionName, StoreSettings
from moonpool.errors import ConfigError
from moonpool.kv.layout import KvLayout
from moonpool.tiering.config import DiskAdmission
from moonpool.wire.store import MAX_DEADLINE_S
from moonpool_kvstore.settings import LEASE_S, fetch_config


def load(
    tmp_path: Path,
    text: str = "",
    *,
    environ: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> LoadedConfig:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_cluster_config(path, environ=environ or {}, flags=flags)


def test_a_cluster_has_no_stores_unless_it_says_so() -> None:
    assert ClusterConfig().stores == ()
    assert ClusterConfig.model_validate({"stores": 0}).stores == ()


def test_every_way_of_admission_can_be_named() -> None:
    assert set(get_args(DiskAdmissionName)) == {name.value for name in DiskAdmission}


def test_a_number_of_stores_that_are_alike(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        'stores = 2\n[store]\nhost_bytes = "2GiB"\nssd_dir = "/mnt/ssd"\n',
        flags={"store.ssd_bytes": "10GiB"},
    )
    (group,) = loaded.config.stores
    assert (group.count, group.name, group.settings.host_bytes) == (2, "store", 2 * 2**30)
    documents = store_configs(loaded.config, nats_url="nats://127.0.0.1:1")
    assert [document.store_id for document in documents] == ["store-0", "store-1"]
    assert {document.store.ssd_bytes for document in documents} == {10 * 2**30}
    assert documents[0].block_size == loaded.config.workers[0].settings.block_size
    origins = {
        key: loaded.origin_of(f"stores[0].{key}")
        for key in ("count", "host_bytes", "ssd_bytes", "host")
    }
    assert origins == {
        "count": "cluster.toml",
        "host_bytes": "cluster.toml",
        "ssd_bytes": "flag --ssd-size",
        "host": "default",
    }
    by_environment = load(tmp_path, environ={"MOONPOOL_STORES": "3"})
    assert by_environment.config.stores[0].count == 3
    assert by_environment.origin_of("stores[0].count") == "environment MOONPOOL_STORES"


def test_groups_of_stores_have_keys_of_their_own(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
        [store]
        host_bytes = "64MiB"
        [[stores]]
        name = "fast"
        ssd_dir = "/mnt/nvme"
        [[stores]]
        count = 2
        host_bytes = "32MiB"
        tenants = [{tenant = "a", floor_bytes = "8MiB"}]
        """,
    )
    fast, others = loaded.config.stores
    assert (fast.settings.ssd_dir, fast.settings.host_bytes) == (Path("/mnt/nvme"), 64 * 2**20)
    assert (others.settings.ssd_dir, others.settings.host_bytes) == (None, 32 * 2**20)
    assert others.settings.tenants[0].floor_bytes == 8 * 2**20
    documents = store_configs(loaded.config, nats_url="nats://127.0.0.1:1")
    assert [document.store_id for document in documents] == ["fast-0", "store-0", "store-1"]
    path = tmp_path / "document.json"
    write_document(documents[1], path)
    assert read_document(str(path), KvStoreConfig) == documents[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stores = -1", "stores[0].count = -1 (cluster.toml): input should be greater"),
        ("stores = 'many'", "stores = 'many' (cluster.toml): input should be a valid tuple"),
        (
            "[[stores]]\nname='a'\n[[stores]]\nname='a'",
            "stores: another group is named 'a': give each its own name",
        ),
        ("[[stores]]\nname='decode'", "another group is named 'decode'"),
        (
            "[[stores]]\nsd_dir='/x'",
            "stores[0].sd_dir (cluster.toml): unknown key; did you mean ssd_dir",
        ),
        (
            "stores = 2\n[store]\nssd_bytes = '1 cup'",
            "store.ssd_bytes = '1 cup' (cluster.toml): allowed is a number of bytes",
        ),
        ("stores = 1\n[store]\nssd_admission = 'most'", "store.ssd_admission = 'most'"),
        ("[store]\nhost = '0.0.0.0'", "set advertise_host"),
        ("[store]\ntransports = ['shm', 'shm']", "each may be named once"),
        (
            "[store]\nhost_bytes='1MiB'\ntenants=[{tenant='a',floor_bytes='2MiB'}]",
            "their floor_bytes are 2097152 together; allowed is at most host_bytes = 1048576",
        ),
        (
            "[store]\ntenants=[{tenant='a',floor_bytes='2MiB',max_bytes='1MiB'}]",
            "max_bytes = 1048576: allowed is at least floor_bytes = 2097152",
        ),
        ("[store]\ntenants=[{tenant='a'},{tenant='a'}]", "each may be named once"),
    ],
)
def test_a_mistake_names_key_value_source_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


def test_single_stores_are_no_matter_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="single stores can only be set in a file"):
        load(tmp_path, environ={"MOONPOOL_STORES__NAME": "x"})


def test_an_offer_is_read_for_as_long_as_whoever_makes_it_says() -> None:
    layout = KvLayout.block_major(
        num_blocks=2, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"
    )
    config = fetch_config(layout)
    assert config.hold_s == LEASE_S
    assert config.always_s >= MAX_DEADLINE_S


def test_no_directory_is_an_empty_one() -> None:
    assert StoreSettings.model_validate({"ssd_dir": ""}).ssd_dir is None
    relative = StoreSettings.model_validate({"ssd_dir": "ssd"}).ssd_dir
    assert relative is not None
    assert relative.is_absolute()
