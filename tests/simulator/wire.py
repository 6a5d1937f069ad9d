"""A client that shows what really came over the wire: no library that hides, repairs or refuses frames."""

import asyncio
import json
import ssl
import uuid
from dataclasses import dataclass, field
from typing import Any

from jh2.hpack import Decoder, Encoder

from deploy.simulator import frames
from deploy.simulator.frames import Frame, FrameCutter
from deploy.simulator.process import Ready
from deploy.simulator.provider import provider_token

DEVICE = "ab" * 32
PAYLOAD = b'{"aps":{"alert":"hello"}}'
TIMEOUT = 5.0


@dataclass
class Answer:
    """Everything one stream received."""

    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False
    ended_on_headers: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[":status"])

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.chunks))

    @property
    def reason(self) -> str | None:
        return self.json["reason"] if self.chunks else None


@dataclass
class GoAway:
    last_stream_id: int
    code: int
    debug: bytes


class Peer:
    """One client connection. Acknowledges SETTINGS and PING; tops up windows only when told (`window`)."""

    def __init__(self, ready: Ready, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ready = ready
        self._reader = reader
        self.writer = writer
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._cutter = FrameCutter()
        self._cutter.cut(frames.PREFACE)
        self.token = provider_token(ready.key_file, ready.key_id, ready.team_id)
        self.frames: list[Frame] = []
        self.answers: dict[int, Answer] = {}
        self.settings: list[dict[int, int]] = []
        self.goaways: list[GoAway] = []
        self.window_updates: list[tuple[int, int]] = []
        self.pings_acknowledged: list[bytes] = []
        self.closed: str | None = None
        self.acknowledge_settings = True
        self._changed = asyncio.Condition()
        self._next_stream = 1
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        ready: Ready,
        settings: dict[int, int] | None = None,
        window: int = 0,
        acknowledge_settings: bool = True,
        **tls: Any,
    ) -> "Peer":
        reader, writer = await open_tls(ready, **tls)
        peer = cls(ready, reader, writer)
        peer.acknowledge_settings = acknowledge_settings
        peer.send(frames.PREFACE, frames.settings(settings or {}))
        if window:
            peer.send(frames.window_update(0, window))
        return peer

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    def headers(self, device: str = DEVICE, **changes: str | None) -> list[tuple[str, str]]:
        """A good alert push; keyword `apns_topic="x"` replaces or adds a header, None takes it away."""
        headers: dict[str, str | None] = {
            ":method": "POST",
            ":scheme": "https",
            ":path": f"/3/device/{device}",
            ":authority": "localhost",
            "apns-id": str(uuid.uuid4()),
            "apns-topic": self._ready.topics[0],
            "apns-push-type": "alert",
            "apns-priority": "10",
            "authorization": f"bearer {self.token}",
        }
        for name, value in changes.items():
            known = name.replace("_", "-")
            headers[f":{name}" if f":{name}" in headers else known] = value
        return [(name, value) for name, value in headers.items() if value is not None]

    def push(
        self,
        device: str = DEVICE,
        body: bytes = PAYLOAD,
        extra: tuple[tuple[str, str], ...] = (),
        send: bool = True,
        **changes: str | None,
    ) -> int:
        """Writes one request; its stream id. `send` False: only HEADERS, without END_STREAM."""
        stream = self._next_stream
        self._next_stream += 2
        self.answers[stream] = Answer()
        block = self._encoder.encode([*self.headers(device, **changes), *extra])
        ends = frames.END_STREAM if not body else 0
        self.send(frames.frame(frames.HEADERS, frames.END_HEADERS | ends, stream, block))
        if body and send:
            self.data(stream, body)
        return stream

    def data(self, stream: int, body: bytes, end: bool = True) -> None:
        pieces = [body[at : at + frames.FRAME_LIMIT] for at in range(0, len(body), frames.FRAME_LIMIT)]
        for index, piece in enumerate(pieces):
            last = end and index == len(pieces) - 1
            self.send(frames.frame(frames.DATA, frames.END_STREAM if last else 0, stream, piece))

    async def until(self, condition: Any, timeout: float = TIMEOUT) -> None:
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(condition)

    async def answer(self, stream: int, timeout: float = TIMEOUT) -> Answer:
        answer = self.answers[stream]
        await self.until(lambda: answer.ended or answer.reset is not None or self.closed is not None, timeout)
        assert answer.ended or answer.reset is not None, f"closed without an answer: {self.closed}"
        return answer

    async def ask(self, device: str = DEVICE, body: bytes = PAYLOAD, **changes: Any) -> Answer:
        return await self.answer(self.push(device, body, **changes))

    async def nothing_for(self, seconds: float, stream: int) -> None:
        await asyncio.sleep(seconds)
        answer = self.answers[stream]
        assert not answer.ended
        assert answer.reset is None

    async def alive(self) -> None:
        """A PING is answered: everything that was sent before it has been seen."""
        mark = uuid.uuid4().bytes[:8]
        self.send(frames.frame(frames.PING, 0, 0, mark))
        await self.until(lambda: mark in self.pings_acknowledged)

    async def gone(self, timeout: float = TIMEOUT) -> str:
        await self.until(lambda: self.closed is not None, timeout)
        assert self.closed is not None
        return self.closed

    async def close(self) -> None:
        self._reading.cancel()
        self.writer.transport.abort()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(65_536):
                for frame in self._cutter.cut(data):
                    self._take(frame)
                async with self._changed:
                    self._changed.notify_all()
            self.closed = "eof"
        except (OSError, asyncio.IncompleteReadError) as error:
            self.closed = type(error).__name__
        async with self._changed:
            self._changed.notify_all()

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        kind, flags, stream, payload = frame
        answer = self.answers.get(stream)
        if kind == frames.HEADERS and answer is not None:
            answer.headers = dict(self._decoder.decode(payload))
            answer.ended = answer.ended_on_headers = bool(flags & frames.END_STREAM)
        elif kind == frames.DATA and answer is not None:
            answer.chunks.append(payload)
            answer.ended = bool(flags & frames.END_STREAM)
        elif kind == frames.RST_STREAM and answer is not None:
            answer.reset = int.from_bytes(payload)
        elif kind == frames.GOAWAY:
            self.goaways.append(
                GoAway(int.from_bytes(payload[:4]), int.from_bytes(payload[4:8]), payload[8:])
            )
        elif kind == frames.WINDOW_UPDATE:
            self.window_updates.append((stream, frames.read_word(payload)))
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self.settings.append(dict(frames.read_settings(payload)))
            if self.acknowledge_settings:
                self.send(frames.SETTINGS_ACK)
        elif kind == frames.PING:
            if flags & frames.ACK:
                self.pings_acknowledged.append(payload)
            else:
                self.send(frames.frame(frames.PING, frames.ACK, 0, payload))


def tls_context(ready: Ready, alpn: bool = True, client_cert: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ready.ca_file)
    if alpn:
        context.set_alpn_protocols(["h2"])
    if client_cert is not None:
        context.load_cert_chain(client_cert)
    return context


async def open_tls(
    ready: Ready, name: str = "localhost", alpn: bool = True, client_cert: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = tls_context(ready, alpn, client_cert)
    return await asyncio.open_connection(
        ready.host, ready.port, ssl=context, server_hostname=name, ssl_shutdown_timeout=0.2
    )
