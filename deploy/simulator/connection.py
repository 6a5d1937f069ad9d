"""One HTTP/2 connection from the server's side: frames in, streams, answers out, and the handles of wire faults.

Frames are handled here and not by h2 or jh2 for two reasons: a protocol library refuses to send what a fault needs
(frames after GOAWAY, a stream that never ends), and it costs 220 (jh2) to 540 (h2) microseconds per request where
this file costs about 20. HPACK decoding is jh2's.
"""

import asyncio
import contextlib
import socket
import struct
import time
from typing import Final, Protocol, cast

from deploy.simulator import frames
from deploy.simulator.config import Config
from deploy.simulator.flow import ReceiveWindow, SendSide, StreamCap
from deploy.simulator.frames import MAX_STREAM_ID, Frame, FrameCutter, WireError
from deploy.simulator.receiver import Receiver
from deploy.simulator.request import Request
from deploy.simulator.stream import Stream
from deploy.simulator.tokens import ConnectionTokens

_LINGER_RST: Final = struct.pack("ii", 1, 0)


class Application(Protocol):
    """Who decides about requests. No method may raise; all are called from the event loop."""

    config: Config

    def opened(self, connection: "Connection") -> None: ...
    def closed(self, connection: "Connection") -> None: ...
    def requested(self, connection: "Connection", stream: Stream, request: Request) -> None: ...
    def refused(self, connection: "Connection", stream: Stream, request: Request) -> None: ...
    def ended(self, connection: "Connection", stream: Stream, outcome: str) -> None: ...
    def broke_protocol(self, connection: "Connection", error: WireError) -> None: ...


class Connection(asyncio.Protocol):
    """Life of a connection; what comes in is sorted by Receiver, which calls back into this class."""

    def __init__(self, application: Application, number: int, sock: socket.socket) -> None:
        config = application.config
        self.application = application
        self.number = number
        self.opened_at = time.time()
        self.transport: asyncio.Transport | None = None
        self.client_certificate = False
        self.alpn: str | None = None
        self.streams: dict[int, Stream] = {}
        self.cap = StreamCap()
        self.receive_window = ReceiveWindow(held=config.receive_window == "hold")
        self.send_side = SendSide()
        self.receiver = Receiver(self)
        self.tokens = ConnectionTokens()
        self.one_stream_until_accepted = config.start_with_one_stream
        self.last_allowed_stream = MAX_STREAM_ID
        self.muted = False
        self.reading = True
        self.closing = False
        self.requests = 0
        self.answered = 0
        self.errors = 0
        self.pings = 0
        self.ping_acks = 0
        self._socket = sock
        self._cutter = FrameCutter()
        self._unread: list[Frame] = []
        self._out: list[bytes] = []
        self._flush_planned = False
        self._close_when_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        config = self.application.config
        self.transport = cast(asyncio.Transport, transport)  # uvloop's TLS transport is one by behaviour only
        self.client_certificate = bool(transport.get_extra_info("peercert"))
        ssl_object = transport.get_extra_info("ssl_object")
        self.alpn = None if ssl_object is None else ssl_object.selected_alpn_protocol()
        self.application.opened(self)
        if config.accept == "close_after_handshake" or (config.require_alpn and self.alpn != "h2"):
            self.close()
            return
        streams = 1 if self.one_stream_until_accepted else config.max_concurrent_streams
        self.cap.announce(streams)
        self.write(
            frames.settings(
                {
                    frames.SETTING_MAX_CONCURRENT_STREAMS: streams,
                    frames.SETTING_INITIAL_WINDOW_SIZE: config.initial_window_size,
                    frames.SETTING_MAX_FRAME_SIZE: frames.FRAME_LIMIT,
                    frames.SETTING_MAX_HEADER_LIST_SIZE: 8000,
                }
            )
        )

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        self._flush_planned = True
        try:
            self._handle(self._cutter.cut(data))
        except WireError as error:
            self._fail(error)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        for stream in list(self.streams.values()):
            self.end(stream, "lost")
        self.application.closed(self)

    def _handle(self, received: list[Frame]) -> None:
        receive = self.receiver.receive
        for index, one in enumerate(received):
            if self.closing:
                return
            if not self.reading:
                self._unread.extend(received[index:])
                return
            receive(one)
        if increment := self.receive_window.due():
            self.write(frames.window_update(0, increment))

    def _fail(self, error: WireError) -> None:
        self.application.broke_protocol(self, error)
        self.write(frames.goaway(self.receiver.highest, frames.ERROR_CODES[error.code], error.why.encode()))
        self.close()

    # What leaves.

    def write(self, data: bytes) -> None:
        """Queues bytes; everything queued in one turn of the loop leaves in one write."""
        if self.muted or self.closing:
            return
        self._out.append(data)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flush_planned = False
        if self._out and self.transport is not None:
            self.transport.write(b"".join(self._out))
        self._out.clear()

    def answer(self, stream: Stream, block: bytes, chunks: list[bytes], finish: bool = True) -> bool:
        """HEADERS, then the chunks as DATA as far as the windows allow; False: some of it has to wait.

        No chunks: END_STREAM stands on HEADERS. `finish` False: END_STREAM never comes and the stream stays open.
        """
        if not chunks:
            flags = frames.END_HEADERS | (frames.END_STREAM if finish else 0)
            self.write(frames.frame(frames.HEADERS, flags, stream.id, block))
            if finish:
                self.forget(stream)
            return True
        self.write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.id, block))
        ready, complete = self.send_side.body(stream, chunks, finish)
        self.write(b"".join(ready))
        if complete and finish:
            self.forget(stream)
        return complete

    def send_waiting(self) -> None:
        """A window grew: bodies that had to wait may go."""
        ready, through = self.send_side.more()
        if ready:
            self.write(b"".join(ready))
        for one in through:
            if (stream := self.streams.get(one.id)) is not None:
                self.forget(stream)

    def limit_streams(self, streams: int) -> None:
        self.cap.announce(streams)
        self.write(frames.settings({frames.SETTING_MAX_CONCURRENT_STREAMS: streams}))

    def reset(self, stream: Stream, code: int, outcome: str = "reset") -> None:
        self.write(frames.rst_stream(stream.id, code))
        self.end(stream, outcome)

    def go_away(self, last_stream_id: int, code: int, debug: bytes, close: str) -> None:
        """Streams above the last id are never processed; `close`: now, when_done, never."""
        self.last_allowed_stream = min(self.last_allowed_stream, last_stream_id)
        for stream in [one for one in self.streams.values() if one.id > last_stream_id]:
            self.end(stream, "excluded")
        self.write(frames.goaway(last_stream_id, code, debug))
        if close == "now":
            self.close()
        elif close == "when_done":
            self._close_when_done = True
            self._close_if_done()

    # How streams and the connection end.

    def end(self, stream: Stream, outcome: str) -> None:
        """The stream ends without an answer."""
        self.forget(stream)
        self.application.ended(self, stream, outcome)

    def forget(self, stream: Stream) -> None:
        stream.open = False
        self.send_side.forget(stream.id)
        self.streams.pop(stream.id, None)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._close_when_done and not self.streams:
            self.close()

    def close(self) -> None:
        """In good order: what is queued, close_notify, FIN."""
        self.flush()
        self.closing = True
        if self.transport is not None:
            self.transport.close()

    def drop(self, rst: bool) -> None:
        """At once, with nothing said; `rst`: the peer sees a reset and not an end of stream."""
        self.closing = True
        if rst:
            with contextlib.suppress(OSError):  # The client has closed it a moment ago.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
        if self.transport is not None:
            self.transport.abort()

    def stop_reading(self) -> None:
        if self.transport is not None and self.reading:
            self.reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is None or self.reading or self.closing:
            return
        self.reading = True
        self.transport.resume_reading()
        unread, self._unread = self._unread, []
        try:
            self._handle(unread)
        except WireError as error:
            self._fail(error)

    def release_window(self) -> None:
        """Gives back all that was held back, on the connection and on its open streams."""
        self.receive_window.held = False
        if increment := self.receive_window.due(at_least=1):
            self.write(frames.window_update(0, increment))
        self.receiver.release_streams()

    def as_json(self) -> dict[str, object]:
        return {
            "connection": self.number,
            "opened_at": self.opened_at,
            "open": not self.closing,
            "alpn": self.alpn,
            "client_certificate": self.client_certificate,
            "requests": self.requests,
            "answered": self.answered,
            "refused": self.receiver.refused,
            "after_goaway": self.receiver.after_goaway,
            "errors": self.errors,
            "streams_open": len(self.streams),
            "bodies_waiting": self.send_side.waiting,
            "highest_stream_id": self.receiver.highest,
            "stream_limit": self.cap.announced,
            "stream_limit_acknowledged": self.cap.acknowledged,
            "receive_window": self.receive_window.available,
            "send_window": self.send_side.window,
            "pings": self.pings,
            "ping_acks": self.ping_acks,
            "client_goaway": self.receiver.client_goaway,
            "paths_indexed": self.receiver.paths_indexed,
            "authorizations_indexed": self.receiver.authorizations_indexed,
            "key_id": self.tokens.key_id,
            "muted": self.muted,
            "reading": self.reading,
        }
