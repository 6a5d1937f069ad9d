"""What a client may send on a connection, frame by frame (RFC 9113, section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from deploy.simulator import frames
from deploy.simulator.frames import Frame, WireError, read_settings, read_word, unpadded
from deploy.simulator.hpack import DECODE_ERRORS, Header, header_decoder
from deploy.simulator.request import read_request
from deploy.simulator.stream import Stream

if TYPE_CHECKING:
    from deploy.simulator.connection import Connection

_HEADER_BLOCK_LIMIT: Final = 65_536
_KEPT_BODY_BYTES: Final = 65_536
_REFUSED_STREAM: Final = frames.ERROR_CODES["REFUSED_STREAM"]
_PROTOCOL_ERROR: Final = frames.ERROR_CODES["PROTOCOL_ERROR"]
_FLOW_CONTROL_ERROR: Final = frames.ERROR_CODES["FLOW_CONTROL_ERROR"]


class Receiver:
    """Every method may raise WireError: the connection then ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = header_decoder()
        self._block: tuple[int, int, bytearray] | None = None  # flags, stream id, fragments so far
        self._settings_due = True
        self.highest = 0
        self.refused = 0
        self.after_goaway = 0
        self.paths_indexed = 0
        self.authorizations_indexed = 0
        self.client_goaway = False

    def receive(self, frame: Frame) -> None:
        kind, flags, stream_id, payload = frame
        if self._block is not None and kind != frames.CONTINUATION:
            raise WireError("PROTOCOL_ERROR", "a header block was interrupted")
        if kind == frames.HEADERS:
            self._headers(flags, stream_id, payload)
        elif kind == frames.DATA:
            self._data(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            self._settings(flags, payload)
        elif self._settings_due:
            raise WireError("PROTOCOL_ERROR", "the first frame is not SETTINGS")
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, read_word(payload))
        elif kind == frames.PING:
            self._ping(flags, payload)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, read_word(payload))
        elif kind == frames.CONTINUATION:
            self._continuation(flags, stream_id, payload)
        elif kind == frames.GOAWAY:
            self.client_goaway = True
        elif kind == frames.PUSH_PROMISE:
            raise WireError("PROTOCOL_ERROR", "a client does not push")
        # PRIORITY and unknown kinds are ignored (sections 5.3.2 and 5.5).

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._settings_due or not stream_id % 2:
            raise WireError("PROTOCOL_ERROR", f"HEADERS on stream {stream_id}")
        block = unpadded(flags, payload)
        if flags & frames.HAS_PRIORITY:
            block = block[5:]
        if flags & frames.END_HEADERS:
            self._header_block(flags, stream_id, block)
        else:
            self._block = (flags, stream_id, bytearray(block))

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[1] != stream_id:
            raise WireError("PROTOCOL_ERROR", "CONTINUATION without HEADERS")
        first_flags, _, fragments = self._block
        fragments += payload
        if len(fragments) > _HEADER_BLOCK_LIMIT:
            raise WireError("ENHANCE_YOUR_CALM", f"header block over {_HEADER_BLOCK_LIMIT} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._header_block(first_flags, stream_id, bytes(fragments))

    def _header_block(self, flags: int, stream_id: int, block: bytes) -> None:
        # Decoded even when the stream is refused: the compression state belongs to the connection.
        try:
            headers = self._decoder.decode(block, raw=True)
        except DECODE_ERRORS as error:
            raise WireError("COMPRESSION_ERROR", str(error)) from error
        stream = self._connection.streams.get(stream_id)
        if stream is None:
            stream = self._open(stream_id, headers)
        elif not flags & frames.END_STREAM:
            raise WireError("PROTOCOL_ERROR", "trailers without END_STREAM")
        if stream is not None and flags & frames.END_STREAM:
            self._complete(stream)

    def _open(self, stream_id: int, headers: list[Header]) -> Stream | None:
        """The new stream; None when it is refused, or lies above a GOAWAY."""
        connection = self._connection
        config = connection.application.config
        if stream_id <= self.highest:
            raise WireError("STREAM_CLOSED", f"HEADERS on closed stream {stream_id}")
        self.highest = stream_id
        for name, _, never_indexed in headers:
            if not never_indexed:
                if name == b":path":
                    self.paths_indexed += 1
                elif name == b"authorization":
                    self.authorizations_indexed += 1
        if stream_id > connection.last_allowed_stream:
            self.after_goaway += 1
            return None
        stream = Stream(stream_id, headers, connection.send_side.initial_window, config.initial_window_size)
        spent = (
            config.requests_per_connection is not None
            and connection.requests >= config.requests_per_connection
        )
        if spent and config.requests_per_connection_then == "goaway":
            # Below this stream, so that it is provably not processed.
            connection.go_away(stream_id - 2 if stream_id > 1 else 0, 0, b"", "when_done")
            self.after_goaway += 1
            return None
        if spent and config.requests_per_connection_then == "drop":
            connection.drop(rst=True)
            return None
        if spent or len(connection.streams) >= connection.cap.in_force(config.stream_limit_enforced):
            self.refused += 1
            connection.write(frames.rst_stream(stream_id, _REFUSED_STREAM))
            self._log_refused(stream)
            return None
        connection.requests += 1
        connection.streams[stream_id] = stream
        return stream

    def _log_refused(self, stream: Stream) -> None:
        try:
            request = read_request(stream.headers, 0)
        except KeyError:
            return
        self._connection.application.refused(self._connection, stream, request)

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        connection = self._connection
        if not stream_id or stream_id > self.highest:
            raise WireError("PROTOCOL_ERROR", f"DATA on idle stream {stream_id}")
        size = len(payload)
        connection.receive_window.take(size)
        stream = connection.streams.get(stream_id)
        if stream is None or stream.request is not None:
            return  # reset, refused or answered: what was on its way is lost
        if size > stream.receive_window:
            connection.reset(stream, _FLOW_CONTROL_ERROR)
            return
        stream.receive_window -= size
        data = unpadded(flags, payload)
        stream.body_bytes += len(data)
        if stream.body_bytes <= _KEPT_BODY_BYTES:
            stream.body.append(data)
        if flags & frames.END_STREAM:
            self._complete(stream)
        elif not connection.receive_window.held:
            self._top_up(stream)

    def _top_up(self, stream: Stream) -> None:
        """A body larger than the initial window still gets through, to be told PayloadTooLarge."""
        increment = self._connection.application.config.initial_window_size - stream.receive_window
        if increment > 0:
            stream.receive_window += increment
            self._connection.write(frames.window_update(stream.id, increment))

    def release_streams(self) -> None:
        for stream in self._connection.streams.values():
            if stream.request is None:
                self._top_up(stream)

    def _complete(self, stream: Stream) -> None:
        if stream.request is not None:
            raise WireError("STREAM_CLOSED", f"stream {stream.id} ended twice")
        try:
            stream.request = read_request(stream.headers, stream.body_bytes)
        except KeyError:  # no :method or no :path
            self._connection.reset(stream, _PROTOCOL_ERROR)
            return
        self._connection.application.requested(self._connection, stream, stream.request)

    def _settings(self, flags: int, payload: bytes) -> None:
        connection = self._connection
        if flags & frames.ACK:
            connection.cap.acknowledge()
            return
        self._settings_due = False
        for setting, value in read_settings(payload):
            if setting == frames.SETTING_INITIAL_WINDOW_SIZE:
                change = value - connection.send_side.initial_window
                connection.send_side.initial_window = value
                for stream in connection.streams.values():
                    stream.send_window += change
        connection.write(frames.SETTINGS_ACK)
        connection.send_waiting()

    def _window_update(self, stream_id: int, increment: int) -> None:
        connection = self._connection
        if not increment:
            raise WireError("PROTOCOL_ERROR", "WINDOW_UPDATE of 0")
        if stream_id:
            if (stream := connection.streams.get(stream_id)) is not None:
                stream.send_window += increment
        else:
            connection.send_side.window += increment
        connection.send_waiting()

    def _ping(self, flags: int, payload: bytes) -> None:
        connection = self._connection
        if flags & frames.ACK:
            connection.ping_acks += 1
            return
        connection.pings += 1
        if connection.application.config.answer_pings:
            connection.write(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _rst_stream(self, stream_id: int, code: int) -> None:
        if stream_id > self.highest:
            raise WireError("PROTOCOL_ERROR", f"RST_STREAM on idle stream {stream_id}")
        if (stream := self._connection.streams.get(stream_id)) is not None:
            self._connection.end(stream, "cancelled")
