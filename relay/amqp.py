"""The bytes of AMQP 0-9-1 that a publish consists of: short strings, header tables, frames. Pure.

The layouts are those of the AMQP 0-9-1 specification, sections 4.2.3 (frames), 4.2.5 (data types) and
4.2.6 (content), with the type letters that RabbitMQ uses ("AMQP 0-9-1 Errata", Field types). pamqp, the
library's own codec, is the reference that the tests compare with; it costs about ten times as much per
message, and it sends a float as 32 bits, which changes the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from struct import Struct
from typing import Any, Protocol

SHORTSTR_BYTES = 255
FIELD_NAME_BYTES = 128  # section 4.2.5.5; a longer name is a syntax error to a strict broker
FRAME_OVERHEAD = 8  # type, channel and size before the payload, one end octet after it
UNLIMITED_FRAME = 2**31  # frame_max 0 means "no limit"

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_FRAME_HEAD = Struct(">BHI").pack  # frame type, channel, payload size
_U8 = Struct(">B").pack
_I8 = Struct(">b").pack
_I16 = Struct(">h").pack
_U16 = Struct(">H").pack
_I32 = Struct(">i").pack
_U32 = Struct(">I").pack
_I64 = Struct(">q").pack
_F64 = Struct(">d").pack

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_PUBLISH = b"\x00\x3c\x00\x28\x00\x00"  # class 60, method 40, reserved "ticket"
_MANDATORY = b"\x01"


class Unencodable(ValueError):
    """A value that AMQP 0-9-1 has no place for; the message names the value and the bound."""


def shortstr(value: str, what: str) -> bytes:
    """Encode a short string: one octet of length, then UTF-8.

    Raises:
        Unencodable: longer than 255 bytes (not characters), or not expressible in UTF-8.
    """
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise Unencodable(f"{what} is not valid Unicode") from None
    if len(raw) > SHORTSTR_BYTES:
        raise Unencodable(f"{what} has {len(raw)} bytes, the bound is {SHORTSTR_BYTES}")
    return _U8(len(raw)) + raw


def field(name: str, value: Any, path: str = "") -> bytes:
    """Encode one named field of a table: the name as a short string, a type letter, the value.

    Raises:
        Unencodable: as :func:`field_value`, or a name longer than 128 bytes.
    """
    path = f"{path}.{name}" if path else name
    key = shortstr(name, f"header name {name[:40]!r}")
    if len(key) - 1 > FIELD_NAME_BYTES:
        raise Unencodable(
            f"header name {name[:40]!r} has {len(key) - 1} bytes, the bound is {FIELD_NAME_BYTES}"
        )
    return key + field_value(value, path)


def field_value(value: Any, path: str) -> bytes:
    """Encode what JSON can express, in the types that pamqp chooses; a float in 64 bits.

    Raises:
        Unencodable: an integer outside 64 bits, a float that is not finite, text that is not Unicode, or a
            type that JSON does not have.
    """
    if isinstance(value, str):
        try:
            raw = value.encode()
        except UnicodeEncodeError:
            raise Unencodable(f"header {path!r} is not valid Unicode") from None
        return b"S" + _U32(len(raw)) + raw
    if value is True or value is False:
        return b"t" + _U8(value)
    if isinstance(value, int):
        return _integer(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Unencodable(f"header {path!r} is {value}, which is no finite number")
        return b"d" + _F64(value)
    if value is None:
        return b"V"
    if isinstance(value, dict):
        inner = table(value, path)
        return b"F" + _U32(len(inner)) + inner
    if isinstance(value, list):
        inner = b"".join([field_value(item, f"{path}[{i}]") for i, item in enumerate(value)])
        return b"A" + _U32(len(inner)) + inner
    raise Unencodable(f"header {path!r} has the type {type(value).__name__}, which AMQP has no field for")


def table(fields: dict[str, Any], path: str = "") -> bytes:
    """Encode the fields of a table, sorted by name as pamqp does, without the length before them."""
    return b"".join([field(name, value, path) for name, value in sorted(fields.items())])


def _integer(value: int, path: str) -> bytes:
    if -128 <= value <= 127:
        return b"b" + _I8(value)
    if -32768 <= value <= 32767:
        return b"s" + _I16(value)
    if 0 <= value <= 65535:
        return b"u" + _U16(value)
    if -(2**31) <= value < 2**31:
        return b"I" + _I32(value)
    if 0 <= value < 2**32:
        return b"i" + _U32(value)
    if INT64_MIN <= value <= INT64_MAX:
        return b"l" + _I64(value)
    raise Unencodable(
        f"header {path!r} is {value}, outside the bound of 64 bits ({INT64_MIN} to {INT64_MAX})"
    )


def publish_method(exchange: str, routing_key: str) -> bytes:
    """Payload of a Basic.Publish method frame, always mandatory: nothing is dropped silently.

    Raises:
        Unencodable: exchange or routing key over 255 bytes.
    """
    name = shortstr(exchange, f"exchange {exchange[:40]!r}")
    key = shortstr(routing_key, f"routing key {routing_key[:40]!r}")
    return _PUBLISH + name + key + _MANDATORY


class Publishable(Protocol):
    """What one publish consists of: payloads of its method and header frames, and the body."""

    @property
    def method(self) -> bytes: ...
    @property
    def header(self) -> bytes: ...
    @property
    def body(self) -> bytes: ...


def frames(messages: Iterable[Publishable], channel: int, frame_max: int) -> bytes:
    """Assemble every frame of many publishes on one channel, ready to be written at once.

    Args:
        frame_max: negotiated size of a frame in bytes, its head and end included; bodies are cut to fit.
    """
    parts: list[bytes] = []
    add = parts.append
    chunk = (frame_max or UNLIMITED_FRAME) - FRAME_OVERHEAD
    for message in messages:
        method, header, body = message.method, message.header, message.body
        add(_FRAME_HEAD(_METHOD, channel, len(method)))
        add(method)
        add(_END + _FRAME_HEAD(_HEADER, channel, len(header)))
        add(header)
        if 0 < len(body) <= chunk:
            add(_END + _FRAME_HEAD(_BODY, channel, len(body)))
            add(body)
        else:
            for start in range(0, len(body), chunk):
                piece = body[start : start + chunk]
                add(_END + _FRAME_HEAD(_BODY, channel, len(piece)))
                add(piece)
        add(_END)
    return b"".join(parts)
