"""How many connections there are, and which: opened one at a time, spread, replaced, never resent on.

On top of aioapns' pool class, of which the list of connections, `create_connection`, `discard_connection` and
`close` are left. Its `acquire` (connects under a lock without a deadline, polls every 10 ms) and its
`send_notification` (sends a push again after every lost connection) are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from typing import cast

from aioapns.connection import APNsBaseClientProtocol, APNsBaseConnectionPool

from common.logs import Logger
from common.outage import Outage
from drain.apns import events
from drain.apns.breaker import Breaker
from drain.apns.connect import ConnectError, connect
from drain.apns.model import ApnsTarget, SessionLimits
from drain.apns.protocol import ApnsConnection, ConnectionOwner


class ApnsPool(APNsBaseConnectionPool):
    """The connections of one session. Made inside the running loop; `keep` is its one task."""

    def __init__(
        self,
        owner: ConnectionOwner,
        target: ApnsTarget,
        limits: SessionLimits,
        starving: Callable[[float], bool],
    ) -> None:
        super().__init__(target.topic, limits.max_connections, max_connection_attempts=1)
        self.protocol_class = ApnsConnection
        self._owner = owner
        self._target = target
        self._limits = limits
        self._starving = starving
        """Whether pushes have been waiting for a free stream for too long."""
        self._wanted = asyncio.Event()
        self._empty = asyncio.Event()
        self._last_opened = -math.inf
        self.breaker = Breaker(limits.backoff_base, limits.backoff_cap, limits.calm_seconds)
        self._log = Logger(host=target.host, port=target.port, topic=target.topic)
        self._outage = Outage(self._log, events.APNS_UNREACHABLE, events.APNS_REACHED, self.loop.time)
        self.problem: ConnectError | None = None
        """Why there is no connection; None while connecting works."""
        self.connects = 0
        self.connect_failures = 0

    @property
    def open(self) -> list[ApnsConnection]:
        """All connections with a socket, those that only wait for answers too."""
        return cast("list[ApnsConnection]", self.connections)

    def usable(self) -> list[ApnsConnection]:
        """Connections that may get new pushes, now or when a stream is free again."""
        return [
            connection for connection in self.open if connection.retiring is None and not connection.suspect
        ]

    async def keep(self) -> None:
        """Open what is lacking, for ever. Ends only by cancellation, or by a fault of ours."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._lacking():
                wait = self.breaker.ready_at - self.loop.time()
                if wait > 0:
                    await asyncio.sleep(wait)
                else:
                    await self._open_one()

    def look(self) -> None:
        """Wake `keep` when a connection is lacking."""
        if self._lacking():
            self._wanted.set()

    def close_idle(self) -> None:
        """Connections beyond the first that carried nothing for an hour."""
        usable = self.usable()
        now = self.loop.time()
        for connection in usable[: len(usable) - 1]:
            idle = now - connection.streams.last_push >= self._limits.idle_seconds
            if idle and not connection.streams.flights:
                connection.retire("idle")

    async def leave_all(self) -> None:
        """Close every connection, within 2 * close_timeout. What is still on a stream is answered at once."""
        for connection in list(self.open):
            connection.retire("session closed")
            connection.leave()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._limits.close_timeout):
                    await self._empty.wait()
        for connection in list(self.open):
            if connection.transport is not None:
                connection.transport.abort()

    async def create_connection(self) -> ApnsConnection:
        """A connection whose peer has sent its SETTINGS. Raises ConnectError.

        Nothing is sent on one before: until then the limit of streams is not known, and a peer that refuses
        our certificate in TLS 1.3 says so only after the handshake.
        """
        max_age = self._limits.max_age * random.uniform(0.9, 1.1)
        connection = await connect(
            self._target,
            self._limits,
            lambda: ApnsConnection(self._owner, self._target, self._limits, max_age),
        )
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the result.
            async with asyncio.timeout(self._limits.handshake_timeout):
                await connection.ready
        except TimeoutError:
            connection.abort("no SETTINGS")
            raise ConnectError(f"no SETTINGS in {self._limits.handshake_timeout} s") from None
        except BaseException:
            connection.abort("given up")
            raise
        if connection.gone:  # SETTINGS and the end came in one piece.
            raise ConnectError(connection.ended_by, config=connection.streams.config_fault)
        return connection

    def discard_connection(self, connection: APNsBaseClientProtocol) -> None:
        """Forget a connection that ended, and let the breaker know how."""
        if connection not in self.connections or not isinstance(connection, ApnsConnection):
            return  # It never got as far as its SETTINGS: the attempt counts as failed.
        self.connections.remove(connection)
        if not self.connections:
            self._empty.set()
        now = self.loop.time()
        age = now - connection.opened_at
        self.breaker.ended(now, proven=connection.streams.proven, age=age, abruptly=connection.abrupt)
        self._log.emit(
            events.APNS_CONNECTION_ENDED,
            why=connection.ended_by,
            carried=connection.streams.carried,
            seconds=round(age, 1),
            left=len(self.connections),
        )
        if connection.streams.config_fault:
            self.problem = ConnectError(connection.ended_by, config=True)

    def _lacking(self) -> bool:
        now = self.loop.time()
        usable = self.usable()
        if len(self.connections) >= 2 * self.max_connections:
            return False  # Those that wait for answers must end first, at the latest at their drain deadline.
        if all(connection.retiring is not None for connection in self.open):
            return True
        rested = now - self._last_opened >= self._limits.grow_seconds
        if len(usable) < self.max_connections and rested and self._starving(now):
            return True
        return len(usable) <= self.max_connections and any(c.worn(now) for c in usable)

    async def _open_one(self) -> None:
        try:
            connection = await self.create_connection()
        except ConnectError as error:
            self.connect_failures += 1
            self.problem = error
            self.breaker.failed(self.loop.time())
            self._outage.failed(error)
            return
        self.connections.append(connection)
        self._empty.clear()
        self._last_opened = self.loop.time()
        self.connects += 1
        self.problem = None
        self._outage.worked()
        self._log.emit(events.APNS_CONNECTED, open=len(self.connections))
        worn = [c for c in self.usable() if c is not connection and c.worn(self.loop.time())]
        if worn:
            worn[0].retire("replaced after its time")
        self._owner.room_made()
