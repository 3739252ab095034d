"""Correctness on a GPU, then G0 to G9. Called by run.sh, which says what it needs.

`--self-check` runs all of it on the CPU at sizes that take seconds: the script itself is what is
checked, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import copies
import correctness
import flashinfer_signatures
import kernels
import peers
import steps
from lab import HEADER, ONE_GPU, SELF_CHECK, Lab, write_json
from random_engine import BLOCK, random_model, row

from moonpool.engine.device.flashinfer import find_flashinfer
from moonpool.engine.device.model import DeviceModel
from moonpool.kv.layout import KvDtype

#: The whole run; what has not begun by then is left out, and said to be.
_BUDGET_S = 450.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--self-check", action="store_true", help="on the CPU, sizes of no meaning")
    parser.add_argument("--no-flashinfer", action="store_true", help="torch's kernels instead")
    parser.add_argument("--only", default="", help="benchmarks to run, like G1,G3; C: correctness")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    if not args.self_check and not torch.cuda.is_available():
        print("There is no GPU here; --self-check runs everything on the CPU.")
        return 2
    torch.set_num_threads(1 if args.self_check else 4)
    lab = Lab(
        device=torch.device("cpu" if args.self_check else "cuda:0"),
        scale=SELF_CHECK if args.self_check else ONE_GPU,
        flashinfer=_flashinfer(args),
        deadline_s=time.monotonic() + _BUDGET_S,
    )
    print(_where(lab), flush=True)
    problems = []
    if lab.flashinfer is not None and lab.is_gpu:
        problems += flashinfer_signatures.differences(lab.flashinfer)
        try:
            _compile(lab)
        except (RuntimeError, OSError) as error:
            problems.append(f"FlashInfer's kernels cannot be used: {error}")
            print(f"{problems[-1]}\nGoing on with torch's.", flush=True)
            lab.flashinfer = None
    asked = {name for name in args.only.split(",") if name}
    if not asked or "C" in asked:
        problems += correctness.check(lab)
        problems += peers.check(lab)
    print(HEADER, flush=True)
    for names, work in _benchmarks(lab):
        if asked and not asked & {*names, "G0"} and "G0" not in names:
            continue
        if not lab.has_time:
            problems.append(f"no time was left for {', '.join(names)}")
            continue
        work()
        lab.release()
    if args.json is not None:
        write_json(args.json, lab, problems)
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def _flashinfer(args: argparse.Namespace) -> ModuleType | None:
    if args.no_flashinfer:
        return None
    if args.self_check:
        from support.flashinfer_stand_in import make_flashinfer

        return make_flashinfer()
    return find_flashinfer()


def _where(lab: Lab) -> str:
    if not lab.is_gpu:
        return "Self-check on the CPU, with a stand-in for FlashInfer: figures mean nothing."
    module = lab.flashinfer
    kernels = "FlashInfer is missing: torch's kernels"
    if module is not None:
        kernels = f"FlashInfer {getattr(module, '__version__', '?')}"
    return f"{torch.cuda.get_device_name(lab.device)}, torch {torch.__version__}, {kernels}"


def _benchmarks(lab: Lab) -> list[tuple[tuple[str, ...], Callable[[], None]]]:
    models: list[DeviceModel] = []

    def model() -> DeviceModel:
        if not models:
            models.append(random_model(lab.scale.model, lab.device, 16_384))
        return models[0]

    return [
        (("G0",), lambda: kernels.ceilings(lab)),
        (("G1",), lambda: kernels.decode_attention(lab)),
        (("G2",), lambda: kernels.prefill_attention(lab)),
        (("G3",), lambda: steps.whole_steps(lab, model())),
        (("G4",), lambda: copies.host_copies(lab)),
        (("G5",), lambda: copies.offload_during_prefill(lab, model())),
        (("G6",), lambda: steps.burst_into_decodes(lab, model())),
        (("G7",), lambda: steps.found_prefixes(lab, model())),
        (("G8",), lambda: copies.between_pools(lab)),
        (("G9",), lambda: peers.between_processes(lab)),
    ]


def _compile(lab: Lab) -> None:
    """Every kernel once, from as many threads: what has to be compiled is compiled side by side."""
    started = time.monotonic()
    one = kernels.Attention(lab, 8)
    rows = torch.randn(4, 4_096, device=lab.device, dtype=torch.bfloat16)
    weight = torch.ones(4_096, device=lab.device, dtype=torch.bfloat16)
    table = torch.randn(64, lab.scale.head_dim, device=lab.device)
    shares = torch.rand(4, 1_000, device=lab.device).softmax(-1)
    positions = torch.zeros(4, dtype=torch.int32, device=lab.device)
    heads = one.query(4)

    def attention(length: int, kv_dtype: KvDtype) -> None:
        own = kernels.Attention(lab, 8, kv_dtype)
        step = own.batch([row(0, 0, np.zeros(length, np.int32), np.arange(-(-length // BLOCK)))])
        sent, query = own.upload.send(step), own.query(length)
        key = query[:, : lab.scale.num_kv_heads]
        own.kernels.append(own.pool, 0, key, key, sent)
        own.backend.plan(step.pages)
        own.backend.run(0, query, torch.empty(0))

    def sampling() -> None:
        ones = torch.ones(4, dtype=torch.int32, device=lab.device)
        one.kernels.keep_likeliest(shares, ones * 5, ones * 0.9)

    work: list[Callable[[], object]] = [
        lambda: one.kernels.rms_norm(rows, weight, 1e-5),
        lambda: one.kernels.silu_mul(rows),
        lambda: one.kernels.rotate_(positions, heads, heads, table),
        sampling,
        lambda: attention(1, "bfloat16"),
        lambda: attention(20, "bfloat16"),
        lambda: attention(20, "float8_e4m3"),
    ]
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(one_kernel) for one_kernel in work]:
            done.result()
    lab.wait()
    print(f"FlashInfer's kernels were ready after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
