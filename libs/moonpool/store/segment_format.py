"""The bytes of a record, and which of them to believe. Pure.

A segment is slots of one size, from byte 0, without a header of its own. A slot holds one block:

    0                     payload_bytes   footer_offset                        slot_bytes
    | payload             | zeros         | footer (112) | leaves (8 each) | zeros |
                                          ^ a multiple of 4,096                    ^ too

Rules
- The footer is what other logs call the header: it says whose block this is, under a checksum of its
  own. It stands behind the payload because a write reaches the file in order: a record that a killed
  process left half written has no footer, so that a scan need not read payloads to know.
- After a power failure a footer may be there without its payload. Its leaf digests then refuse the copy.
- All slots have one size, so that a damaged footer hides its own record and no other.
- `sequence` is segment number * 2^32 + slot: it grows with every record, and a record that lies where
  it was not written does not count.
- A dropped record's magic number is overwritten with another one. Nothing else is ever written twice.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from moonpool.ids import BlockHash
from moonpool.kv.digest import record_digest
from moonpool.store.base import BlockRecord, ByteArray, DigestArray, StoredRecord
from moonpool.store.log_identity import LogIdentity

ALIGNMENT = 4_096
VERSION = 1
MAX_SLOTS = 1 << 32

_LIVE = int.from_bytes(b"MPBLOCK1", "little")
_DROPPED = int.from_bytes(b"MPGONE-1", "little")
#: What is written over the beginning of a dropped record's footer.
TOMBSTONE = _DROPPED.to_bytes(8, "little")

FOOTER_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("num_leaves", "<u4"),
        ("payload_bytes", "<u8"),
        ("sequence", "<u8"),
        ("block_hash", "u1", (32,)),
        ("identity", "u1", (16,)),
        ("tag", "<u8"),
        #: 0 in records of versions that wrote none.
        ("link", "<u8"),
        #: kv.digest.record_digest of the leaves that follow.
        ("record_digest", "<u8"),
        #: XXH3-64 of everything before it.
        ("checksum", "<u8"),
    ]
)
#: The same for one footer.
_FOOTER = struct.Struct("<QIIQQ32s16sQQQQ")
FOOTER_BYTES = FOOTER_DTYPE.itemsize
_CHECKED_BYTES = FOOTER_BYTES - 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecord:
    """A footer that a scan believes."""

    slot: int
    record: StoredRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFooters:
    """What a run of slots holds."""

    records: tuple[FoundRecord, ...]
    #: Footers that are neither whole, nor dropped, nor unwritten.
    num_corrupt: int
    #: Nothing but zeros: the write of the record never got there.
    num_unwritten: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """The format of one identity's records."""

    identity: bytes
    payload_bytes: int
    num_leaves: int

    @classmethod
    def of(cls, identity: LogIdentity) -> RecordFormat:
        layout = identity.layout
        return cls(
            identity=identity.digest,
            payload_bytes=layout.block_bytes,
            num_leaves=layout.num_layers,
        )

    @property
    def footer_offset(self) -> int:
        """From the start of the slot."""
        return _aligned(self.payload_bytes)

    @property
    def padding_bytes(self) -> int:
        """Between payload and footer."""
        return self.footer_offset - self.payload_bytes

    @property
    def footer_bytes(self) -> int:
        """Footer and leaves, without the zeros behind them."""
        return FOOTER_BYTES + 8 * self.num_leaves

    @property
    def slot_bytes(self) -> int:
        return self.footer_offset + _aligned(self.footer_bytes)

    def check_arrays(self, payload: ByteArray, leaves: DigestArray) -> None:
        """Raise ValueError unless they are one block's, contiguous."""
        for array, dtype, size in (
            (payload, np.uint8, self.payload_bytes),
            (leaves, np.uint64, self.num_leaves),
        ):
            if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
                raise ValueError(
                    f"need a contiguous {np.dtype(dtype)}[{size}],"
                    f" got {array.dtype}{list(array.shape)}"
                )

    def footers(self, records: Sequence[BlockRecord], first_sequence: int) -> ByteArray:
        """uint8[n, slot_bytes - footer_offset]: what follows the payloads of consecutive slots."""
        n = len(records)
        rows: ByteArray = np.zeros((n, self.slot_bytes - self.footer_offset), np.uint8)
        fields = np.zeros(n, FOOTER_DTYPE)
        fields["magic"] = _LIVE
        fields["version"] = VERSION
        fields["num_leaves"] = self.num_leaves
        fields["payload_bytes"] = self.payload_bytes
        fields["sequence"] = _sequences(first_sequence, n)
        hashes = b"".join(record.block_hash for record in records)
        fields["block_hash"] = np.frombuffer(hashes, np.uint8).reshape(n, 32)
        fields["identity"] = np.frombuffer(self.identity, np.uint8)
        fields["tag"] = [record.tag for record in records]
        fields["link"] = [record.link for record in records]
        fields["record_digest"] = [record_digest(record.leaves) for record in records]
        raw = _raw(fields)
        fields["checksum"] = [_checksum(raw[row, :_CHECKED_BYTES].tobytes()) for row in range(n)]
        rows[:, :FOOTER_BYTES] = raw
        leaves = np.stack([record.leaves for record in records]).astype("<u8", copy=False)
        rows[:, FOOTER_BYTES : self.footer_bytes] = leaves.view(np.uint8)
        return rows

    def find(self, raw: ByteArray, first_sequence: int) -> FoundFooters:
        """What the footers of consecutive slots say.

        Args:
            raw: uint8[n, FOOTER_BYTES], contiguous.
        """
        fields = raw.view(FOOTER_DTYPE).reshape(-1)
        n = len(fields)
        is_dropped = fields["magic"] == _DROPPED
        is_unwritten = ~raw.any(axis=1)
        is_ours = (
            (fields["magic"] == _LIVE)
            & (fields["version"] == VERSION)
            & (fields["num_leaves"] == self.num_leaves)
            & (fields["payload_bytes"] == self.payload_bytes)
            & (fields["sequence"] == _sequences(first_sequence, n))
            & (fields["identity"] == np.frombuffer(self.identity, np.uint8)).all(axis=1)
        )
        data = raw.tobytes()
        first_slot = first_sequence % MAX_SLOTS
        hashes, checksums = fields["block_hash"].tobytes(), fields["checksum"].tolist()
        tags, links = fields["tag"].tolist(), fields["link"].tolist()
        records: list[FoundRecord] = []
        for row in np.flatnonzero(is_ours).tolist():
            start = row * FOOTER_BYTES
            if _checksum(data[start : start + _CHECKED_BYTES]) != checksums[row]:
                continue
            block_hash = BlockHash(hashes[row * 32 : row * 32 + 32])
            record = StoredRecord(block_hash=block_hash, tag=tags[row], link=links[row])
            records.append(FoundRecord(slot=first_slot + row, record=record))
        num_unwritten = int(is_unwritten.sum())
        return FoundFooters(
            records=tuple(records),
            num_corrupt=n - len(records) - num_unwritten - int(is_dropped.sum()),
            num_unwritten=num_unwritten,
        )

    def leaves_of(
        self, raw: ByteArray, block_hash: BlockHash, sequence: int
    ) -> npt.NDArray[np.uint64] | None:
        """uint64[num_leaves] of a record as it was read; None unless it is that block, undamaged.

        Args:
            raw: uint8[footer_bytes], contiguous.
        """
        data = raw.tobytes()
        *fields, _tag, _link, digest, checksum = _FOOTER.unpack_from(data)
        expected = [_LIVE, VERSION, self.num_leaves, self.payload_bytes, sequence, block_hash]
        if fields != [*expected, self.identity] or _checksum(data[:_CHECKED_BYTES]) != checksum:
            return None
        leaves: DigestArray = np.frombuffer(data, "<u8", self.num_leaves, FOOTER_BYTES)
        return leaves if record_digest(leaves) == digest else None


def sequence_of(segment: int, slot: int) -> int:
    """The sequence number of a record in `slot` of a segment."""
    return segment * MAX_SLOTS + slot


def _sequences(first: int, count: int) -> npt.NDArray[np.uint64]:
    return np.arange(count, dtype=np.uint64) + np.uint64(first)


def _checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _raw(fields: npt.NDArray[np.void]) -> ByteArray:
    return fields.view(np.uint8).reshape(len(fields), FOOTER_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
