"""TensorBoard's event files, encoded here so that no package is needed to write them.

A file is a sequence of records (tensorflow/core/lib/io/record_writer.h): the length, its checksum,
the data, its checksum. The data is an `Event` (tensorflow/core/util/event.proto), encoded as a
protocol buffer.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache

FORMAT = "brain.Event:2"
"""Format version in the first record of a file."""

_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_LARGEST_FLOAT = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_SESSION_START = 1
_TENSORS, _STRING = 2, 7
"""`DATA_CLASS_TENSOR` of summary.proto, and `DT_STRING` of types.proto."""


def version_record(time: float) -> bytes:
    """Return the first record of a file."""
    return _encode_record(_encode_event(time, None, _encode_field(3, _BYTES, FORMAT.encode())))


def scalars_record(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a record of a step's values, by tag."""
    summary = b"".join(
        _encode_field(1, _BYTES, _encode_value(tag, value)) for tag, value in values.items()
    )
    return _encode_record(_encode_event(time, step, _encode_field(5, _BYTES, summary)))


def text_record(time: float, step: int, tag: str, text: str) -> bytes:
    """Return a record of a Markdown text: a tensor of one string, for the plugin `text`."""
    plugin = _encode_field(1, _BYTES, _encode_field(1, _BYTES, b"text"))
    metadata = plugin + _encode_field(4, _VARINT, _encode_varint(_TENSORS))
    shape = _encode_field(2, _BYTES, _encode_field(1, _VARINT, _encode_varint(1)))
    tensor = (
        _encode_field(1, _VARINT, _encode_varint(_STRING))
        + _encode_field(2, _BYTES, shape)
        + _encode_field(8, _BYTES, text.encode())
    )
    value = (
        _encode_field(1, _BYTES, tag.encode())
        + _encode_field(8, _BYTES, tensor)
        + _encode_field(9, _BYTES, metadata)
    )
    summary = _encode_field(1, _BYTES, value)
    return _encode_record(_encode_event(time, step, _encode_field(5, _BYTES, summary)))


def session_start_record(time: float, step: int) -> bytes:
    """Return a record that announces that steps from this one on come again."""
    log = _encode_field(1, _VARINT, _encode_varint(_SESSION_START))
    return _encode_record(_encode_event(time, step, _encode_field(7, _BYTES, log)))


def _encode_event(time: float, step: int | None, what: bytes) -> bytes:
    at = _encode_field(2, _VARINT, _encode_varint(step)) if step is not None else b""
    return _encode_field(1, _DOUBLE, struct.pack("<d", time)) + at + what


def _encode_value(tag: str, value: float) -> bytes:
    if math.isfinite(value) and abs(value) > _LARGEST_FLOAT:
        value = math.copysign(math.inf, value)
    return _encode_field(1, _BYTES, tag.encode()) + _encode_field(
        2, _FLOAT, struct.pack("<f", value)
    )


def _encode_field(number: int, kind: int, content: bytes) -> bytes:
    head = _encode_varint(number << 3 | kind)
    return head + _encode_varint(len(content)) + content if kind == _BYTES else head + content


def _encode_varint(value: int) -> bytes:
    """Encode seven bits per byte, the lowest first; all bytes but the last have the highest bit
    set.
    """
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of bytes. The mask keeps a checksum useful for data that contains
    checksums.
    """
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
    return struct.pack("<I", masked)


@cache
def _crc_table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        found.append(byte)
    return tuple(found)
