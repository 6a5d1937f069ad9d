"""Lets exactly so many publishes through to the broker, and no byte after them: a network that dies mid-batch."""

from __future__ import annotations

import struct
import threading

PROTOCOL_HEADER = 8
FRAME_HEADER = 7
METHOD, HEADER, BODY = 1, 2, 3
PUBLISH = b"\x00\x3c\x00\x28\x00\x00"


class PublishGate:
    """An edit of a proxy's way to the server. ``reached`` is set when the last publish went through."""

    def __init__(self, publishes: int, exchange: str = "events") -> None:
        self._left = publishes
        self._method = PUBLISH + bytes([len(exchange)]) + exchange.encode()
        self._buffer = b""
        self._started = False
        self._shut = False
        self._owed = 0
        self.reached = threading.Event()

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes of ``data`` that go on."""
        self._buffer += data
        passed = b""
        if not self._started:
            if len(self._buffer) < PROTOCOL_HEADER:
                return b""
            passed, self._buffer = self._buffer[:PROTOCOL_HEADER], self._buffer[PROTOCOL_HEADER:]
            self._started = True
        while (frame := self._next_frame()) is not None:
            passed += b"" if self._shut else self._pass(frame)
        return passed

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < FRAME_HEADER:
            return None
        size = struct.unpack(">I", self._buffer[3:7])[0] + FRAME_HEADER + 1
        if len(self._buffer) < size:
            return None
        frame, self._buffer = self._buffer[:size], self._buffer[size:]
        return frame

    def _pass(self, frame: bytes) -> bytes:
        if frame[0] == METHOD and frame[7:].startswith(self._method):
            if self._left == 0:
                self._shut = True
                return b""
            self._left -= 1
        if frame[0] == HEADER:
            self._owed = struct.unpack(">Q", frame[11:19])[0]
        if frame[0] == BODY:
            self._owed -= len(frame) - FRAME_HEADER - 1
        if self._left == 0 and frame[0] in (HEADER, BODY) and self._owed == 0:
            self.reached.set()
        return frame
