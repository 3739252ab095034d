"""A stand-in for FlashInfer: its signatures, what it demands of its arguments, torch's arithmetic.

The signatures are those of a real wheel (tests/gpu/flashinfer_signatures.py); a call that does not fit
them fails as it would there. What its sources demand beyond that is checked here: int32 indices, tables
that are planned from the host, dtypes that were named in `plan`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SIGNATURES = json.loads(Path(__file__).with_name("flashinfer_signatures.json").read_text())


def make_flashinfer() -> ModuleType:
    """What `import flashinfer` would give."""
    module = ModuleType("flashinfer")
    for function in (
        append_paged_kv_cache,
        apply_rope_with_cos_sin_cache_inplace,
        fused_add_rmsnorm,
        rmsnorm,
        silu_and_mul,
        top_k_renorm_probs,
        top_p_renorm_probs,
    ):
        name = function.__name__
        setattr(module, name, bound(SIGNATURES["functions"][name], function))
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
    return module


def signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                one["name"],
                inspect._ParameterKind[one["kind"]],
                default=one.get("default", inspect.Parameter.empty),
            )
            for one in parameters
        ]
    )


def bound(parameters: list[dict[str, Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the arguments by name, as far as they were given; TypeError if they do not fit."""
    expected = signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**expected.bind(*args, **kwargs).arguments)

    return call


# -- rows --


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = input.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(input.dtype)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    residual.copy_(input.float() + residual.float())
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input: Tensor) -> Tensor:
    gate, up = input.float().chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    assert cos_sin_cache.dtype is torch.float32, cos_sin_cache.dtype
    assert is_neox, "halves, not pairs"
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, -1)
    for rows in (query, key):
        heads = rows.view(len(rows), -1, head_size)
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


# -- sampling --


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    assert is_deterministic, "a replay must draw the same tokens"
    assert probs.dtype is torch.float32, probs.dtype
    assert top_k.dtype is torch.int32, top_k.dtype
    edges = probs.sort(-1, descending=True).values.gather(-1, top_k.long()[:, None] - 1)
    kept = torch.where(probs >= edges, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    assert is_deterministic, "a replay must draw the same tokens"
    assert top_p.dtype is torch.float32, top_p.dtype
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    is_kept = torch.zeros_like(probs, dtype=torch.bool)
    is_kept.scatter_(-1, order, before < top_p[:, None])
    kept = torch.where(is_kept, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


# -- paged KV --


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND", kv_layout
    _check_tables(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert append_key.dtype is append_value.dtype is paged_kv_cache.dtype, append_key.dtype
    size = paged_kv_cache.shape[3]
    for token, (row, position) in enumerate(
        zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ):
        page, slot = divmod(position, size)
        assert page < kv_indptr[row + 1] - kv_indptr[row], (row, position)
        cache = paged_kv_cache[kv_indices[kv_indptr[row] + page]]
        cache[0, :, slot], cache[1, :, slot] = append_key[token], append_value[token]


class _Wrapper:
    """A plan, and attention as it says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("__init__", args, kwargs)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype is torch.uint8, workspace.dtype
        assert not workspace[:64].any(), "the workspace must be zero at first"
        assert given["kv_layout"] == "HND", given
        self.given = given
        self.planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = planned = self._bind("plan", args, kwargs)
        for name, value in planned.items():
            if "indptr" in name or "last_page_len" in name:
                assert value.device.type == "cpu", f"{name} would be waited for"
        assert planned["num_qo_heads"] % planned["num_kv_heads"] == 0, planned

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._bind("run", args, kwargs)
        query, cache = given["q"], given["paged_kv_cache"]
        planned = self.planned
        assert query.dtype is planned["q_data_type"], query.dtype
        assert cache.dtype is planned["kv_data_type"], cache.dtype
        assert query.shape[1] == planned["num_qo_heads"], query.shape
        heads, size = planned["num_kv_heads"], planned["page_size"]
        assert cache.shape[1:4] == (2, heads, size), cache.shape
        qo_indptr, kv_indptr, kv_indices, last_page_len = self._tables()
        _check_tables(qo_indptr, kv_indptr, kv_indices, last_page_len)
        assert int(qo_indptr[-1]) == len(query), (qo_indptr, query.shape)
        out = given.get("out", torch.empty_like(query))
        for row, last in enumerate(last_page_len.tolist()):
            assert 1 <= last <= size, last_page_len
            asking = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            blocks = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
            kv = cache[blocks].transpose(0, 1).transpose(1, 2).flatten(2, 3).float()
            kv = kv[:, :, : (len(blocks) - 1) * size + last]
            out[asking] = attend(query[asking].float(), kv).to(query.dtype)
        return out

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _bind(self, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
        parameters = SIGNATURES["classes"][type(self).__name__][method]
        return dict(signature(parameters).bind(*args, **kwargs).arguments)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        if not self.given.get("use_tensor_cores"):
            group = self.planned["num_qo_heads"] // self.planned["num_kv_heads"]
            assert group in (1, 2, 3, 4, 6, 8, 16), group
        if self.given.get("use_cuda_graph"):
            # A graph reads its tables where they were when it was captured.
            for buffer, name in (
                ("paged_kv_indptr_buffer", "indptr"),
                ("paged_kv_indices_buffer", "indices"),
                ("paged_kv_last_page_len_buffer", "last_page_len"),
            ):
                values = self.planned[name]
                assert name == "indices" or len(values) == len(self.given[buffer]), name
                self.given[buffer][: len(values)].copy_(values)
                self.planned[name] = self.given[buffer]

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        planned = self.planned
        rows = torch.arange(len(planned["indptr"]), dtype=torch.int32)
        return rows, planned["indptr"], planned["indices"], planned["last_page_len"]


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        planned = self.planned
        assert planned["causal"] is True, planned
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        return planned["qo_indptr"], *(planned[name] for name in names)


def attend(query: Tensor, kv: Tensor) -> Tensor:
    """Causal attention of the last tokens: `query` [n, heads, dim], `kv` [2, kv_heads, tokens, dim]."""
    group = query.shape[1] // kv.shape[1]
    keys, values = kv.repeat_interleave(group, dim=1)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
    num_before = keys.shape[1] - len(query)
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(num_before)
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)


def _check_tables(*tables: Tensor) -> None:
    for table in tables:
        assert table.dtype is torch.int32, table.dtype
