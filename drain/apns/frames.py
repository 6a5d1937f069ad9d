"""Names and bytes of HTTP/2 frames (RFC 9113): what http2.py is written in."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = 2**31 - 1
MAX_FRAME: Final = 16_384
"""What we accept (the protocol's default, so it is not announced) and the least that any peer accepts."""
MAX_HEADER_BLOCK: Final = 65_536
"""CONTINUATION frames are collected up to here: a header block has no other bound."""
RECEIVE_WINDOW: Final = 1 << 20
"""For all streams together. An error answer is about 30 bytes; the default of 65,535 stalls a token clean-up."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
MAX_TABLE: Final = 4096
"""Of HPACK's encoder, even where the peer would keep more."""

FRAME: Final = struct.Struct(">BHBBI")
SETTING: Final = struct.Struct(">HI")
U32: Final = struct.Struct(">I")

Header = tuple[bytes, bytes, bool]
"""Name, value, and whether it must never be indexed: secrets, and values that differ in every request."""


class ErrorCode(IntEnum):
    """Section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


def error_name(code: int) -> str:
    """`REFUSED_STREAM`, or the number in hex for a code that the RFC does not know."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return hex(code)


class PeerError(Exception):
    """The peer broke the protocol; the connection is unusable and `code` is what GOAWAY should say."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame, whole."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload without what PADDED added (section 6.1)."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def check_length(name: str, payload: bytes, length: int) -> None:
    """Raise PeerError for a frame of fixed size that has another one."""
    if len(payload) != length:
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, f"{name} of {len(payload)} bytes")
