from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest

from moonpool.kv.block_hash import (
    differences,
    hash_blocks,
    namespace_seed,
    secret_fingerprint,
)
from support.kv import SECRET, make_model_namespace, make_namespace


def test_the_key_scheme_is_pinned() -> None:
    """What is stored and sent depends on it: a change needs a new scheme name and a record."""
    seed = namespace_seed(make_namespace(tenant="acme", cache_salt="s", adapter="a@1"), SECRET)
    assert seed.hex() == "324164957fcc8ed038da12fd22dd5576095443207a4d7366f746679baeed6ce3"
    chain = hash_blocks(seed, range(40), 16)
    assert [block_hash.hex() for block_hash in chain] == [
        "538a9533782a8171803470c820dbf2785320ebbcea2f1bc6d33f3c7e5368e3ee",
        "dcc0cca1679ab0069b1a6b90cb76e53df44473d68b86b91fffcb3a2a245d4f77",
    ]
    assert secret_fingerprint(SECRET) == "4a7d8b083876e2a7"


def test_a_hash_covers_the_hash_before_and_little_endian_tokens() -> None:
    seed = namespace_seed(make_namespace(), SECRET)
    tokens = [0, 1, 0x01020304, 0xFFFFFFFF]
    first, second = hash_blocks(seed, tokens, 2)
    assert first == hashlib.sha256(seed + struct.pack("<2I", *tokens[:2])).digest()
    assert second == hashlib.sha256(first + struct.pack("<2I", *tokens[2:])).digest()


def test_only_full_blocks_have_a_hash() -> None:
    seed = namespace_seed(make_namespace(), SECRET)
    assert [len(hash_blocks(seed, range(n), 16)) for n in (0, 1, 15, 16, 17, 31, 32)] == [
        *(0, 0, 0, 1, 1, 1, 2)
    ]


def test_a_chain_goes_on_from_its_parent() -> None:
    seed = namespace_seed(make_namespace(), SECRET)
    whole = hash_blocks(seed, range(50), 8)
    head = hash_blocks(seed, range(24), 8)
    assert head + hash_blocks(seed, range(24, 50), 8, parent=head[-1]) == whole
    assert hash_blocks(seed, range(3), 8, parent=head[-1]) == []


def test_chains_that_part_never_meet_again() -> None:
    seed = namespace_seed(make_namespace(), SECRET)
    a = hash_blocks(seed, [1, 2, 3, 4], 1)
    b = hash_blocks(seed, [1, 9, 3, 4], 1)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_a_token_id_that_does_not_fit_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="32-bit"):
        hash_blocks(namespace_seed(make_namespace(), SECRET), [1, bad], 2)


def test_every_field_and_the_secret_change_the_seed() -> None:
    base = make_namespace()
    variants = [
        dataclasses.replace(base, **{name: "x"}) for name in ("tenant", "cache_salt", "adapter")
    ]
    for field in dataclasses.fields(base.model):
        value = 17 if field.name == "block_size" else "x"
        model = dataclasses.replace(base.model, **{field.name: value})
        variants.append(dataclasses.replace(base, model=model))
    seeds = {namespace_seed(variant, SECRET) for variant in variants}
    seeds |= {namespace_seed(base, SECRET), namespace_seed(base, b"another")}
    assert len(seeds) == len(variants) + 2


def test_text_cannot_move_between_fields() -> None:
    a = make_namespace(tenant="ab", cache_salt="c")
    b = make_namespace(tenant="a", cache_salt="bc")
    assert namespace_seed(a, SECRET) != namespace_seed(b, SECRET)


def test_differences_are_readable() -> None:
    a = make_model_namespace(kv_dtype="bfloat16")
    b = make_model_namespace(block_size=32)
    assert differences(a, a) == []
    assert differences(a, b) == ["kv_dtype: bfloat16 != float32", "block_size: 16 != 32"]


def test_the_secret_is_required_and_its_fingerprint_is_not_the_secret() -> None:
    for function in (secret_fingerprint, lambda secret: namespace_seed(make_namespace(), secret)):
        with pytest.raises(ValueError, match="secret"):
            function(b"")
    assert secret_fingerprint(b"a") != secret_fingerprint(b"b")
