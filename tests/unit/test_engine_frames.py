"""Engine frames: every value survives the way over the wire, and nothing else gets through."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import pytest

from moonpool.core.config import CoreConfig
from moonpool.core.protocol import (
    Abort,
    Accepted,
    Arrived,
    BlockLedger,
    BlocksArrived,
    BlocksFetched,
    ChunkPlanned,
    ClearCache,
    Command,
    CoreFrame,
    Decode,
    Drain,
    FetchEnded,
    FetchReserved,
    HandBackReason,
    HandedBack,
    LockPrefix,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    PrefixLocked,
    ReadEnded,
    Refused,
    RefuseReason,
    Release,
    Reply,
    Reserved,
    Revoked,
    TokensReady,
    UnlockPrefix,
)
from moonpool.ids import AttemptId, BlockHash, BlockId, Incarnation, RequestId, WorkerId, WorkerKey
from moonpool.inference.output import FinishReason, TokenRun
from moonpool.inference.request import InferenceRequest
from moonpool.inference.sampling import SamplingParams
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from moonpool.kv.layout import KvLayout
from moonpool.wire.engine_frames import (
    MAX_FRAME_BYTES,
    FrameBuffer,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)
from moonpool.wire.engine_messages import (
    EngineBoot,
    EngineCommands,
    EngineFailed,
    EngineFrameError,
    EngineMapped,
    EngineReady,
    EngineSteps,
    FromEngine,
    TimedFrame,
)
from moonpool.worker.frame_merging import merge_frames

ATTEMPT = AttemptId(RequestId("request-1"), 3)
HASHES = (BlockHash(bytes(range(32))), BlockHash(b"\xff" * 32))
CACHE_EVENTS: tuple[CacheEvent, ...] = (
    AllBlocksCleared(),
    BlockRemoved(hashes=HASHES),
    BlockStored(hashes=HASHES, parent_hash=None),
    BlockStored(hashes=HASHES[1:], parent_hash=HASHES[0]),
)
LEDGER = BlockLedger(
    num_total=10,
    num_free=1,
    num_cached=2,
    num_referenced=7,
    num_running=1,
    num_waiting=2,
    num_reserved=3,
    num_prefills=4,
    num_quarantined=5,
    num_prefix_locks=6,
)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in ids)


def make_request(*, prompt: tuple[int, ...] = (1, 2, 2**32 - 1)) -> InferenceRequest:
    return InferenceRequest(
        request_id=ATTEMPT.request_id,
        model="tiny",
        prompt_token_ids=prompt,
        emitted_token_ids=(7,),
        sampling=SamplingParams(
            temperature=0.25, top_p=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=(4, 5)
        ),
        arrival_unix_s=12.5,
        tenant="t",
        priority=-2,
        cache_salt="salt",
        adapter="lora",
        traceparent="00-aa-bb-01",
    )


COMMANDS: tuple[Command, ...] = (
    Prefill(request=make_request(), attempt=3),
    Prefill(request=make_request(), attempt=3, num_peer_tokens=32),
    Decode(request=make_request(prompt=()), attempt=4, has_source=True),
    Decode(request=make_request(), attempt=4, has_source=False, num_peer_tokens=16),
    BlocksArrived(attempt_id=ATTEMPT, num_tokens=32),
    Arrived(attempt_id=ATTEMPT, num_tokens=33, first_token=None),
    Arrived(attempt_id=ATTEMPT, num_tokens=33, first_token=0, finish_reason=FinishReason.STOP),
    BlocksFetched(attempt_id=ATTEMPT, num_tokens=16),
    FetchEnded(attempt_id=ATTEMPT, num_tokens=0),
    ReadEnded(attempt_id=ATTEMPT),
    Release(attempt_id=ATTEMPT),
    Abort(attempt_id=ATTEMPT),
    LockPrefix(read_id=2**40, hashes=HASHES, reader=WorkerKey(WorkerId("w"), Incarnation("1"))),
    LockPrefix(read_id=1, hashes=()),
    UnlockPrefix(read_id=2**40),
    Drain(hand_back=True),
    ClearCache(),
)

REPLIES: tuple[Reply, ...] = (
    Accepted(attempt_id=ATTEMPT),
    Refused(attempt_id=ATTEMPT, reason=RefuseReason.NO_SLOTS),
    Reserved(attempt_id=ATTEMPT, num_cached_tokens=16, block_ids=blocks(5, 1, 9)),
    FetchReserved(
        attempt_id=ATTEMPT,
        num_cached_tokens=16,
        num_tokens=32,
        block_ids=blocks(7, 2),
        hashes=HASHES,
    ),
    PrefixLocked(read_id=2**40, block_ids=blocks(7, 2)),
    PrefixLocked(read_id=1, block_ids=()),
    Revoked(attempt_id=ATTEMPT),
    HandedBack(attempt_id=ATTEMPT, reason=HandBackReason.PREEMPTED),
    PrefillStarted(
        attempt_id=ATTEMPT, num_cached_tokens=32, block_ids=blocks(3), num_peer_tokens=16
    ),
    ChunkPlanned(attempt_id=ATTEMPT, start=16, end=40),
    PrefillDone(attempt_id=ATTEMPT, num_cached_tokens=16, first_token=11),
    PrefillDone(attempt_id=ATTEMPT, num_cached_tokens=32, first_token=11, num_peer_tokens=16),
    PrefillFailed(attempt_id=ATTEMPT, reason=HandBackReason.REVOKED),
    PrefillFailed(attempt_id=ATTEMPT, reason=FinishReason.INVALID_OUTPUT),
    TokensReady(
        attempt_id=ATTEMPT,
        run=TokenRun(first_position=2, token_ids=(1, 2), choice=1),
        num_cached_tokens=48,
        num_peer_tokens=32,
    ),
    TokensReady(
        attempt_id=ATTEMPT,
        run=TokenRun(first_position=2, token_ids=(), finish_reason=FinishReason.LENGTH),
    ),
)


def make_frame(*replies: Reply, step: int = 1) -> TimedFrame:
    frame = CoreFrame(step=step, replies=replies, ledger=LEDGER)
    return TimedFrame(frame=frame, computed_unix_ns=step)


def test_commands_survive_the_wire() -> None:
    message = EngineCommands(commands=COMMANDS)
    (payload,) = frames_of(encode_to_engine(message))
    decoded = decode_to_engine(payload)
    assert decoded == message
    assert isinstance(decoded, EngineCommands)
    assert decoded.commands[0].request.traceparent == "00-aa-bb-01"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "message",
    [
        EngineMapped(pid=7),
        EngineReady(load_s=1.5),
        EngineFailed(code="invalid_model", message="no such file"),
        EngineSteps(
            frames=(
                TimedFrame(
                    frame=CoreFrame(
                        step=9,
                        replies=REPLIES,
                        ledger=LEDGER,
                        num_queued_tokens=1,
                        num_preemptions=2,
                        cache_events=CACHE_EVENTS,
                        forward_s=0.25,
                        logits_s=0.5,
                        sample_s=1.0,
                        other_s=2.0,
                        num_step_tokens=3,
                    ),
                    planned_unix_ns=1_700_000_000_123_456_787,
                    last_layer_unix_ns=1_700_000_000_123_456_788,
                    computed_unix_ns=1_700_000_000_123_456_789,
                ),
                make_frame(step=0),
            )
        ),
    ],
)
def test_engine_messages_survive_the_wire(message: FromEngine) -> None:
    (payload,) = frames_of(encode_from_engine(message))
    assert decode_from_engine(payload) == message


def test_boot_survives_the_wire() -> None:
    boot = EngineBoot(
        worker_id="d0",
        incarnation="00aa",
        model_path="models/tiny",
        model_name="tiny",
        data_dir="data",
        device_fd=9,
        dtype="float32",
        compute_dtype="float32",
        layout=KvLayout.block_major(
            num_blocks=8, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32"
        ),
        core=CoreConfig(num_blocks=8, eos_token_ids=(1, 2)),
        namespace=ModelNamespace(
            model_fingerprint="ab", compute_dtype="float32", kv_dtype="float32", block_size=16
        ),
        secret=b"\x00" * 32,
        pool_fd=3,
        leaves_fd=4,
        control_fd=5,
        bell_fd=6,
        layer_group=4,
        cpu_affinity=(1,),
    )
    (payload,) = frames_of(encode_to_engine(boot))
    assert decode_to_engine(payload) == boot


def test_a_stream_may_be_cut_anywhere() -> None:
    first = encode_from_engine(EngineMapped(pid=1))
    second = encode_from_engine(EngineSteps(frames=(make_frame(*REPLIES),)))
    data = first + second
    for cut in range(len(data) + 1):
        buffer = FrameBuffer()
        buffer.feed(data[:cut])
        got = list(buffer.frames())
        buffer.feed(data[cut:])
        got += list(buffer.frames())
        assert got == [first[4:], second[4:]]
        assert not buffer._data


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode([2]),
        msgspec.msgpack.encode([2, "pid"]),
        msgspec.msgpack.encode([2, 1, "one too many"]),
        msgspec.msgpack.encode(
            [6, [[0, 0, 0, 1, [[31, ["r", 1], "because"]], [0] * 10, 0, 0, 0, 0, 0, 0, 0]]]
        ),
        encode_to_engine(EngineCommands(commands=()))[4:],
    ],
)
def test_what_is_no_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineFrameError):
        decode_from_engine(payload)


def test_ragged_token_bytes_are_refused() -> None:
    prefill = encode_to_engine(
        EngineCommands(commands=(Prefill(request=make_request(), attempt=1),))
    )
    tree = msgspec.msgpack.decode(prefill[4:])
    tree[1][0][3][2] = b"abc"
    with pytest.raises(EngineFrameError, match="3 bytes"):
        decode_to_engine(msgspec.msgpack.encode(tree))


def test_ragged_hash_bytes_are_refused() -> None:
    lock = encode_to_engine(EngineCommands(commands=(LockPrefix(read_id=1, hashes=HASHES),)))
    tree = msgspec.msgpack.decode(lock[4:])
    tree[1][0][2] = bytes(33)
    with pytest.raises(EngineFrameError, match="33 bytes"):
        decode_to_engine(msgspec.msgpack.encode(tree))


def test_a_length_out_of_step_is_refused() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(EngineFrameError):
        list(buffer.frames())


def test_waiting_frames_merge_but_a_chunk_keeps_its_step() -> None:
    def token(position: int) -> TokensReady:
        run = TokenRun(first_position=position, token_ids=(position,))
        return TokensReady(attempt_id=ATTEMPT, run=run)

    both = TokensReady(attempt_id=ATTEMPT, run=TokenRun(first_position=1, token_ids=(1, 2)))
    other = Accepted(attempt_id=AttemptId(RequestId("request-2"), 1))
    chunk = ChunkPlanned(attempt_id=ATTEMPT, start=0, end=16)
    waiting: list[TimedFrame] = []
    merge_frames(waiting, make_frame(token(1), step=1))
    merge_frames(waiting, make_frame(other, token(2), step=2))
    assert waiting == [make_frame(both, other, step=2)]
    merge_frames(waiting, make_frame(chunk, step=3))
    assert waiting == [make_frame(both, other, chunk, step=3)]
    merge_frames(waiting, make_frame(token(3), step=4))
    merge_frames(waiting, make_frame(step=0))
    assert waiting == [make_frame(both, other, chunk, step=3), make_frame(token(3), step=0)]


def test_cache_events_of_merged_frames_are_their_net_change() -> None:
    first, second = HASHES
    waiting = [with_events(BlockStored(hashes=HASHES, parent_hash=None))]
    merge_frames(waiting, with_events(BlockRemoved(hashes=(second,))))
    assert waiting == [with_events(BlockStored(hashes=(first,), parent_hash=None))]
    merge_frames(waiting, make_frame(step=0))
    assert waiting[0].frame.cache_events == (BlockStored(hashes=(first,), parent_hash=None),)
    merge_frames(waiting, with_events(AllBlocksCleared()))
    assert waiting == [with_events(AllBlocksCleared())]


def with_events(*events: CacheEvent) -> TimedFrame:
    timed = make_frame(step=0)
    return replace(timed, frame=replace(timed.frame, cache_events=events))


def frames_of(data: bytes) -> list[bytes]:
    buffer = FrameBuffer()
    buffer.feed(data)
    return list(buffer.frames())
