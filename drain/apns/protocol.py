"""One connection to APNs: aioapns' protocol class with what it gets wrong on the wire mended.

Kept from aioapns: the class and its place in a pool (`is_busy`, `close`, `transport`, APNS_SERVER, APNS_PORT).
Replaced: everything between a push and its bytes (streams.py, http2.py), and its clock: connections are kept
and pinged instead of closed after 10 idle seconds.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from aioapns.connection import APNsTLSClientProtocol

from drain.apns.connect import ConnectError, describe, refused
from drain.apns.frames import PeerError
from drain.apns.model import ApnsTarget, SessionLimits
from drain.apns.streams import Owner, Streams


class ConnectionOwner(Owner, Protocol):
    """What the session is told."""

    def ended(self, connection: ApnsConnection) -> None: ...
    def wake_at(self, when: float) -> None: ...


class ApnsConnection(APNsTLSClientProtocol):
    """In `pool.connections` from its SETTINGS to its end. All methods run in the loop."""

    def __init__(
        self, owner: ConnectionOwner, target: ApnsTarget, limits: SessionLimits, max_age: float
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(target.topic, loop)
        self.APNS_SERVER, self.APNS_PORT = target.host, target.port
        self._owner = owner
        self._limits = limits
        self.opened_at = loop.time()
        self._wears_out_at = self.opened_at + max_age
        self.streams = Streams(owner, self, target.host, limits, self.opened_at)
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the peer's SETTINGS came; a ConnectError when the connection ended before them."""
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.retiring: str | None = None
        """Why it takes no new push any more."""
        self.gone = False
        """Every push has its reply; only the socket may still have to close."""
        self.ended_by = ""
        self.abrupt = False
        self.suspect = False
        """The peer owes answers and is silent: no new push until it speaks."""
        self._drain_by = math.inf
        self._paused = False
        self._ping_sent: float | None = None
        self._flush_due = False

    # What the session asks

    @property
    def free_streams(self) -> int:
        """How many pushes could be sent now, as far as streams go."""
        if self.retiring is not None or self.suspect or self._paused:
            return 0
        return self.streams.free

    @property
    def is_busy(self) -> bool:
        """aioapns' question: may no push be given to this connection now?"""
        return self.free_streams == 0

    def worn(self, now: float) -> bool:
        """Whether a successor should take over, while this one still works."""
        return now >= self._wears_out_at or self.streams.carried >= 0.9 * self._limits.requests_per_connection

    def check(self, now: float) -> float:
        """Do what is due by now; returns when to look again at the latest."""
        if self.gone:
            return math.inf
        due = self.streams.expire(now)
        if now >= self._drain_by:
            self.leave()
            return math.inf
        due = min(due, self._drain_by, self._check_life(now))
        self.flush_soon()
        return due

    def retire(self, why: str) -> None:
        """Take no new push; leave when the answers that are owed have come, or at the drain deadline."""
        if self.retiring is not None:
            return
        self.retiring = why
        self._drain_by = self.loop.time() + self._limits.drain_seconds
        self._owner.wake_at(self._drain_by)
        self.stream_ended()

    def leave(self) -> None:
        """Close. Pushes without an answer are told so at once."""
        if self.gone:
            return
        self._end(self.retiring or "closed")
        self.streams.http2.goaway(0)
        self.flush()
        self.close()

    def abort(self, why: str) -> None:
        """Drop the connection at once: the peer is dead or broke the protocol."""
        if self.gone:
            return
        self.abrupt = True
        self._end(why)
        if self.transport is not None:
            self.transport.abort()

    # What asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our preface; pushes wait for the peer's SETTINGS."""
        self.transport = transport  # type: ignore[assignment]
        self.streams.now = self.loop.time()
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Frames, in whatever pieces; those that follow a GOAWAY too."""
        self.streams.now = self.loop.time()
        if self._ping_sent is not None:
            self._ping_sent = None
            self.suspect = False
            limits = self._limits
            again = limits.ping_interval if self.streams.flights else limits.idle_ping_interval
            self._owner.wake_at(self.streams.now + again)
            self._owner.room_made()
        try:
            self.streams.http2.receive(data)
        except PeerError as error:
            self.streams.http2.goaway(error.code)
            self.flush()
            self.abort(f"protocol error: {error}")
            return
        self.flush_soon()

    def eof_received(self) -> None:
        """The peer closed; connection_lost follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, whoever brought it."""
        if not self.gone:
            self.abrupt = True
            self.streams.config_fault = self.streams.config_fault or refused(exc)
            self._end(f"connection lost: {describe(exc)}" if exc else "connection closed by APNs")
        self._owner.ended(self)

    def pause_writing(self) -> None:
        """The peer reads too slowly: no new push until the buffer is down."""
        self._paused = True

    def resume_writing(self) -> None:
        """See `pause_writing`."""
        self._paused = False
        self._owner.room_made()

    def flush(self) -> None:
        """Write what has gathered, in one piece."""
        self._flush_due = False
        if self.streams.http2.outgoing and self.transport is not None and not self.transport.is_closing():
            self.transport.write(self.streams.take_bytes())

    def flush_soon(self) -> None:
        """`flush` once in this turn of the loop, however many ask."""
        if not self._flush_due and self.streams.http2.outgoing:
            self._flush_due = True
            self.loop.call_soon(self.flush)

    # What the streams tell

    def settled(self) -> None:
        """SETTINGS came; the first make the connection usable."""
        if not self.ready.done():
            self.ready.set_result(None)

    def stream_ended(self) -> None:
        """A slot is free; a retiring connection may have been waiting for just this one."""
        if self.retiring is not None and not self.streams.flights:
            self.loop.call_soon(self.leave)
        self._owner.room_made()

    def _check_life(self, now: float) -> float:
        """RFC 9113, 6.7: whoever lives answers a PING, also when no push is answered."""
        heard = self.streams.now
        if self._ping_sent is not None:
            if now - self._ping_sent < self._limits.ping_timeout:
                return self._ping_sent + self._limits.ping_timeout
            self.abort(f"no sign of life for {now - heard:.0f} s")
            return math.inf
        interval, silent_since = self._limits.idle_ping_interval, heard
        if self.streams.flights:
            oldest = next(iter(self.streams.flights.values())).started
            interval, silent_since = self._limits.ping_interval, max(heard, oldest)
        if now - silent_since < interval:
            return silent_since + interval
        self.suspect = bool(self.streams.flights)
        self._ping_sent = now
        self.streams.http2.ping()
        return now + self._limits.ping_timeout

    def _end(self, why: str) -> None:
        """Once, at the first of leave, abort and connection_lost."""
        self.gone = True
        self.ended_by = why
        self.retiring = self.retiring or why
        if not self.ready.done():
            self.ready.set_exception(ConnectError(why, config=self.streams.config_fault))
        self.streams.end(why, self.loop.time())
