"""HTTP/2 frames (RFC 9113): building them, and cutting received bytes into them."""

import struct
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
MAX_STREAM_ID: Final = 2**31 - 1
FRAME_LIMIT: Final = 16_384

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

SETTING_MAX_CONCURRENT_STREAMS: Final = 0x3
SETTING_INITIAL_WINDOW_SIZE: Final = 0x4
SETTING_MAX_FRAME_SIZE: Final = 0x5
SETTING_MAX_HEADER_LIST_SIZE: Final = 0x6

ERROR_CODES: Final = {
    "NO_ERROR": 0,
    "PROTOCOL_ERROR": 1,
    "INTERNAL_ERROR": 2,
    "FLOW_CONTROL_ERROR": 3,
    "SETTINGS_TIMEOUT": 4,
    "STREAM_CLOSED": 5,
    "FRAME_SIZE_ERROR": 6,
    "REFUSED_STREAM": 7,
    "CANCEL": 8,
    "COMPRESSION_ERROR": 9,
    "CONNECT_ERROR": 10,
    "ENHANCE_YOUR_CALM": 11,
    "INADEQUATE_SECURITY": 12,
    "HTTP_1_1_REQUIRED": 13,
}

_HEAD: Final = struct.Struct(">BHBBI")
_SETTING: Final = struct.Struct(">HI")
_WORD: Final = struct.Struct(">I")
_TWO_WORDS: Final = struct.Struct(">II")


class WireError(Exception):
    """The client broke the protocol: the connection ends with GOAWAY and this error code."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code
        self.why = why


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, code) + debug)


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(increment))


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


def read_word(payload: bytes) -> int:
    """The one 32-bit value of RST_STREAM or WINDOW_UPDATE, without the reserved bit."""
    if len(payload) != 4:
        raise WireError("FRAME_SIZE_ERROR", f"a 4-byte frame came with {len(payload)} bytes")
    value: int = _WORD.unpack(payload)[0]
    return value & MAX_STREAM_ID


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    if len(payload) % 6:
        raise WireError("FRAME_SIZE_ERROR", f"SETTINGS of {len(payload)} bytes")
    return list(_SETTING.iter_unpack(payload))


def unpadded(flags: int, payload: bytes) -> bytes:
    """Payload of DATA or HEADERS without its padding (RFC 9113, section 6.1)."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise WireError("PROTOCOL_ERROR", "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


class FrameCutter:
    """Cuts received bytes into frames; holds the incomplete rest. Checks the preface and the frame limit."""

    __slots__ = ("_preface_due", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._preface_due = True

    def cut(self, data: bytes) -> list[Frame]:
        """Whole frames in `data` and what was left before. Raises WireError."""
        if self._rest:
            data = self._rest + data
        offset = 0
        if self._preface_due:
            if not data.startswith(PREFACE[: len(data)]):
                raise WireError("PROTOCOL_ERROR", "no HTTP/2 preface")
            if len(data) < len(PREFACE):
                self._rest = data
                return []
            offset = len(PREFACE)
            self._preface_due = False
        frames: list[Frame] = []
        size = len(data)
        unpack = _HEAD.unpack_from
        while size - offset >= 9:
            high, low, kind, flags, stream_id = unpack(data, offset)
            length = high << 16 | low
            if length > FRAME_LIMIT:
                raise WireError("FRAME_SIZE_ERROR", f"frame of {length} bytes, at most {FRAME_LIMIT}")
            end = offset + 9 + length
            if end > size:
                break
            frames.append(Frame(kind, flags, stream_id & MAX_STREAM_ID, data[offset + 9 : end]))
            offset = end
        self._rest = data[offset:]
        return frames
