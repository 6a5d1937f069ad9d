"""The silent proxy does to a connection what a broken network does."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from deploy.local.proxy import Direction, SilentProxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request: socket.socket
        try:
            while data := self.request.recv(65536):
                self.server.received += data  # type: ignore[attr-defined]
                self.request.sendall(data)
        except OSError:
            pass


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    received = b""


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxied(server: EchoServer) -> Iterator[SilentProxy]:
    with SilentProxy(server.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def client(proxied: SilentProxy) -> Iterator[socket.socket]:
    with connect(proxied) as client:
        assert ask(client, b"hello") == b"hello"
        yield client


def connect(proxy: SilentProxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), 2)


def ask(client: socket.socket, data: bytes, timeout: float = 2.0) -> bytes:
    client.sendall(data)
    client.settimeout(timeout)
    answer = b""
    while len(answer) < len(data):
        piece = client.recv(65536)
        if not piece:
            break
        answer += piece
    return answer


def silent(client: socket.socket, timeout: float = 0.2) -> bool:
    client.settimeout(timeout)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    return False


def test_forwards_much_and_counts_it(proxied: SilentProxy, client: socket.socket) -> None:
    data = bytes(range(256)) * 8000
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    answer = b""
    while len(answer) < len(data):
        answer += client.recv(1 << 20)
    sender.join()
    assert answer == data
    assert proxied.forwarded(Direction.TO_SERVER) == len(data) + 5
    assert (proxied.connections, proxied.accepted) == (1, 1)


@pytest.mark.parametrize("direction", [None, "to_server", "to_client"])
def test_stall_is_silent_with_open_sockets_and_nothing_is_lost(
    proxied: SilentProxy, server: EchoServer, client: socket.socket, direction: str | None
) -> None:
    proxied.stall(direction)
    client.sendall(b"lost?")
    assert silent(client)
    assert server.received == (b"hellolost?" if direction == "to_client" else b"hello")
    proxied.forward()
    assert client.recv(5) == b"lost?"


def test_stalled_proxy_takes_new_connections_and_leaves_them_silent(proxied: SilentProxy) -> None:
    proxied.stall()
    with connect(proxied) as late:
        late.sendall(b"x")
        assert silent(late)
        proxied.forward()
        late.settimeout(2)
        assert late.recv(1) == b"x"


def test_stall_hides_the_end_of_the_server(
    proxied: SilentProxy, server: EchoServer, client: socket.socket
) -> None:
    proxied.stall()
    server.shutdown()
    server.server_close()
    assert silent(client)


def test_swallow_makes_the_sender_believe(
    proxied: SilentProxy, server: EchoServer, client: socket.socket
) -> None:
    proxied.swallow("to_client")
    client.sendall(b"gone")
    assert silent(client)
    assert server.received == b"hellogone"
    proxied.forward()
    assert ask(client, b"back") == b"back"


def test_cut_resets_both_sides_and_serves_the_next(proxied: SilentProxy, client: socket.socket) -> None:
    assert proxied.cut() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with connect(proxied) as following:
        assert ask(following, b"again") == b"again"


def test_cut_ends_a_stalled_connection(proxied: SilentProxy, client: socket.socket) -> None:
    proxied.stall()
    assert proxied.cut() == 1
    client.settimeout(2)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    deadline = time.monotonic() + 2
    proxied.forward()
    while proxied.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert proxied.connections == 0


def test_refuse_lets_open_connections_live_and_accept_undoes_it(
    proxied: SilentProxy, client: socket.socket
) -> None:
    port = proxied.port
    proxied.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxied)
    assert ask(client, b"still") == b"still"
    proxied.accept()
    assert proxied.port == port
    with connect(proxied) as following:
        assert ask(following, b"again") == b"again"


def test_delay_holds_back(proxied: SilentProxy, client: socket.socket) -> None:
    proxied.delay(0.2, "to_client")
    began = time.monotonic()
    assert ask(client, b"slow") == b"slow"
    assert 0.2 <= time.monotonic() - began < 2


def test_change_edits_one_way(proxied: SilentProxy, server: EchoServer, client: socket.socket) -> None:
    proxied.change("to_server", lambda piece: piece.replace(b"a", b"b"))
    assert ask(client, b"banana") == b"bbnbnb"


def test_end_of_the_server_reaches_the_client(proxied: SilentProxy, client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    client.settimeout(2)
    assert client.recv(1) == b""


def test_nobody_behind_the_proxy_breaks_the_connection() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with SilentProxy(reserved.getsockname()[1]) as proxy, connect(proxy) as client:
            client.settimeout(2)
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_rewrite_changes_host_and_port_only(proxied: SilentProxy) -> None:
    port = proxied.port
    assert (
        proxied.rewrite("amqp://guest:guest@localhost:5672/my%20vhost")
        == f"amqp://guest:guest@127.0.0.1:{port}/my%20vhost"
    )
    assert (
        proxied.rewrite("postgresql://u@h/db?sslmode=disable")
        == f"postgresql://u@127.0.0.1:{port}/db?sslmode=disable"
    )


def test_close_ends_the_thread(server: EchoServer) -> None:
    before = threading.active_count()
    proxy = SilentProxy(server.server_address[1])
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    deadline = time.monotonic() + 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
