"""A TCP proxy on loopback that can fall silent: the faults of a network, for PostgreSQL, RabbitMQ and APNs alike.

It runs in a thread with a loop of its own, so a test may be synchronous or asynchronous, and may be blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")


class Direction(StrEnum):
    """Which way bytes go."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


BOTH = (Direction.TO_SERVER, Direction.TO_CLIENT)
_CHUNK = 65_536


class _Way:
    """What happens to bytes of one direction; owned by the proxy's loop."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.swallow = False
        self.delay = 0.0
        self.change: Callable[[bytes], bytes] | None = None
        self.bytes = 0


class SilentProxy:
    """Forwards ``127.0.0.1:port`` to a server, until told otherwise.

    Faults hold for the connections that are open and for those to come, until :meth:`forward`.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target = (host, port)
        self.host = "127.0.0.1"
        self.port = 0
        self.accepted = 0
        """Connections accepted since the start."""
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._ways: dict[Direction, _Way] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._do(self._open)

    def rewrite(self, url: str) -> str:
        """Return ``url`` with this proxy instead of its host and port."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> int:
        """Connections of clients that are open now."""
        return len(self._pairs)

    def forwarded(self, direction: Direction | str) -> int:
        """Bytes that went through one way since the start."""
        return self._ways[Direction(direction)].bytes

    def forward(self) -> None:
        """Undo every fault; bytes that were held back go on, those swallowed are lost."""
        self._do(self._forward)

    def stall(self, direction: Direction | str | None = None) -> None:
        """Stop forwarding (one way, or both) and keep every socket open; new connections are taken and left silent.

        Not even the end of the other side's connection is passed on: a cable is unplugged.
        """
        self._do(self._stall, _ways(direction))

    def swallow(self, direction: Direction | str | None = None) -> None:
        """Read and throw away what comes one way (or both); the sender believes that it was delivered."""
        self._do(self._set, _ways(direction), "swallow", True)

    def delay(self, seconds: float, direction: Direction | str | None = None) -> None:
        """Hold every piece back for so long, one way or both."""
        self._do(self._set, _ways(direction), "delay", seconds)

    def change(self, direction: Direction | str, edit: Callable[[bytes], bytes]) -> None:
        """Pass each piece of one way through ``edit``; what it returns is forwarded (nothing when empty)."""
        self._do(self._set, _ways(direction), "change", edit)

    def cut(self) -> int:
        """Reset (RST) all connections, on both sides; return how many. New ones are served."""
        count: int = self._do(self._cut)
        return count

    def refuse(self) -> None:
        """Close the listening socket: new connections are refused. Open ones stay; see :meth:`cut`."""
        self._do(self._refuse)

    def accept(self) -> None:
        """Listen again on the same port."""
        self._do(self._open)

    def close(self) -> None:
        """Reset everything and end the thread."""
        if self._loop.is_closed():
            return
        self._do(self._shutdown)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def __enter__(self) -> SilentProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _open(self) -> None:
        if not self._ways:
            self._ways = {direction: _Way() for direction in Direction}
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self.host, self.port, backlog=256)
            self.port = self._server.sockets[0].getsockname()[1]

    def _forward(self) -> None:
        for way in self._ways.values():
            way.swallow, way.delay, way.change = False, 0.0, None
            way.open.set()

    def _stall(self, directions: tuple[Direction, ...]) -> None:
        for direction in directions:
            self._ways[direction].open.clear()

    def _set(self, directions: tuple[Direction, ...], name: str, value: Any) -> None:
        for direction in directions:
            setattr(self._ways[direction], name, value)

    def _cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            for writer in pair:
                if writer is not None:
                    _reset(writer)
        return len(pairs)

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _shutdown(self) -> None:
        await self._refuse()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter | None] = (writer, None)
        self._pairs.add(pair)
        try:
            await self._ways[Direction.TO_SERVER].open.wait()
            upstream_reader, upstream = await asyncio.open_connection(*self.target)
            self._pairs.remove(pair)
            pair = (writer, upstream)
            self._pairs.add(pair)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(Direction.TO_SERVER, reader, upstream))
                both.create_task(self._pump(Direction.TO_CLIENT, upstream_reader, writer))
        except (OSError, ExceptionGroup):
            pass  # one side broke the connection: so does the proxy with the other
        except asyncio.CancelledError:
            pass  # only close() cancels; the streams' own callback would report it as an error
        finally:
            for end in pair:
                if end is not None:
                    _reset(end)
            self._pairs.discard(pair)
            self._tasks.discard(task)

    async def _pump(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        way = self._ways[direction]
        try:
            while True:
                await way.open.wait()
                piece = await reader.read(_CHUNK)
                await way.open.wait()  # the fault may have begun while the read waited
                if not piece:
                    break
                if way.delay:
                    await asyncio.sleep(way.delay)
                if way.change is not None:
                    piece = way.change(piece)
                if way.swallow or not piece:
                    continue
                writer.write(piece)
                way.bytes += len(piece)
                await writer.drain()
        except OSError:
            # The reader's side was reset. While the way is stalled nobody may learn of it.
            await way.open.wait()
            raise
        with contextlib.suppress(OSError):
            writer.write_eof()


def _ways(direction: Direction | str | None) -> tuple[Direction, ...]:
    return BOTH if direction is None else (Direction(direction),)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
