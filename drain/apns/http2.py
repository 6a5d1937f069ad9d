"""The client half of HTTP/2 (RFC 9113) that a sender of small requests needs. No I/O, no clock.

aioapns drives h2, whose state machines cost 250 to 330 µs per push for cases that such a client cannot meet;
jh2's cost 110 to 240 µs, its HPACK alone (Rust) 8 µs with the framing below. So the framing is ours and the
header compression is jh2's. Section numbers below are RFC 9113's.

What it keeps: stream ids, the peer's settings, the connection's send window, what is owed as WINDOW_UPDATE.
What it does not keep is anything about a stream: `Listener` knows which it still waits for, and frames of any
other stream are decoded (compression state is shared) and then passed on to be ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from jh2._hazmat import Decoder, Encoder

from drain.apns.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME,
    MAX_FRAME_SIZE,
    MAX_HEADER_BLOCK,
    MAX_TABLE,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    RECEIVE_WINDOW,
    RST_STREAM,
    SETTING,
    SETTINGS,
    U32,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    Header,
    PeerError,
    check_length,
    frame,
    unpadded,
)


class Listener(Protocol):
    """What a connection tells. Called from `receive`, in the order of the frames."""

    def on_settings(self) -> None: ...
    def on_headers(self, stream_id: int, headers: list[Header], ended: bool) -> None: ...
    def on_data(self, stream_id: int, data: bytes, ended: bool) -> None: ...
    def on_reset(self, stream_id: int, code: int) -> None: ...
    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None: ...
    def on_window(self) -> None: ...
    def on_pong(self) -> None: ...


class ClientConnection:
    """One connection. Bytes to write gather in `outgoing`; the owner takes them with `take`."""

    __slots__ = (
        "_block",
        "_block_ended",
        "_block_stream",
        "_decoder",
        "_encoder",
        "_handlers",
        "_listener",
        "_owed",
        "_rest",
        "_table_sizes",
        "highest_stream_id",
        "max_frame_size",
        "max_streams",
        "outgoing",
        "settled",
        "stream_window",
        "window",
    )

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._decoder.max_header_list_size = MAX_HEADER_BLOCK
        self._rest = b""
        self._table_sizes: list[int] = []
        """What the peer's SETTINGS asked for since the last request."""
        self._block: bytearray | None = None
        self._block_stream = 0
        self._block_ended = False
        self._owed = 0
        self.settled = False
        """The peer's first SETTINGS have come: before them no limit of its is known."""
        self.max_streams: int | None = None
        """MAX_CONCURRENT_STREAMS; None is the protocol's default: no limit."""
        self.stream_window = DEFAULT_WINDOW
        self.max_frame_size = MAX_FRAME
        self.window = DEFAULT_WINDOW
        """Body bytes that may still be sent on the connection."""
        self.highest_stream_id = -1
        self.outgoing: list[bytes] = [
            PREFACE,
            frame(SETTINGS, 0, 0, SETTING.pack(ENABLE_PUSH, 0)),
            frame(WINDOW_UPDATE, 0, 0, U32.pack(RECEIVE_WINDOW - DEFAULT_WINDOW)),
        ]
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_reset,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )

    # What we send

    def take(self) -> bytes:
        """All bytes that wait to be written; they count as written from here on."""
        data = b"".join(self.outgoing)
        self.outgoing.clear()
        return data

    def request(self, headers: list[Header], body: bytes) -> int:
        """Append HEADERS and DATA of one whole request; returns its stream id.

        The caller has checked `window` and `stream_window` against the body, and the limit of streams.
        """
        self.highest_stream_id = stream_id = self.highest_stream_id + 2
        if self._table_sizes:
            self._resize_table()
        block = self._encoder.encode(headers)
        size, length = len(block), len(body)
        self.window -= length
        if size <= MAX_FRAME and length <= MAX_FRAME:
            self.outgoing.append(
                b"".join(
                    (
                        FRAME.pack(size >> 16, size & 0xFFFF, HEADERS, END_HEADERS, stream_id),
                        block,
                        FRAME.pack(length >> 16, length & 0xFFFF, DATA, END_STREAM, stream_id),
                        body,
                    )
                )
            )
        else:
            self._in_pieces(HEADERS, CONTINUATION, END_HEADERS, stream_id, block)
            self._in_pieces(DATA, DATA, END_STREAM, stream_id, body)
        return stream_id

    def _resize_table(self) -> None:
        """RFC 7541, 4.2: of several changes between two header blocks, tell the smallest size and the last."""
        for size in (min(self._table_sizes), self._table_sizes[-1]):
            if size != self._encoder.header_table_size:
                self._encoder.header_table_size = size
        self._table_sizes.clear()

    def _in_pieces(self, first: int, rest: int, last_flag: int, stream_id: int, data: bytes) -> None:
        limit = self.max_frame_size
        pieces = [data[i : i + limit] for i in range(0, len(data), limit)] or [b""]
        for number, piece in enumerate(pieces, 1):
            kind = first if number == 1 else rest
            self.outgoing.append(frame(kind, last_flag if number == len(pieces) else 0, stream_id, piece))

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Give the stream up. What the peer still sends on it is ignored."""
        self.outgoing.append(frame(RST_STREAM, 0, stream_id, U32.pack(code)))

    def ping(self) -> None:
        """Ask for a sign of life."""
        self.outgoing.append(frame(PING, 0, 0, b"apnsping"))

    def goaway(self, code: int) -> None:
        """Say that we leave. The peer opens no streams, so the last one is 0."""
        self.outgoing.append(frame(GOAWAY, 0, 0, U32.pack(0) + U32.pack(code)))

    # What we receive

    def receive(self, data: bytes) -> None:
        """Frames go to the listener. Raises PeerError; after that the connection must be left."""
        buffer = self._rest + data if self._rest else data
        offset, end = 0, len(buffer)
        while end - offset >= 9:
            high, low, kind, flags, stream_id = FRAME.unpack_from(buffer, offset)
            length = high << 16 | low
            if not self.settled and not (kind == SETTINGS and not flags & ACK):
                # Section 3.4. Most likely something that is not HTTP/2 at all, such as a proxy's error page.
                raise PeerError(ErrorCode.PROTOCOL_ERROR, f"peer does not speak HTTP/2: {buffer[:24]!r}")
            if length > MAX_FRAME:
                raise PeerError(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes, limit {MAX_FRAME}")
            stop = offset + 9 + length
            if stop > end:
                break
            payload = buffer[offset + 9 : stop]
            offset = stop
            stream_id &= MAX_WINDOW
            if self._block is not None and (kind != CONTINUATION or stream_id != self._block_stream):
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "header block interrupted by another frame")
            if kind <= CONTINUATION:  # Section 4.1: unknown types are ignored.
                self._handlers[kind](flags, stream_id, payload)
        self._rest = buffer[offset:]

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._check_stream(stream_id)
        if flags & (PADDED | WITH_PRIORITY):
            payload = unpadded(flags, payload)
            if flags & WITH_PRIORITY:
                payload = payload[5:]
        if flags & END_HEADERS:
            self._listener.on_headers(stream_id, self._decode(payload), bool(flags & END_STREAM))
            return
        self._block, self._block_stream = bytearray(payload), stream_id
        self._block_ended = bool(flags & END_STREAM)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block += payload
        if len(self._block) > MAX_HEADER_BLOCK:
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, f"header block over {MAX_HEADER_BLOCK} bytes")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._listener.on_headers(stream_id, self._decode(block), self._block_ended)

    def _decode(self, block: bytes) -> list[Header]:
        try:
            return self._decoder.decode(block, raw=True)  # type: ignore[no-any-return]
        except BaseException as error:
            # jh2's decoder panics on some malformed blocks; pyo3 derives that from BaseException.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise PeerError(ErrorCode.COMPRESSION_ERROR, f"header block: {error}") from None
            raise

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._check_stream(stream_id)
        # Acknowledged whoever it is for: bytes of an abandoned stream use up the window all the same.
        self._owed += len(payload)
        if self._owed > RECEIVE_WINDOW // 2:
            self.outgoing.append(frame(WINDOW_UPDATE, 0, 0, U32.pack(self._owed)))
            self._owed = 0
        if flags & PADDED:
            payload = unpadded(flags, payload)
        self._listener.on_data(stream_id, payload, bool(flags & END_STREAM))

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._check_stream(stream_id)
        check_length("RST_STREAM", payload, 4)
        self._listener.on_reset(stream_id, U32.unpack(payload)[0])

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & ACK:
            return
        if stream_id or len(payload) % 6:
            raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "malformed SETTINGS")
        for name, value in SETTING.iter_unpack(payload):
            if name == MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
                # Open streams need no correction: a body is sent whole or not at all.
                self.stream_window = value
            elif name == MAX_FRAME_SIZE:
                if not MAX_FRAME <= value < 2**24:
                    raise PeerError(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
                self.max_frame_size = value
            elif name == HEADER_TABLE_SIZE:
                self._table_sizes.append(min(value, MAX_TABLE))
        self.settled = True
        self.outgoing.append(frame(SETTINGS, ACK, 0, b""))
        self._listener.on_settings()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        check_length("PING", payload, 8)
        if flags & ACK:
            self._listener.on_pong()
        else:
            self.outgoing.append(frame(PING, ACK, 0, payload))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) < 8:
            raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "malformed GOAWAY")
        last, code = struct.unpack_from(">II", payload)
        self._listener.on_goaway(last & MAX_WINDOW, code, payload[8:])

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        check_length("WINDOW_UPDATE", payload, 4)
        if stream_id:
            return  # The body of that stream went out whole.
        self.window += U32.unpack(payload)[0] & MAX_WINDOW
        if self.window > MAX_WINDOW:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "connection window over 2^31-1")
        self._listener.on_window()

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        pass  # Advice about streams that a server does not open.

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, which our SETTINGS forbid")

    def _check_stream(self, stream_id: int) -> None:
        if not stream_id & 1 or stream_id > self.highest_stream_id:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"frame on stream {stream_id}, which we never opened")
