"""The session of one app with APNs: what drain's loop talks to.

    submit -> queue -> a free stream of some connection -> one reply

There is no task and no timer for a push: one call in the loop sends what waits, one timer looks at the oldest
push of each connection and at the queue, one task opens connections.

A crash here loses nothing: rows are claimed in the ledger, and their leases run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from common.logs import Logger
from drain.apns import events
from drain.apns.connect import ConnectError
from drain.apns.flight import Flight, OnReply
from drain.apns.model import ApnsTarget, NotSent, Push, Reply, SessionLimits
from drain.apns.pool import ApnsPool
from drain.apns.protocol import ApnsConnection
from drain.apns.token import ProviderToken, ProviderTokens

LOOK_SECONDS = 15.0
"""The clockwork runs at least this often: worn and idle connections need no better."""
LEAST_TICK = 0.01


class ApnsSession:
    """Connections, queue and token of one app.

    Raises KeyFileError (a ValueError) when it is made and the key file cannot be used. `tokens` is shared by the
    sessions of a process, so that one team and key has one token.
    """

    def __init__(
        self, target: ApnsTarget, limits: SessionLimits, tokens: ProviderTokens | None = None
    ) -> None:
        self.target = target
        self.limits = limits
        self._token: ProviderToken | None = None
        if target.key_file is not None:
            self._token = (tokens or ProviderTokens()).of(
                target.team_id or "", target.key_id or "", target.key_file
            )
        self._generation = self._token.generation if self._token else 0
        self._renewing = False
        """A refused token was replaced and no good answer came since."""
        self._queue: deque[Flight] = deque()
        self._ids: set[str] = set()
        """Of everything in the queue and on streams: one apns-id is never in flight twice."""
        self._replies: deque[tuple[Flight, Reply]] = deque()
        self._starved_since: float | None = None
        self._pump_due = False
        self._closing = False
        self._closed = False
        self._pool: ApnsPool | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._quiet = asyncio.Event()
        self._log = Logger(topic=target.topic)

    # What the loop asks

    @property
    def connected(self) -> bool:
        """Whether some connection takes pushes."""
        return bool(self._pool and self._pool.usable())

    @property
    def in_flight(self) -> int:
        """Pushes on streams."""
        return len(self._ids) - len(self._queue)

    @property
    def queued(self) -> int:
        """Pushes that wait for a stream."""
        return len(self._queue)

    @property
    def open_connections(self) -> int:
        """Sockets, those of connections that only wait for answers too."""
        return len(self._pool.open) if self._pool else 0

    @property
    def free_streams(self) -> int:
        """Pushes that could be written at once on the connections that stand."""
        return sum(connection.free_streams for connection in self._pool.open) if self._pool else 0

    @property
    def connects(self) -> int:
        """Connections made so far."""
        return self._pool.connects if self._pool else 0

    @property
    def connect_failures(self) -> int:
        """Attempts to connect that failed so far."""
        return self._pool.connect_failures if self._pool else 0

    @property
    def token_changes(self) -> int:
        """Provider tokens taken into use so far; 0 with a client certificate."""
        return self._token.changes if self._token else 0

    @property
    def problem(self) -> str | None:
        """Why connecting, or reading a changed key file, fails right now; for status and readiness."""
        if self._pool and self._pool.problem:
            return str(self._pool.problem)
        return self._token.problem if self._token else None

    def raise_if_broken(self) -> None:
        """Raise what ended the task that opens connections: a fault of ours, after which nothing heals."""
        if self._keeper is not None and self._keeper.done() and not self._keeper.cancelled():
            self._keeper.result()

    async def start(self) -> None:
        """Begin to connect in the background. Never raises because APNs is away."""
        self._pool = ApnsPool(self, self.target, self.limits, self._starving)
        self._keeper = asyncio.create_task(self._pool.keep(), name=f"apns {self.target.topic}")
        self._tick()

    def submit(self, push: Push, start_by: float, on_reply: OnReply) -> None:
        """Queue a push. `on_reply(push, reply)` is called exactly once, later, from the loop.

        It is written before `start_by` (loop.time()) or never, and then the reply is NotSent.
        """
        flight = Flight(push, start_by, on_reply)
        if self._closing:
            self._reply(flight, NotSent("session closed"))
        elif push.notification_id in self._ids:
            self._reply(flight, NotSent("the same notification_id is already in flight"))
        else:
            self._ids.add(push.notification_id)
            self._queue.append(flight)
            self.wake_at(start_by)
            self.room_made()

    def recall(self, why: str) -> None:
        """Take back every push that is not written yet: each is answered NotSent."""
        while self._queue:
            self.finished(self._queue.popleft(), NotSent(why))

    async def close(self, timeout: float) -> None:
        """Wait for the answers that are owed, up to `timeout` seconds; then end everything.

        Every push has its reply when this returns: queued ones NotSent at once, those without an answer
        MaybeDelivered. Safe to call twice.
        """
        self._closing = True
        self.recall("session closed")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._ids:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._quiet.wait()
        if self._pool is not None:
            await self._pool.leave_all()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._deliver()

    # What the connections tell

    def finished(self, flight: Flight, reply: Reply) -> None:
        """The one end of every push."""
        self._ids.discard(flight.push.notification_id)
        self._reply(flight, reply)
        if self._closing and not self._ids:
            self._quiet.set()

    def room_made(self) -> None:
        """A push may be sendable now: look once in this turn of the loop."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def good_answer(self, flight: Flight) -> None:
        """Token and server are sound."""
        if self._pool is not None:
            self._pool.breaker.proven()
        if flight.renewed:
            self._renewing = False

    def token_refused(self, flight: Flight, reason: str) -> None:
        """The connection retires by itself; here the token is mended, once.

        Refused again before any good answer, it is not the token: the reply says `renewed`, and the loop pauses.
        """
        if self._token is not None and flight.authorization is not None:
            if reason == "TooManyProviderTokenUpdates":
                self._token.step_back(flight.authorization)
            elif reason == "ExpiredProviderToken":
                self._token.renew(flight.authorization)
        if reason != "TooManyProviderTokenUpdates" and not self._renewing:
            self._renewing = True
            self._log.emit(events.APNS_TOKEN_REFUSED, reason=reason)

    def calm(self) -> None:
        """APNs said ENHANCE_YOUR_CALM."""
        if self._pool is not None:
            self._pool.breaker.calm(asyncio.get_running_loop().time())

    def ended(self, connection: ApnsConnection) -> None:
        """A connection is gone, and all of its pushes have their replies."""
        if self._pool is not None:
            self._pool.discard_connection(connection)
        self.room_made()

    # The clockwork

    def _pump(self) -> None:
        """Send what waits on the connections that have room, evenly, and write each of them once."""
        self._pump_due = False
        pool = self._pool
        if pool is None or self._closing:
            return
        now = asyncio.get_running_loop().time()
        self._look_at_key(pool)
        ready = [connection for connection in pool.open if not connection.is_busy] if self._queue else []
        if ready:
            authorization = self._token.header() if self._token else None
            while self._queue and ready:
                ready.sort(key=lambda connection: len(connection.streams.flights))
                share = -(-len(self._queue) // len(ready))
                taken = [
                    connection.streams.take_from(self._queue, share, now, authorization, self._renewing)
                    for connection in ready
                ]
                if not any(taken):
                    break  # Streams are free, but no window is.
                ready = [connection for connection in ready if not connection.is_busy]
            self.wake_at(now + min(self.limits.push_timeout, self.limits.ping_interval))
        for connection in pool.open:
            connection.flush()
        if not self._queue:
            self._starved_since = None
        else:
            if self._starved_since is None:
                self._starved_since = now
            self.wake_at(now + self.limits.grow_seconds)
        pool.look()

    def _look_at_key(self, pool: ApnsPool) -> None:
        """A connection is bound to the first key that it saw; a revoked one leaves no other use for it."""
        if self._token is None:
            return
        self._token.look()
        if self._token.generation != self._generation:
            self._generation = self._token.generation
            for connection in list(pool.open):
                connection.retire("the key file holds another key")

    def _starving(self, now: float) -> bool:
        return self._starved_since is not None and now - self._starved_since >= self.limits.grow_seconds

    def wake_at(self, when: float) -> None:
        """Something is due then: look no later."""
        if when < self._timer_at and self._pool is not None and not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = asyncio.get_running_loop().call_at(when, self._tick)

    def _tick(self) -> None:
        """Deadlines of pushes on streams and in the queue, PINGs, and connections that are lacking."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer_at = math.inf
        due = now + LOOK_SECONDS
        if self._pool is not None:
            self._look_at_key(self._pool)
            for connection in list(self._pool.open):
                due = min(due, connection.check(now))
            self._pool.close_idle()
            self._pool.look()
        due = min(due, self._drop_late(now))
        self.wake_at(max(due, now + LEAST_TICK))

    def _drop_late(self, now: float) -> float:
        """Push back what can no longer start in time; returns when the next one is late."""
        late = [flight for flight in self._queue if flight.start_by <= now]
        if late:
            waiting = [flight for flight in self._queue if flight.start_by > now]
            self._queue.clear()
            self._queue.extend(waiting)
            for flight in late:
                self.finished(flight, self._not_sent())
        return min((flight.start_by for flight in self._queue), default=math.inf)

    def _not_sent(self) -> NotSent:
        problem: ConnectError | None = self._pool.problem if self._pool and not self.connected else None
        return NotSent(str(problem), problem.config) if problem else NotSent("no free stream in time")

    def _reply(self, flight: Flight, reply: Reply) -> None:
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._replies.append((flight, reply))

    def _deliver(self) -> None:
        """Call back outside of the connections: an exception there must not cost one its life."""
        try:
            while self._replies:
                flight, reply = self._replies.popleft()
                flight.on_reply(flight.push, reply)
        finally:
            if self._replies:
                asyncio.get_running_loop().call_soon(self._deliver)
