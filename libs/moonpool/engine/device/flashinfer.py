"""FlashInfer: attention over paged KV, and what stands between a layer's products.

The only file that imports flashinfer, and only when an engine is to run on a GPU. Facts of its 0.7.4
that shape the calls:

- A paged cache is a 5-D tensor [blocks, 2, heads, tokens, dim] of any strides ("HND"): a layer's view of
  the pool goes in as it is.
- All indices are int32; prefill casts pointers unchecked. `plan` reads indptrs and last lengths on the
  host, so it gets them there, and the block ids on the device.
- `plan` takes float16 for granted: dtypes are always named.
- append compares no dtypes and quantizes nothing: keys and values are cast before it.
- Its samplers draw by rejection, with a state: not used. Its renormalising kernels say which tokens
  stay; the draw is the engine's own (sampler.py).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, cast

import structlog
import torch
from torch import Tensor

from moonpool.engine.batch import PageTables
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.tables import DeviceBatch, StepUpload

log = structlog.get_logger("moonpool.engine")

#: Head sizes that its attention is compiled for.
HEAD_DIMS = (64, 128, 256)

_LAYOUT = "HND"
#: What split-k keeps between its kernels; FlashInfer's own advice.
_WORKSPACE_BYTES = 128 << 20
#: From so many query heads a KV head on, decode by tensor cores is the faster one.
_TENSOR_CORE_GROUP = 4


def find_flashinfer() -> ModuleType | None:
    """The module if it can be imported; says so in the log if not."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        log.warning("engine.flashinfer_missing", why=str(error), falls_back_to="torch")
        return None


def make_workspace(device: torch.device) -> Tensor:
    """uint8, zeroed. Wrappers may share one: they run one after another."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferKernels:
    """DeviceKernels by FlashInfer."""

    name = "flashinfer"

    def __init__(self, flashinfer: ModuleType) -> None:
        self._flashinfer: Any = flashinfer  # Any: it has no types

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cast(Tensor, self._flashinfer.rmsnorm(x, weight, eps=eps))

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps=eps)
        return x

    def rotate_(self, positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> None:
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions,
            query.flatten(1),
            key.flatten(1),
            head_size=query.shape[-1],
            cos_sin_cache=table,
            is_neox=True,
        )

    def append(
        self, pool: DevicePool, layer: int, key: Tensor, value: Tensor, batch: DeviceBatch
    ) -> None:
        self._flashinfer.append_paged_kv_cache(
            pool.cast(key),
            pool.cast(value),
            batch.row_of_token,
            batch.positions,
            pool.layer(layer),
            batch.kv_indices,
            batch.kv_indptr,
            batch.kv_last_page_len,
            kv_layout=_LAYOUT,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return cast(Tensor, self._flashinfer.silu_and_mul(gate_up))

    def keep_likeliest(self, probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        kept = self._flashinfer.top_k_renorm_probs(probabilities, top_k, is_deterministic=True)
        nucleus = self._flashinfer.top_p_renorm_probs(kept, top_p, is_deterministic=True)
        # A share of 1 leaves out nothing, whatever the sum of float32 comes to.
        return torch.where(top_p[:, None] >= 1.0, kept, nucleus) > 0


class FlashInferAttention:
    """An AttentionBackend: decode rows and chunks, each by a kernel of its own."""

    def __init__(
        self,
        flashinfer: ModuleType,
        pool: DevicePool,
        upload: StepUpload,
        *,
        num_heads: int,
        dtype: torch.dtype,
        workspace: Tensor,
        backend: str = "auto",
    ) -> None:
        """`upload` has the tables of the step that is planned. `backend`: prefill's kernels."""
        module: Any = flashinfer  # Any: it has no types
        self._pool = pool
        self._upload = upload
        self._num_heads = num_heads
        self._dtype = dtype
        self._decode = decode_wrapper(flashinfer, pool, num_heads=num_heads, workspace=workspace)
        self._prefill = module.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout=_LAYOUT, backend=backend
        )
        self._num_decode_rows = 0

    def plan(self, pages: PageTables) -> None:
        kv_indices = self._upload.current(pages).kv_indices
        self._num_decode_rows = num_decodes = pages.num_decode_rows
        indptr = torch.from_numpy(pages.kv_indptr)
        last_page_len = torch.from_numpy(pages.kv_last_page_len)
        first = int(pages.kv_indptr[num_decodes])
        if num_decodes:
            plan_decode(
                self._decode,
                self._pool,
                indptr[: num_decodes + 1],
                kv_indices[:first],
                last_page_len[:num_decodes],
                num_heads=self._num_heads,
                dtype=self._dtype,
            )
        if num_decodes < pages.num_rows:
            qo_indptr = torch.from_numpy(pages.qo_indptr)[num_decodes:]
            self._prefill.plan(
                qo_indptr - qo_indptr[0],
                indptr[num_decodes:] - first,
                kv_indices[first:],
                last_page_len[num_decodes:],
                self._num_heads,
                self._pool.num_kv_heads,
                self._pool.head_dim,
                self._pool.block_size,
                causal=True,
                q_data_type=self._dtype,
                kv_data_type=self._pool.dtype,
            )

    def run(self, layer: int, query: Tensor, kv: Tensor, *, is_last_only: bool = False) -> Tensor:
        cache = self._pool.layer(layer)
        num_decodes = self._num_decode_rows
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if num_decodes:
            self._decode.run(query[:num_decodes], cache, out=out[:num_decodes])
        if num_decodes < len(query):
            self._prefill.run(query[num_decodes:], cache, out=out[num_decodes:])
        return out.flatten(1)


def decode_wrapper(
    flashinfer: ModuleType,
    pool: DevicePool,
    *,
    num_heads: int,
    workspace: Tensor,
    graph_tables: DeviceBatch | None = None,
) -> Any:  # Any: FlashInfer has no types
    """A decode wrapper; with `graph_tables` for use in a CUDA graph, which reads its tables there."""
    module: Any = flashinfer  # Any: it has no types
    in_graph = {}
    if graph_tables is not None:
        in_graph = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": graph_tables.kv_indptr,
            "paged_kv_indices_buffer": graph_tables.kv_indices,
            "paged_kv_last_page_len_buffer": graph_tables.kv_last_page_len,
        }
    return module.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        kv_layout=_LAYOUT,
        use_tensor_cores=num_heads // pool.num_kv_heads >= _TENSOR_CORE_GROUP,
        **in_graph,
    )


def plan_decode(
    wrapper: Any,  # Any: FlashInfer has no types
    pool: DevicePool,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    *,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    """Plans rows of one token: `kv_indptr` and `kv_last_page_len` on the host, both int32."""
    wrapper.plan(
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        num_heads,
        pool.num_kv_heads,
        pool.head_dim,
        pool.block_size,
        q_data_type=dtype,
        kv_data_type=pool.dtype,
    )
