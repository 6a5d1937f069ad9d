"""HPACK: jh2's compiled decoder for what clients send, and a stateless encoder for what we answer.

Answers use static names and literals that are never indexed, so our side of the compression has no state
that an injected fault could leave out of step with the client (RFC 7541, sections 6.1 and 6.2.2).
"""

from collections.abc import Iterable
from typing import Final, Protocol

from jh2._hazmat import Decoder as _CompiledDecoder
from jh2._hazmat import HPACKError, OversizedHeaderListError

DECODE_ERRORS: Final[tuple[type[Exception], ...]] = (HPACKError, OversizedHeaderListError)

Header = tuple[bytes, bytes, bool]
"""Name, value, and whether the sender marked it never-indexed."""


class HeaderDecoder(Protocol):
    """The part of jh2's decoder that a server needs; its state lives as long as the connection."""

    def decode(self, data: bytes, raw: bool | None = None) -> list[Header]:
        """Raises one of DECODE_ERRORS; the connection is then beyond repair."""


def header_decoder() -> HeaderDecoder:
    decoder: HeaderDecoder = _CompiledDecoder()
    return decoder


_STATUS_NAME: Final = b"\x08"  # literal without indexing, name = static entry 8 (:status)
_STATIC_STATUS: Final = {
    200: b"\x88",
    204: b"\x89",
    206: b"\x8a",
    304: b"\x8b",
    400: b"\x8c",
    404: b"\x8d",
    500: b"\x8e",
}


def _string(text: bytes) -> bytes:
    """A length-prefixed literal without Huffman coding; lengths up to 2,097,278."""
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    rest = length - 127
    prefix = bytearray((127,))
    while rest >= 128:
        prefix.append(0x80 | rest & 0x7F)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + text


def status_field(status: int) -> bytes:
    """The encoded `:status` line."""
    return _STATIC_STATUS.get(status) or _STATUS_NAME + _string(str(status).encode())


def literal_field(name: bytes, value: bytes) -> bytes:
    """One encoded header that enters nobody's table."""
    return b"\x00" + _string(name) + _string(value)


def header_block(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """A whole block, for answers off the hot path."""
    fields = b"".join(literal_field(name.lower().encode(), value.encode()) for name, value in headers)
    return status_field(status) + fields
