"""G4, G5, G8: KV between the device and host memory, during a prefill too, and between pools."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from lab import Lab
from random_engine import BLOCK, NO_BLOCKS, NoMark, RandomEngine, fill, pool_layout

from moonpool.engine.device.model import DeviceModel
from moonpool.engine.device.pool import DevicePool
from moonpool.engine.device.staging import HostStaging

_LARGE_BYTES = 2 << 20


@torch.inference_mode()
def host_copies(lab: Lab) -> None:
    """G4: pinned memory and back. Large pieces; one layer of many blocks, gathered first; both ways."""
    num_blocks = lab.scale.num_copied_blocks
    pool = DevicePool(pool_layout(lab.scale.model, num_blocks), lab.device)
    fill(pool)
    order = np.random.default_rng(1).permutation(num_blocks)
    block_ids = torch.from_numpy(order).to(lab.device)
    sample = pool.gather(0, block_ids)
    layer_bytes = sample.numel() * sample.itemsize
    on_device = torch.zeros(64 * _LARGE_BYTES if lab.is_gpu else _LARGE_BYTES, dtype=torch.uint8)
    pinned = torch.empty_like(on_device, pin_memory=lab.is_gpu)
    on_device = on_device.to(lab.device)
    staged = torch.empty_like(sample, device="cpu", pin_memory=lab.is_gpu)
    other = torch.cuda.Stream(lab.device) if lab.is_gpu else None

    def on_other() -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(other) if other is not None else contextlib.nullcontext()

    def pieces(target: torch.Tensor, source: torch.Tensor) -> None:
        for piece in range(0, len(source), _LARGE_BYTES):
            end = piece + _LARGE_BYTES
            target[piece:end].copy_(source[piece:end], non_blocking=True)

    def fragments_out() -> None:
        for layer in range(pool.num_layers):
            staged.copy_(pool.gather(layer, block_ids), non_blocking=True)

    def fragments_in() -> None:
        for layer in range(pool.num_layers):
            pool.scatter(layer, block_ids, staged.to(lab.device, non_blocking=True))

    def both() -> None:
        with on_other():
            pieces(second, first)
        pieces(pinned, on_device)

    first, second = pinned.clone(), on_device.clone()
    if lab.is_gpu:
        first = first.pin_memory()
    large_out = len(pinned) / lab.wall_s(lambda: pieces(pinned, on_device))
    large_in = len(pinned) / lab.wall_s(lambda: pieces(on_device, pinned))
    lab.add("G4", "device to host, pieces of 2 MiB", large_out / 1e9, "GB/s", target="45, aim 52")
    lab.add("G4", "host to device, pieces of 2 MiB", large_in / 1e9, "GB/s", target="45, aim 52")
    rate = 2 * len(pinned) / lab.wall_s(both)
    lab.add("G4", "both at once, summed", rate / 1e9, "GB/s", target="70, aim 83")
    small = layer_bytes // num_blocks
    moved = layer_bytes * pool.num_layers
    for what, work, large in (
        ("device to host", fragments_out, large_out),
        ("host to device", fragments_in, large_in),
    ):
        rate = moved / lab.wall_s(work)
        lab.add(
            "G4",
            f"{what}, layers of {num_blocks} blocks, {small / 1024:.0f} KiB each",
            rate / 1e9,
            "GB/s",
            share=rate / large,
            target="aim .80 of large pieces",
        )


def offload_during_prefill(lab: Lab, model: DeviceModel) -> None:
    """G5: a prefill whose blocks leave layer by layer, against one whose blocks stay."""
    tokens = lab.scale.prompt_tokens
    num_blocks = -(-tokens // BLOCK)
    engine = RandomEngine(lab, model, num_blocks)
    rows = [engine.prefill(tokens)]
    leaving = np.arange(num_blocks, dtype=np.int32)
    alone_s = lab.wall_s(lambda: engine.run(rows))
    with_s = lab.wall_s(lambda: engine.run(rows, leaving=leaving))
    staging = HostStaging(engine.pool, engine.host, engine.streams)

    def only_copies() -> None:
        with torch.inference_mode():
            staging.begin(NO_BLOCKS, leaving, NoMark())
            for layer in range(engine.pool.num_layers):
                staging.after_layer(layer)
            staging.finish()

    copy_s = lab.wall_s(only_copies)
    layers = engine.pool.num_layers
    lab.add("G5", f"prefill of {tokens:,} tokens, blocks stay", alone_s * 1e3, "ms")
    lab.add("G5", "the same, blocks leave", with_s * 1e3, "ms")
    lab.add("G5", "slower by", 100 * (with_s / alone_s - 1), "%", target="5, aim 2")
    lab.add("G5", "their copies alone, to host memory", copy_s * 1e3, "ms")
    hidden = 1 - (with_s - alone_s) / copy_s
    lab.add(
        "G5",
        "of the copies hidden",
        hidden,
        "",
        share=hidden / (1 - 1 / layers),
        target=f".93, aim .96; bound {1 - 1 / layers:.3f}",
    )


@torch.inference_mode()
def between_pools(lab: Lab) -> None:
    """G8: blocks of one pool to others of another, all layers, on the device."""
    num_blocks = 8 * lab.scale.num_copied_blocks
    layout = pool_layout(lab.scale.model, num_blocks)
    source, target = DevicePool(layout, lab.device), DevicePool(layout, lab.device)
    fill(source)
    rng = np.random.default_rng(1)
    theirs, ours = (
        torch.from_numpy(rng.permutation(num_blocks)[: num_blocks // 2]).to(lab.device)
        for _ in range(2)
    )

    def move() -> None:
        for layer in range(source.num_layers):
            target.scatter(layer, ours, source.gather(layer, theirs))

    rate = len(ours) * layout.block_bytes / lab.device_s(move, repeat=2)
    lab.add(
        "G8",
        f"gather and scatter, {len(ours)} blocks, payload counted once",
        rate / 1e12,
        "TB/s",
        share=rate / (lab.copy_rate / 2),
        target="1.5, aim 2.0",
    )
