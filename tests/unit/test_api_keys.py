"""Whose a key is, and which keys a door takes."""

from __future__ import annotations

from hashlib import sha256

from moonpool.config.api_keys import ApiKeys, key_digest
from moonpool.config.schema import ApiKeySettings, RouterSettings

_CLUSTER_KEY = "0123456789abcdef"


def test_each_key_has_its_tenant_and_no_other_key_has_one() -> None:
    keys = ApiKeys({key_digest(b"of a"): "a", key_digest(b"of b"): "b", key_digest(b"too"): "a"})
    asked = (b"of a", b"of b", b"too", b"of c", b"", key_digest(b"of a"), None)
    assert [keys.tenant_of(key) for key in asked] == ["a", "b", "a", None, None, None, None]


def test_without_keys_everyone_may_come_in() -> None:
    assert RouterSettings().door_keys(_CLUSTER_KEY) is None


def test_a_door_takes_all_keys_and_the_clusters_own() -> None:
    digest = sha256("schlüssel".encode()).hexdigest()
    settings = RouterSettings(
        api_key="the first one",
        api_keys=(
            ApiKeySettings(tenant="acme", key="another one"),
            ApiKeySettings(tenant="b@example.com", key_sha256=digest.upper()),
        ),
    )
    keys = settings.door_keys(_CLUSTER_KEY)
    assert keys is not None
    asked = ("the first one", "another one", "schlüssel", _CLUSTER_KEY, "else")
    tenants = [keys.tenant_of(key.encode()) for key in asked]
    assert tenants == ["default", "acme", "b@example.com", "default", None]
    operators = [key for key in asked if keys.is_operator(key.encode())]
    assert operators == ["the first one", _CLUSTER_KEY]
    assert not keys.is_operator(None)


def test_digests_alone_let_whoever_runs_the_cluster_in() -> None:
    digest = sha256(b"a key that nobody here knows").hexdigest()
    settings = RouterSettings(api_keys=(ApiKeySettings(tenant="a", key_sha256=digest),))
    keys = settings.door_keys(_CLUSTER_KEY)
    assert keys is not None
    assert settings.has_keys
    assert keys.tenant_of(_CLUSTER_KEY.encode()) == "default"
