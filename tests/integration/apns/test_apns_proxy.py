"""A CONNECT proxy between drain and APNs (aioapns#27: it cannot work, and hangs holding the pool's lock)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from deploy.simulator.client import SimulatorClient
from drain.apns.model import NotSent
from tests.integration.apns.conftest import Courier, until
from tests.integration.apns.test_apns_session import statuses


class ConnectProxy:
    """Tunnels to where it is asked to, with the words and the habits that are set on it."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 Connection established\r\n\r\n"
        self.password: str | None = None
        self.in_pieces = False
        self.silent = False
        self.asked: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(request)
            if self.silent:
                await reader.read()
                return
            wanted = base64.b64encode(f"user:{self.password}".encode())
            if self.password is not None and b"Proxy-Authorization: Basic " + wanted not in request:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                return
            pieces = [self.answer[i : i + 3] for i in range(0, len(self.answer), 3)]
            for piece in pieces if self.in_pieces else [self.answer]:
                writer.write(piece)
                await asyncio.sleep(0.001)
            if b" 200" not in self.answer:
                return
            host, _, port = request.split(b" ")[1].decode().rpartition(":")
            there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pipe(reader, there[1]), _pipe(there[0], writer))

    async def run(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(_closing(self.serve(reader, writer), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _closing(serving: Coroutine[object, object, None], writer: asyncio.StreamWriter) -> None:
    try:
        await serving
    finally:
        writer.close()


Url = Callable[..., str]


@pytest.fixture
async def tunnel() -> AsyncIterator[ConnectProxy]:
    proxy, ready, stop = ConnectProxy(), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(proxy.run(ready, stop))
    await ready.wait()
    yield proxy
    stop.set()
    await running


@pytest.mark.parametrize("words", ["200 Connection established", "200 OK", "200 Connected", "200"])
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_proxy_that_says_yes_in_any_words(
    tunnel: ConnectProxy, courier: Courier, words: str, in_pieces: bool
) -> None:
    tunnel.answer = f"HTTP/1.1 {words}\r\nVia: some proxy\r\n\r\n".encode()
    tunnel.in_pieces = in_pieces
    session = await courier.session(courier.target(proxy_url=f"http://127.0.0.1:{tunnel.port}"))
    assert statuses(await courier.send(session, courier.pushes(20))) == [200] * 20
    assert tunnel.asked[0].startswith(f"CONNECT localhost:{courier.ready.port} HTTP/1.1\r\n".encode())
    await session.close(1.0)


async def test_a_proxy_that_wants_a_password(tunnel: ConnectProxy, courier: Courier) -> None:
    tunnel.password = "p@ss word"
    url = f"http://user:p%40ss%20word@127.0.0.1:{tunnel.port}"
    session = await courier.session(courier.target(proxy_url=url))
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert "p%40ss" not in repr(courier.target(proxy_url=url))
    await session.close(1.0)


async def test_a_proxy_that_refuses_our_password_is_ours_to_mend(
    tunnel: ConnectProxy, courier: Courier
) -> None:
    tunnel.password = "other"
    target = courier.target(proxy_url=f"http://user:secret@127.0.0.1:{tunnel.port}")
    session = await courier.session(target, connected=False)
    [reply] = await courier.send(session, courier.pushes(1), within=0.5)
    assert isinstance(reply, NotSent)
    assert reply.config
    assert "407" in reply.why
    assert "secret" not in reply.why


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 502 Bad Gateway\r\n\r\n", b"", b"nonsense\r\n\r\n", b"x" * 20_000]
)
async def test_a_proxy_that_cannot_fails_fast(tunnel: ConnectProxy, courier: Courier, answer: bytes) -> None:
    tunnel.answer = answer
    target = courier.target(proxy_url=f"http://127.0.0.1:{tunnel.port}")
    session = await courier.session(target, connected=False)
    [reply] = await courier.send(session, courier.pushes(1), within=0.5)
    assert isinstance(reply, NotSent)
    assert not reply.config


async def test_a_proxy_that_says_nothing_is_given_up_at_the_deadline(
    tunnel: ConnectProxy, courier: Courier
) -> None:
    tunnel.silent = True
    target = courier.target(proxy_url=f"http://127.0.0.1:{tunnel.port}")
    session = await courier.session(target, connected=False, connect_timeout=0.2)
    await until(lambda: session.connect_failures > 0, timeout=2)
    assert "no connection to 127.0.0.1" in str(session.problem)
    tunnel.silent = False
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    await session.close(1.0)


@pytest.mark.parametrize(
    "url", ["socks5://127.0.0.1:1080", "127.0.0.1:3128", "http://", "http://h:99999", "http://h:x"]
)
async def test_a_proxy_url_that_is_none_is_not_quoted(
    courier: Courier, apns: SimulatorClient, url: str
) -> None:
    session = await courier.session(courier.target(proxy_url=url), connected=False)
    await until(lambda: session.problem)
    assert str(session.problem).startswith("proxy URL: ")
    assert url == "http://" or url not in str(session.problem)
