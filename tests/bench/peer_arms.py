"""One engine of bench_peers.py as a process of its own: `peer_arms.py ARM SETTINGS`.

A line of JSON in, a line out, on one core. An engine runs from its own interpreter, so nothing of Moonpool
is imported but by its own arm. Times are of whole steps as the engine takes them: what it schedules,
the model, greedy tokens.

    {"do": "prefill", "prompt": [...]}                                 -> seconds: [one], token
    {"do": "decode", "batch": 8, "context": 512, "steps": 8, "seed": 1} -> seconds: [one for each step]
    {"do": "floor"}                                                    -> rates of this core, by torch

moonpool   the core and the runner, with layer marks and leaf digests; decodes begin as requests whose KV
           has arrived from another worker
llama.cpp  llama_decode, through llama-cpp-python; a decode's context is computed for one row, and copied
           to the others
vllm       LLMEngine.step, in this process; a decode's context is computed, or found in its prefix cache
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Settings = dict[str, Any]
#: What steps are timed by.
Seconds = Callable[[], float]


class Arm(Protocol):
    """An engine with its model."""

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds of a new prompt's only step or steps, and the token drawn."""
        ...

    def decode(self, batch: int, context: int, num_steps: int, seed: int) -> list[float]:
        """Seconds of each of `num_steps` steps of `batch` requests, around `context` tokens."""
        ...


def clock_of(settings: Settings) -> Seconds:
    """The wall clock; on a busy machine the time that this process had a core."""
    return time.process_time if settings["is_cpu_time"] else time.perf_counter


def random_tokens(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.integers(3, vocab_size, num_tokens).tolist()


class MoonpoolArm:
    """As engine_main puts it together, but for the processes around it."""

    BLOCK = 16

    def __init__(self, settings: Settings) -> None:
        from pathlib import Path

        import numpy as np
        import torch

        from moonpool.core.config import CoreConfig
        from moonpool.core.core import Core
        from moonpool.engine.runner import load_runner
        from moonpool.failpoints import Failpoints
        from moonpool.hub.model_dir import open_model_dir
        from moonpool.kv.block_hash import NamespaceSeed
        from moonpool.memory.heap import keep_freed_memory
        from moonpool.memory.worker_memory import WorkerMemory
        from moonpool.native import kernels
        from moonpool.worker.layer_mark import LayerMarker

        keep_freed_memory()
        directory = open_model_dir(
            Path(settings["model"]), name="bench", data_dir=Path(settings["scratch"])
        )
        self._vocab_size = directory.config.vocab_size
        num_blocks = settings["num_kv_tokens"] // self.BLOCK + 256
        layout = directory.config.kv_layout(num_blocks, "bfloat16")
        memory = WorkerMemory.create(layout)
        # What keys and values say costs no time, as long as they are numbers.
        numbers = torch.randn(1 << 16).bfloat16().view(torch.int16).numpy().view(np.uint8)
        pool = memory.pool.bytes
        for first in range(0, pool.size, numbers.size):
            part = pool[first : first + numbers.size]
            part[:] = numbers[: part.size]
        self._runner = load_runner(
            directory,
            pool.data,
            layout,
            dtype="bfloat16",
            max_num_seqs=64,
            kernels=kernels(),
        )
        self._mark = LayerMarker(
            memory=memory,
            kernels=kernels(),
            layer_group=4,
            failpoints=Failpoints.parse("", is_allowed=True),
        )
        config = CoreConfig(
            num_blocks=num_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=settings["max_tokens"],
            max_model_len=settings["max_tokens"],
        )
        self._core = Core(config, lambda request: NamespaceSeed(bytes(32)))
        self._seconds = clock_of(settings)
        self._num_requests = 0

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        from moonpool.core.protocol import Decode, TokensReady

        command = Decode(request=self._request(prompt, 1), attempt=1, has_source=False)
        started = self._seconds()
        self._core.handle(command, started)
        assert self._step() == len(prompt)
        replies = self._core.take_frame().replies
        seconds = self._seconds() - started
        (token,) = (reply.run.token_ids[0] for reply in replies if isinstance(reply, TokensReady))
        return seconds, token

    def decode(self, batch: int, context: int, num_steps: int, seed: int) -> list[float]:
        from moonpool.core.protocol import Abort, Arrived, Decode

        num_known = context - num_steps // 2
        requests = [
            self._request(
                random_tokens(num_known, self._vocab_size, seed * 1_000 + row), num_steps + 8
            )
            for row in range(batch)
        ]
        commands = [Decode(request=one, attempt=1, has_source=True) for one in requests]
        for command in commands:
            self._core.handle(command, 0.0)
            self._core.handle(
                Arrived(attempt_id=command.attempt_id, num_tokens=num_known, first_token=100), 0.0
            )
        self._core.take_frame()
        all_seconds = []
        for step in range(num_steps + 1):
            started = self._seconds()
            assert self._step() == batch
            self._core.take_frame()
            if step:
                all_seconds.append(self._seconds() - started)
        for command in commands:
            self._core.handle(Abort(attempt_id=command.attempt_id), 0.0)
        self._core.take_frame()
        return all_seconds

    def _step(self) -> int:
        """Tokens computed."""
        now = time.monotonic()
        plan = self._core.schedule(now)
        assert plan is not None
        self._mark.begin(plan)
        result = self._runner.run(plan, self._mark)
        self._mark.end()
        self._core.update(result, now)
        return plan.num_tokens

    def _request(self, prompt: list[int], max_tokens: int) -> Any:
        from moonpool.ids import RequestId
        from moonpool.inference.request import InferenceRequest
        from moonpool.inference.sampling import SamplingParams

        self._num_requests += 1
        return InferenceRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            model="bench",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            arrival_unix_s=float(self._num_requests),
        )


class LlamaArm:
    """llama.cpp: a context for each shape, one thread."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        load = getattr(llama_cpp, "llama_model_load_from_file", None)
        self._model = load(settings["gguf"].encode(), params)
        assert self._model, "llama.cpp does not take the file"
        self._vocab_size = settings["vocab_size"]
        self._seconds = clock_of(settings)

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        with _LlamaContext(self._api, self._model, num_seqs=1, num_tokens=len(prompt)) as context:
            started = self._seconds()
            context.decode([(token, at, 0) for at, token in enumerate(prompt)], is_last_only=True)
            token = context.best(len(prompt) - 1, self._vocab_size)
            return self._seconds() - started, token

    def decode(self, batch: int, context: int, num_steps: int, seed: int) -> list[float]:
        num_known = context - num_steps // 2
        size = num_known + num_steps + 8
        prompt = random_tokens(num_known, self._vocab_size, seed)
        with _LlamaContext(self._api, self._model, num_seqs=batch, num_tokens=size) as many:
            many.decode([(token, at, 0) for at, token in enumerate(prompt)], is_last_only=True)
            state = many.state(0)
            for row in range(1, batch):
                many.restore(state, row)
            tokens = random_tokens(batch, self._vocab_size, seed)
            all_seconds = []
            for step in range(num_steps + 1):
                started = self._seconds()
                many.decode([(tokens[row], num_known + step, row) for row in range(batch)])
                tokens = [many.best(row, self._vocab_size) for row in range(batch)]
                if step:
                    all_seconds.append(self._seconds() - started)
            return all_seconds


class _LlamaContext:
    """A llama_context with room for `num_seqs` sequences of `num_tokens` each."""

    def __init__(self, api: Any, model: Any, *, num_seqs: int, num_tokens: int) -> None:
        params = api.llama_context_default_params()
        # A sequence's cells come in multiples of 256.
        params.n_ctx = num_seqs * -(-num_tokens // 256) * 256
        params.n_batch = max(num_tokens, 2_048)
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = 1
        self._api = api
        self._context = api.llama_init_from_model(model, params)
        assert self._context, "no context"
        self._batch = api.llama_batch_init(max(num_tokens, num_seqs), 0, 1)

    def __enter__(self) -> _LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)

    def decode(self, entries: list[tuple[int, int, int]], *, is_last_only: bool = False) -> None:
        """Compute (token, position, sequence); logits of all, or of the last."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = not is_last_only or i == len(entries) - 1
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, status
        self._api.llama_synchronize(self._context)

    def best(self, row: int, vocab_size: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

    def state(self, sequence: int) -> Any:
        import ctypes

        size = self._api.llama_state_seq_get_size(self._context, sequence)
        state = (ctypes.c_uint8 * size)()
        assert self._api.llama_state_seq_get_data(self._context, state, size, sequence) == size
        return state

    def restore(self, state: Any, sequence: int) -> None:
        size = len(state)
        assert self._api.llama_state_seq_set_data(self._context, state, size, sequence) == size


class VllmArm:
    """vLLM's CPU backend: its engine in this process."""

    def __init__(self, settings: Settings) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": str(settings["core"]),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self._vocab_size = settings["vocab_size"]
        llm: Any = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_tokens"],
            max_num_batched_tokens=settings["max_tokens"],
            max_num_seqs=64,
            skip_tokenizer_init=True,
        )
        self._seconds = clock_of(settings)
        self._engine = llm.llm_engine
        self._num_requests = 0

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        started = self._seconds()
        self._add(prompt, 1)
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step() or outputs
        seconds = self._seconds() - started
        return seconds, int(outputs[0].outputs[0].token_ids[0])

    def decode(self, batch: int, context: int, num_steps: int, seed: int) -> list[float]:
        del seed  # the same prompts each time: their blocks are in its prefix cache
        num_known = context - num_steps // 2
        names = [
            self._add(random_tokens(num_known, self._vocab_size, row), 4 * num_steps + 64)
            for row in range(batch)
        ]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}
        all_seconds = []
        for _ in range(num_steps):
            started = self._seconds()
            assert len(self._engine.step()) == batch
            all_seconds.append(self._seconds() - started)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return all_seconds

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        sampling = self._sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


def measure_floor(seconds: Seconds) -> dict[str, float]:
    """GFLOP/s of a large product and GB/s of reading, on this one thread."""
    import torch

    rates: dict[str, float] = {}
    for name, dtype, size in (
        ("gemm float32", torch.float32, 1024),
        ("gemm bfloat16", torch.bfloat16, 512),
    ):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        taken = best_of(seconds, 3, lambda a=a, b=b: a @ b)
        rates[f"{name} GFLOP/s"] = 2 * size**3 / taken / 1e9
    memory = torch.ones(64 << 20)
    rates["read GB/s"] = memory.numel() * 4 / best_of(seconds, 3, memory.amax) / 1e9
    return rates


def best_of(seconds: Seconds, num_tries: int, work: Callable[[], object]) -> float:
    taken = []
    for _ in range(num_tries):
        started = seconds()
        work()
        taken.append(seconds() - started)
    return min(taken)


ARMS: dict[str, Callable[[Settings], Arm]] = {
    "moonpool": MoonpoolArm,
    "llama.cpp": LlamaArm,
    "vllm": VllmArm,
}


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("torch", "vllm", "vllm-cpu", "llama-cpp-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    # Engines print what they like; answers leave by a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {settings["core"]})

    def answer(what: dict[str, object]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if name == "moonpool":
        import torch

        torch.set_num_threads(1)
    arm = ARMS[name](settings)
    gc.collect()
    gc.freeze()
    answer({"ready": versions()})
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "prefill":
                seconds, token = arm.prefill(order["prompt"])
                answer({"seconds": [seconds], "token": token})
            case "decode":
                answer(
                    {
                        "seconds": arm.decode(
                            order["batch"], order["context"], order["steps"], order["seed"]
                        )
                    }
                )
            case "floor":
                answer({"rates": measure_floor(clock_of(settings))})


if __name__ == "__main__":
    main()
