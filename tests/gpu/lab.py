"""What all measurements share: the device, its sizes, clocks, and how a figure is written down."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from moonpool.hub.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large things are. Lengths are in tokens."""

    copy_bytes: int
    matrix_size: int
    #: The shape of heads and blocks in kernels that are measured alone.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: (batch, context) of decode attention.
    decode_cases: tuple[tuple[int, int], ...]
    prefill_tokens: int
    model: ModelConfig
    #: Of a whole step: a prompt, a batch and its context.
    prompt_tokens: int
    chunk_tokens: int
    decode_batch: int
    decode_context: int
    #: The batch that a burst of prefill disturbs, and its context.
    burst_batch: int
    burst_context: int
    prefix_tokens: int
    question_tokens: int
    num_copied_blocks: int
    num_rounds: int


def llama(
    *, layers: int, hidden: int, middle: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelConfig:
    """A model of the family, of this shape."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=middle,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=65_536,
        rope_theta=500_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        is_embedding_tied=False,
        has_attention_bias=False,
        has_mlp_bias=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


#: One H100 or H200, a model of Llama-3-8B's shape.
ONE_GPU = Scale(
    copy_bytes=4_300_000_000,
    matrix_size=8_192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    decode_cases=((32, 4_096), (32, 32_768), (64, 8_192), (128, 4_096)),
    prefill_tokens=8_192,
    model=llama(
        layers=32, hidden=4_096, middle=14_336, heads=32, kv_heads=8, head_dim=128, vocab=128_256
    ),
    prompt_tokens=4_096,
    chunk_tokens=512,
    decode_batch=64,
    decode_context=4_096,
    burst_batch=32,
    burst_context=2_048,
    prefix_tokens=6_144,
    question_tokens=64,
    num_copied_blocks=256,
    num_rounds=7,
)

#: What a CPU does in seconds: whether all of it runs, not how fast.
SELF_CHECK = Scale(
    copy_bytes=1 << 20,
    matrix_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    decode_cases=((3, 70),),
    prefill_tokens=96,
    model=llama(layers=3, hidden=64, middle=96, heads=4, kv_heads=2, head_dim=16, vocab=128),
    prompt_tokens=128,
    chunk_tokens=32,
    decode_batch=4,
    decode_context=64,
    burst_batch=3,
    burst_context=48,
    prefix_tokens=160,
    question_tokens=16,
    num_copied_blocks=5,
    num_rounds=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    #: G0 to G9, as in the list of what is to be shown.
    bench: str
    what: str
    value: float
    unit: str
    #: The value as a share of what this machine was measured to reach at most; None: no such limit.
    share: float | None = None
    #: What was aimed at, in words.
    target: str = ""


@dataclass(slots=True, kw_only=True)
class Lab:
    """One device, for one run."""

    device: torch.device
    scale: Scale
    #: None: FlashInfer is missing, and torch stands in for it.
    flashinfer: ModuleType | None
    deadline_s: float
    figures: list[Figure] = field(default_factory=list)
    #: Measured first: bytes/s, reads and writes both counted, and flops/s.
    copy_rate: float = 0.0
    flop_rate: float = 0.0

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def add(self, bench: str, what: str, value: float, unit: str, **more: object) -> None:
        """Notes a figure, and prints it at once: the run may be cut short."""
        figure = Figure(bench=bench, what=what, value=value, unit=unit, **more)  # type: ignore[arg-type]  # its own fields
        self.figures.append(figure)
        print(row(figure), flush=True)

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def wall_s(self, work: Callable[[], object], *, num_rounds: int | None = None) -> float:
        """Median seconds of `work` and of waiting for what it asked for, after one round unmeasured."""
        work()
        self.wait()
        rounds = []
        for _ in range(num_rounds or self.scale.num_rounds):
            started = time.perf_counter()
            work()
            self.wait()
            rounds.append(time.perf_counter() - started)
        return statistics.median(rounds)

    def device_s(self, work: Callable[[], object], *, repeat: int = 10) -> float:
        """Median seconds that the device takes for `work`, asked for `repeat` times in a row."""
        if not self.is_gpu:
            return self.wall_s(work)
        work()
        rounds = []
        for _ in range(self.scale.num_rounds):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for _ in range(repeat):
                work()
            ended.record()
            ended.synchronize()
            rounds.append(begun.elapsed_time(ended) / 1e3 / repeat)
        return statistics.median(rounds)

    def release(self) -> None:
        """Give back what the last measurement held."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.deadline_s


HEADER = "| # | what | value | unit | of the ceiling | aim |\n|---|---|---:|---|---:|---|"


def row(figure: Figure) -> str:
    share = "" if figure.share is None else f"{figure.share:.2f}"
    return (
        f"| {figure.bench} | {figure.what} | {figure.value:,.3g} | {figure.unit} | {share} "
        f"| {figure.target} |"
    )


def write_json(path: Path, lab: Lab, problems: Sequence[str]) -> None:
    """All figures, with what they were measured on."""
    name = torch.cuda.get_device_name(lab.device) if lab.is_gpu else "CPU, self-check"
    found = {
        "device": name,
        "torch": torch.__version__,
        "flashinfer": getattr(lab.flashinfer, "__version__", None),
        "problems": list(problems),
        "figures": [asdict(figure) for figure in lab.figures],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
