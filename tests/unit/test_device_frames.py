"""Device frames: what goes in comes out, and what is none is an error."""

from __future__ import annotations

import pytest

from moonpool.kv.region import DeviceAccess
from moonpool.wire.device_frames import (
    CloseDevice,
    DeviceClosed,
    DeviceOffered,
    DeviceOpened,
    DeviceRead,
    OpenDevice,
    ReadDevice,
    decode_from_device,
    decode_to_device,
    encode_device,
)
from moonpool.wire.engine_frames import FrameBuffer
from moonpool.wire.engine_messages import EngineFrameError

TO_DEVICE = (
    OpenDevice(1, b"handle", 4096, 12),
    ReadDevice(2, 1, b"\1\0\0\0", b"\2\0\0\0", 3, 1, bytes(8)),
    CloseDevice(1),
)
FROM_DEVICE = (
    DeviceOffered(DeviceAccess(gpu="GPU-0", ipc_handle=bytes(64), num_bytes=1 << 40), ""),
    DeviceOffered(None, "why not"),
    DeviceOpened(1, ""),
    DeviceRead(2, b"\1\0\0\0", ""),
    DeviceClosed(1, "why"),
)


def test_messages_of_either_side_come_out_as_they_went_in() -> None:
    for messages, decode in ((TO_DEVICE, decode_to_device), (FROM_DEVICE, decode_from_device)):
        buffer = FrameBuffer()
        buffer.feed(b"".join(encode_device(message) for message in messages))
        assert tuple(decode(payload) for payload in buffer.frames()) == messages


@pytest.mark.parametrize("payload", [b"", b"\x90", b"\x92\x09\x01", b"\x92\x03\xa1a"])
def test_what_is_no_message_is_an_error(payload: bytes) -> None:
    for decode in (decode_to_device, decode_from_device):
        with pytest.raises(EngineFrameError):
            decode(payload)
