"""Requests through a real Core and a real runner, without processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moonpool.core.config import CoreConfig
from moonpool.core.core import Core
from moonpool.core.protocol import Decode, HandedBack, Refused, TokensReady
from moonpool.core.step import Runner
from moonpool.engine.runner import ModelRunner, load_runner
from moonpool.hub.model_dir import ModelDir, open_model_dir
from moonpool.ids import AttemptId, RequestId
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import NamespaceSeed
from moonpool.kv.layout import KvDtype, KvLayout
from moonpool.native import Kernels, kernels

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


class NoMark:
    """A LayerMark that only counts, and checks the order."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)


def open_tiny(path: Path) -> ModelDir:
    """The model directory of a tiny Llama; its hashes are kept beside it."""
    return open_model_dir(path, name=path.name, data_dir=path.parent / "home")


def make_runner(
    model_dir: ModelDir,
    *,
    dtype: KvDtype = "float32",
    num_blocks: int = 256,
    max_num_seqs: int = 16,
    layout: KvLayout | None = None,
    buffer: bytearray | None = None,
    form: Kernels | None = None,
) -> ModelRunner:
    """A runner over `buffer` or a pool of its own, with the kernels of this machine or `form`."""
    layout = layout or model_dir.config.kv_layout(num_blocks, dtype)
    return load_runner(
        model_dir,
        bytearray(layout.pool_bytes) if buffer is None else buffer,
        layout,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        kernels=form or kernels(),
    )


def make_core(num_blocks: int, **limits: int) -> Core:
    """A core, by default checked after every move, with a namespace for each tenant."""
    config = CoreConfig(num_blocks=num_blocks, **{"is_checked": True, **limits})
    return Core(config, lambda request: NamespaceSeed(request.tenant.encode().ljust(32, b"\0")))


def make_requests(
    prompts: Iterable[Sequence[int]],
    sampling: SamplingParams = GREEDY,
    first: int = 0,
    tenant: str = "default",
) -> list[InferenceRequest]:
    return [
        InferenceRequest(
            request_id=RequestId(f"r{number}"),
            model="test",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_unix_s=float(number),
            tenant=tenant,
        )
        for number, prompt in enumerate(prompts, start=first)
    ]


def generate(core: Core, runner: Runner, requests: Sequence[InferenceRequest]) -> list[list[int]]:
    """Decodes all requests at once (as far as the core admits them); tokens in request order.

    A refused request is offered again at the next step, as a router would.
    """
    waiting = list(requests)
    answers: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    attempts = dict.fromkeys(answers, 0)
    num_open = len(waiting)
    now = 0.0
    while num_open:
        offered, waiting = waiting, []
        for request in offered:
            attempts[request.request_id] += 1
            attempt = attempts[request.request_id]
            core.handle(Decode(request=request, attempt=attempt, has_source=False), now)
        plan = core.schedule(now)
        if plan is not None:
            core.update(runner.run(plan, NoMark()), now)
        by_id = {request.request_id: request for request in requests}
        for reply in core.take_frame().replies:
            if isinstance(reply, Refused):
                waiting.append(by_id[reply.attempt_id.request_id])
            elif isinstance(reply, TokensReady):
                answers[reply.attempt_id.request_id] += reply.run.token_ids
                num_open -= reply.run.finish_reason is not None
            assert not isinstance(reply, HandedBack), reply
        now += 0.01
    assert core.ledger().is_quiet, core.ledger()
    return [answers[request.request_id] for request in requests]


def attempt_id(request: InferenceRequest, attempt: int = 1) -> AttemptId:
    return AttemptId(request.request_id, attempt)
