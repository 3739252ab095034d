"""Products with few rows: `python tests/bench/bench_linear.py [--rows 1 8 512] [--layers 30]`.

All weights of a SmolLM2-135M once, as a step reads them (random values, nothing left in the cache), by
each way that engine/linear.py knows: the native kernel on bfloat16, float32 and int8 weights, oneDNN's packed
product in float32, and torch's plain product along the longer side; where the CPU multiplies bfloat16, the native
product of rounded rows and oneDNN's of rows in bfloat16. Arms alternate in one run;
each reports its best round, in CPU seconds of the one thread, and the ratio to the best of torch's in float32.
Beside one row: how long this core takes to only read the same bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moonpool import native
from moonpool.engine.linear import round_to_int8
from moonpool.native import PackedLinear

HIDDEN, MIDDLE, QKV, VOCAB = 576, 1536, 960, 49_152
LAYER = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE))

Product = Callable[[Tensor], object]


def onednn(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def onednn_bfloat16(weight: Tensor) -> Product:
    """Of rows that are of bfloat16 already, as the step has them there."""
    product = onednn(weight.bfloat16())
    rounded: dict[int, Tensor] = {}
    return lambda x: product(rounded.setdefault(len(x), x.bfloat16()))


def plain(weight: Tensor) -> Product:
    num_out, num_in = weight.shape
    kept = weight.t().contiguous().t() if num_out > num_in else weight.clone()
    return lambda x: functional.linear(x, kept)


def packed(
    weight: np.ndarray, scale: np.ndarray | None = None, *, is_rounding: bool = False
) -> Product:
    linear = native.kernels().pack_linear(weight, None, scale, is_rounding=is_rounding)
    if linear is None:
        raise SystemExit(native.status().message)
    return lambda x: multiply(linear, x)


def multiply(linear: PackedLinear, x: Tensor) -> None:
    out = torch.empty(len(x), linear.num_out)
    linear.multiply(x.data_ptr(), len(x), out.data_ptr())


def bits_of(weight: Tensor) -> np.ndarray:
    return weight.bfloat16().view(torch.int16).numpy().view(np.uint16)


def native_bfloat16(weight: Tensor) -> Product:
    return packed(bits_of(weight))


def native_rounding(weight: Tensor) -> Product:
    return packed(bits_of(weight), is_rounding=True)


def native_float32(weight: Tensor) -> Product:
    return packed(weight.numpy())


def native_int8(weight: Tensor) -> Product:
    rounded, scale = round_to_int8(weight)
    return packed(rounded.numpy(), scale.numpy())


ARMS: dict[str, Callable[[Tensor], Product]] = {
    "native int8": native_int8,
    "native bfloat16": native_bfloat16,
    "native float32": native_float32,
    "oneDNN float32": onednn,
    "torch float32": plain,
}
if native.kernels().has_bfloat16_products:
    ARMS |= {"native rounding": native_rounding, "oneDNN bfloat16": onednn_bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)

    shapes = LAYER * args.layers + ((VOCAB, HIDDEN),)
    weights = [torch.randn(shape) * 0.05 for shape in shapes]
    inputs = {size: torch.randn(max(args.rows), size) for size in (HIDDEN, MIDDLE)}
    products = {name: [make(weight) for weight in weights] for name, make in ARMS.items()}
    num_weights = sum(weight.numel() for weight in weights)
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        keep_best(best, "read 2 bytes each", read_s(num_weights * 2))
        keep_best(best, "read 4 bytes each", read_s(num_weights * 4))
        for rows in args.rows:
            for name, arm in products.items():
                keep_best(best, f"{rows} {name}", pass_s(arm, weights, inputs, rows))
    report(args.rows, best, num_weights)


@torch.inference_mode()
def pass_s(
    arm: list[Product], weights: list[Tensor], inputs: dict[int, Tensor], rows: int
) -> float:
    """CPU seconds of every weight once; logits are of one row where a prompt is long."""
    started = time.thread_time()
    for product, weight in zip(arm, weights, strict=True):
        few = rows if rows <= 64 or len(weight) != VOCAB else 1
        product(inputs[weight.shape[1]][:few])
    return time.thread_time() - started


def read_s(num_bytes: int) -> float:
    memory = torch.ones(num_bytes // 4)
    started = time.thread_time()
    memory.amax()
    return time.thread_time() - started


def keep_best(best: dict[str, float], name: str, seconds: float) -> None:
    best[name] = min(seconds, best.get(name, seconds))


def report(rows_tried: list[int], best: dict[str, float], num_weights: int) -> None:
    for size in (2, 4):
        seconds = best[f"read {size} bytes each"]
        rate = num_weights * size / seconds / 1e9
        print(f"reading {size} bytes a weight: {seconds * 1e3:.1f} ms, {rate:.1f} GB/s")
    ratios = {}
    for rows in rows_tried:
        torch_s = min(best[f"{rows} oneDNN float32"], best[f"{rows} torch float32"])
        line = f"{rows:4} rows "
        for name in ARMS:
            seconds = best[f"{rows} {name}"]
            ratios[f"{rows} {name}"] = torch_s / seconds
            line += f"  {name} {seconds * 1e3:8.1f} ms ({torch_s / seconds:.2f})"
        print(line)
    details = {
        "cpu": platform.processor() or platform.machine(),
        "native": native.status().message,
        "torch": torch.__version__.split("+")[0],
        "num_weights": num_weights,
        "best_cpu_s": best,
        "ratio_to_the_best_of_torch": ratios,
    }
    print(json.dumps(details, indent=2))


if __name__ == "__main__":
    main()
