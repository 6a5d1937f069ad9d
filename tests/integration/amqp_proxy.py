"""A TCP proxy before RabbitMQ that reads the broker's frames: it can hold them, drop them by method, or cut.

What a plain proxy can not do is lose one kind of frame, as in the reports of confirms that never came
(OpenSDN-io/community#129, ruby-amqp/bunny#425).
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from typing import Any

from pamqp.exceptions import UnmarshalingException
from pamqp.frame import unmarshal
from yarl import URL


class AmqpProxy:
    """Between `url` and the broker at `target`. Start it with `async with`."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._target = URL(target)
        self._tls = tls
        self.swallow: Callable[[Any], bool] = lambda _: False  # frames of the broker that get lost
        self.deaf = False  # nothing is forwarded either way, nothing is closed
        self.refuse = False  # new connections are closed at once
        self.accepted = 0
        self.sent: list[bytes] = []  # what clients wrote, as the socket gave it
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waking = asyncio.Event()

    async def __aenter__(self) -> AmqpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """The broker's URL by way of this proxy."""
        scheme = "amqps" if self._tls else "amqp"
        return str(self._target.with_scheme(scheme).with_host("127.0.0.1").with_port(self.port))

    @property
    def open_connections(self) -> int:
        """Connections that neither side has closed."""
        return sum(not writer.is_closing() for writer in self._writers) // 2

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hear(self) -> None:
        """Forward again, from now on and what was held."""
        self.deaf = False
        self._waking.set()
        self._waking = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refuse:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:  # the broker itself is down
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._up(reader, far_writer), self._down(far_reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, far_writer):
                each.transport.abort()
                self._writers.discard(each)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            await self._awake()
            self.sent.append(data)
            writer.write(data)
        writer.transport.abort()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(7)
            data = head + await reader.readexactly(struct.unpack(">BHI", head)[2] + 1)
            await self._awake()
            try:
                frame = unmarshal(data)[2]
            except UnmarshalingException:
                frame = None
            if not self.swallow(frame):
                writer.write(data)

    async def _awake(self) -> None:
        while self.deaf:
            await self._waking.wait()
