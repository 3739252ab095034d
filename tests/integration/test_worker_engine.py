"""Workers with real engine processes and a tiny Llama: what is decoded elsewhere is what was local."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bus.memory import MemoryBroker
from moonpool.core.protocol import TokensReady
from support.requests import make_request
from support.tiny_llama import write_tiny_llama
from support.workers import running_worker, worker_config

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_disaggregated_equals_local(tmp_path: Path, model: Path, transport: str) -> None:
    broker = MemoryBroker()
    prompts = [range(3, 3 + n) for n in (1, 15, 16, 17, 200)]
    requests = [
        make_request(f"r{n}", prompt=prompt, max_tokens=20, arrival=float(n), ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    prefill_config = worker_config(tmp_path, model, "prefill-0", "prefill")
    decode_config = worker_config(
        tmp_path, model, "decode-0", "decode", transports=(transport,), is_transport_strict=True
    )
    async with (
        running_worker(prefill_config, broker) as prefill,
        running_worker(decode_config, broker) as decode,
        prefill.router() as to_prefill,
        decode.router() as to_decode,
    ):
        for request in requests:
            to_prefill.prefill(request)
            to_decode.decode(request, source=to_prefill.source)
        remote = [await to_decode.answer(request) for request in requests]
        for request, tokens in zip(requests, remote, strict=True):
            early = await to_prefill.until(request, TokensReady)
            assert isinstance(early, TokensReady)
            assert list(early.run.token_ids) == tokens[:1]
        # A second attempt without a source is computed by the decode worker alone.
        for request in requests:
            to_decode.decode(request, attempt=2)
        local = [await to_decode.answer(request, attempt=2) for request in requests]
        assert remote == local
        await prefill.until_quiet()
        await decode.until_quiet()
