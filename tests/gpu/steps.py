"""G3, G6, G7: whole steps of a model with Llama-3-8B's shape and random weights."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from lab import Lab
from random_engine import BLOCK, RandomEngine, fill, num_matmul_parameters, pool_layout

from moonpool.core.step import StepRow
from moonpool.engine.device.model import DeviceModel


def whole_steps(lab: Lab, model: DeviceModel) -> None:
    """G3: a prompt against the product's rate, a decode step against reading weights and KV once."""
    scale, config = lab.scale, model.config
    tokens, batch, context = scale.prompt_tokens, scale.decode_batch, scale.decode_context
    num_blocks = max(batch * -(-context // BLOCK), -(-tokens // BLOCK))
    parameters = num_matmul_parameters(config)

    def step_s(rows_of: Callable[[RandomEngine], list[StepRow]], *graph_sizes: int) -> float:
        engine = RandomEngine(lab, model, num_blocks, graph_batch_sizes=graph_sizes)
        fill(engine.pool)
        rows = rows_of(engine)
        return lab.wall_s(lambda: engine.run(rows))

    seconds = step_s(lambda engine: [engine.prefill(tokens)])
    lab.release()
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2
    rate = (2 * parameters * tokens + attention) / seconds
    lab.add(
        "G3",
        f"prefill of {tokens:,} tokens: {seconds * 1e3:.3g} ms",
        rate / 1e12,
        "TFLOP/s",
        share=rate / lab.flop_rate,
        target=".45, aim .60",
    )
    weights = 2 * (parameters + config.vocab_size * config.hidden_size)
    kv = batch * context * pool_layout(config, 1).bytes_per_token
    floor_s = (weights + kv) / lab.copy_rate
    arms = [("kernel by kernel", step_s(lambda engine: engine.decodes(batch, context)))]
    lab.release()
    if lab.flashinfer is not None:
        arms.append(("as one graph", step_s(lambda engine: engine.decodes(batch, context), batch)))
        lab.release()
    for how, seconds in arms:
        lab.add(
            "G3",
            f"decode step, {batch} rows of {context:,}, {how}: {seconds / floor_s:.2f} x its floor",
            seconds * 1e3,
            "ms",
            share=floor_s / seconds,
            target="1.35 x, aim 1.15 x",
        )


def burst_into_decodes(lab: Lab, model: DeviceModel) -> None:
    """G6: what a prompt does to the gaps of a running batch, by how it is let in."""
    scale = lab.scale
    batch, context, tokens = scale.burst_batch, scale.burst_context, scale.prompt_tokens
    decode_blocks = batch * -(-context // BLOCK)
    prompt_blocks = -(-tokens // BLOCK)
    engine = RandomEngine(lab, model, decode_blocks + prompt_blocks, graph_batch_sizes=(batch,))
    fill(engine.pool)
    decodes = engine.decodes(batch, context)
    idle_s = lab.wall_s(lambda: engine.run(decodes), num_rounds=20 if lab.is_gpu else 3)
    lab.add(
        "G6", f"decode step, {batch} rows of {context:,}, nothing beside it", idle_s * 1e3, "ms"
    )

    def mixed(start: int, length: int) -> float:
        rows = [*decodes, engine.prefill(length, start=start, first_block=decode_blocks)]
        return lab.wall_s(lambda: engine.run(rows), num_rounds=1)

    whole_s = mixed(0, tokens)
    lab.add(
        "G6",
        f"gap with the prompt of {tokens:,} in one chunk: {whole_s / idle_s:.1f} x",
        whole_s * 1e3,
        "ms",
        target="26 x elsewhere",
    )
    gaps = [mixed(start, scale.chunk_tokens) for start in range(0, tokens, scale.chunk_tokens)]
    lab.add(
        "G6",
        f"longest gap with chunks of {scale.chunk_tokens}: {max(gaps) / idle_s:.1f} x",
        max(gaps) * 1e3,
        "ms",
        target="3.7 x elsewhere",
    )
    gaps, prompt_s = _beside(lab, model, lambda: engine.run(decodes), tokens)
    lab.add(
        "G6",
        f"longest gap, the prompt on a stream of its own: {max(gaps) / idle_s:.1f} x",
        max(gaps) * 1e3,
        "ms",
        target="at most 3 x",
    )
    lab.add("G6", "median gap then", statistics.median(gaps) * 1e3, "ms")
    lab.add("G6", f"the prompt of {tokens:,} then", prompt_s * 1e3, "ms")


def _beside(
    lab: Lab, model: DeviceModel, decode: Callable[[], object], tokens: int
) -> tuple[list[float], float]:
    """Gaps of `decode` while another thread prefills on another stream, and that prefill's seconds."""
    stream = torch.cuda.Stream(lab.device) if lab.is_gpu else None

    def elsewhere() -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    took: list[float] = []
    with elsewhere():
        other = RandomEngine(lab, model, -(-tokens // BLOCK))
        rows = [other.prefill(tokens)]
        other.run(rows)

    def prefill() -> None:
        with elsewhere():
            started = time.perf_counter()
            other.run(rows)
            took.append(time.perf_counter() - started)

    thread = threading.Thread(target=prefill)
    gaps = []
    thread.start()
    while thread.is_alive() or not gaps:
        started = time.perf_counter()
        decode()
        gaps.append(time.perf_counter() - started)
    thread.join()
    return gaps, took[0]


def found_prefixes(lab: Lab, model: DeviceModel) -> None:
    """G7: a first token after a long prefix that is on the device, in host memory, or nowhere."""
    scale = lab.scale
    prefix, question = scale.prefix_tokens, scale.question_tokens
    num_blocks = -(-(prefix + question) // BLOCK)
    engine = RandomEngine(lab, model, num_blocks)
    held = np.arange(prefix // BLOCK, dtype=np.int32)
    whole = [engine.prefill(prefix + question)]
    rest = [engine.prefill(question, start=prefix)]
    cold_s = lab.wall_s(lambda: engine.run(whole, leaving=held))
    device_s = lab.wall_s(lambda: engine.run(rest))
    host_s = lab.wall_s(lambda: engine.run(rest, arriving=held))
    lab.add("G7", f"first token of {prefix:,} + {question}, computed", cold_s * 1e3, "ms")
    lab.add(
        "G7",
        f"prefix on the device: {cold_s / device_s:.1f} x sooner",
        device_s * 1e3,
        "ms",
        target="25 x, aim 40 x",
    )
    lab.add(
        "G7",
        f"prefix in host memory: {cold_s / host_s:.1f} x sooner",
        host_s * 1e3,
        "ms",
        target="8 x, aim 11 x",
    )
