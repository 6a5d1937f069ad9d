"""The listening socket: who gets in, how slowly, with which certificate.

An accept loop of its own, because asyncio's server can neither refuse, hold nor delay a connection before TLS.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

from deploy.simulator.connection import Connection
from deploy.simulator.simulator import Simulator

_BACKLOG: Final = 1024
_HANDSHAKE_SECONDS: Final = 60.0
_VERIFY: Final = {"no": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Listener:
    """`tcp_accepted` counts sockets, `handshakes_failed` those that never became a connection."""

    def __init__(
        self,
        simulator: Simulator,
        context: Callable[[str], ssl.SSLContext],
        address: tuple[str, int],
        receive_buffer: int | None,
    ) -> None:
        self.address = address
        self.tcp_accepted = 0
        self.handshakes_failed = 0
        self.last_handshake_error: str | None = None
        self._simulator = simulator
        self._context = context
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._receive_buffer = receive_buffer
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._held: list[socket.socket] = []
        self._number = 0

    @property
    def listening(self) -> bool:
        return self._socket is not None

    async def start(self) -> None:
        """Binds the port, whatever `accept` says, so that it is known; OSError when it is taken."""
        self._listen()
        await self.apply()

    async def apply(self) -> None:
        """Bring the socket in line with the configuration: listening unless `accept` is off."""
        config = self._simulator.config
        if config.accept == "off":
            await self._stop_listening()
        elif self._socket is None:
            self._listen()
        if config.accept != "hold":
            for held in self._held:
                held.close()
            self._held.clear()

    def forget_traffic(self) -> None:
        self.tcp_accepted = 0
        self.handshakes_failed = 0
        self.last_handshake_error = None

    async def close(self) -> None:
        """Stops listening and ends every connection in good order, within a second."""
        await self._stop_listening()
        for connection in list(self._simulator.connections.values()):
            connection.close()
        for task in self._serving:
            task.cancel()
        for held in self._held:
            held.close()
        deadline = asyncio.get_running_loop().time() + 1.0
        while self._simulator.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._simulator.connections.values()):
            connection.drop(rst=False)

    def _listen(self) -> None:
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._receive_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        listening.bind(self.address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self.address = listening.getsockname()[:2]
        self._socket = listening
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening))

    async def _stop_listening(self) -> None:
        """When this returns the port refuses connections."""
        accepting, self._accepting, self._socket = self._accepting, None, None
        if accepting is not None:
            accepting.cancel()
            await asyncio.wait([accepting])

    async def _accept(self, listening: socket.socket) -> None:
        with listening:  # closed by the task that waits on it, so that its number is not reused meanwhile
            await self._accept_all(listening)

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listening)
            self.tcp_accepted += 1
            accepted.setblocking(False)
            how = self._simulator.config.accept
            if how == "close":
                accepted.close()
            elif how == "reset":
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                accepted.close()
            elif how == "hold":
                self._held.append(accepted)
            else:
                task = loop.create_task(self._serve(accepted))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        config = self._simulator.config
        try:
            if config.handshake_delay_seconds:
                await asyncio.sleep(config.handshake_delay_seconds)
            self._number += 1
            number = self._number
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._simulator, number, accepted),
                accepted,
                ssl=self._current_context(),
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as error:  # TLS errors and timeouts are OSErrors too
            self.handshakes_failed += 1
            self.last_handshake_error = str(error)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _current_context(self) -> ssl.SSLContext:
        config = self._simulator.config
        context = self._contexts.get(config.certificate)
        if context is None:
            context = self._contexts[config.certificate] = self._context(config.certificate)
        context.verify_mode = _VERIFY[config.client_certificate]
        return context
