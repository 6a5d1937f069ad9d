"""The streams of one connection: each push that went out, and the one reply that it gets.

A stream ends by its answer, a reset, GOAWAY, its deadline or the end of the connection. It is matched by its id,
never by apns-id. A slot is free exactly when its stream is not in `flights`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from drain.apns.flight import (
    CONFIG_REASONS,
    MAX_ANSWER,
    TOKEN_REASONS,
    Flight,
    Sign,
    read_reason,
    request_headers,
    sign_of,
)
from drain.apns.frames import ErrorCode, Header, error_name
from drain.apns.http2 import ClientConnection
from drain.apns.model import MaybeDelivered, NoAnswer, NotSent, Reply, SessionLimits


class Owner(Protocol):
    """What the session is told. It must not call back into the connection."""

    def finished(self, flight: Flight, reply: Reply) -> None: ...
    def token_refused(self, flight: Flight, reason: str) -> None: ...
    def good_answer(self, flight: Flight) -> None: ...
    def room_made(self) -> None: ...
    def calm(self) -> None: ...


class Link(Protocol):
    """What the connection around the streams is told."""

    def settled(self) -> None: ...
    def retire(self, why: str) -> None: ...
    def stream_ended(self) -> None: ...


class Streams:
    """Flights by stream id, on top of the HTTP/2 of one connection. `now` is always the loop's time."""

    def __init__(self, owner: Owner, link: Link, authority: str, limits: SessionLimits, now: float) -> None:
        self._owner = owner
        self._link = link
        self._limits = limits
        self._authority = authority.encode()
        self.http2 = ClientConnection(self)
        self.flights: dict[int, Flight] = {}
        """In the order they were sent, which is the order of their deadlines."""
        self.carried = 0
        self.proven = False
        """An answer came that says: token and server are sound."""
        self.config_fault = False
        self.now = now
        """When bytes last came."""
        self.last_push = now
        self._last_answer = now
        self._strikes = 0
        self._written_to = -1

    @property
    def free(self) -> int:
        """How many more streams the peer (its SETTINGS have come), our own cap and the request limit allow."""
        limit = self._limits.streams_per_connection
        if self.http2.max_streams is not None and self.http2.max_streams < limit:
            limit = self.http2.max_streams
        return max(0, min(limit - len(self.flights), self._limits.requests_per_connection - self.carried))

    def take_from(
        self, queue: deque[Flight], most: int, now: float, authorization: bytes | None, renewed: bool
    ) -> int:
        """Send up to `most` pushes of the queue's head, as far as streams and window allow; returns how many.

        HEADERS go out only when the whole body fits into the window behind them.
        """
        http2 = self.http2
        room = min(most, self.free)
        taken = 0
        while taken < room and queue:
            flight = queue[0]
            push = flight.push
            size = len(push.body)
            if flight.start_by <= now:
                queue.popleft()
                self._owner.finished(flight, NotSent("no free stream in time"))
                continue
            if size > http2.stream_window:
                queue.popleft()
                self._owner.finished(flight, NotSent(f"peer's stream window is {http2.stream_window} bytes"))
                continue
            if size > http2.window:
                break
            queue.popleft()
            flight.started, flight.authorization, flight.renewed = now, authorization, renewed
            headers = request_headers(push, self._authority, authorization)
            self.flights[http2.request(headers, push.body)] = flight
            taken += 1
        if taken:
            self.carried += taken
            self.last_push = now
            if self.carried >= self._limits.requests_per_connection:
                self._link.retire("request limit of a connection")
        return taken

    def take_bytes(self) -> bytes:
        """What is to be written now; a push is provably unsent only until then."""
        self._written_to = self.http2.highest_stream_id
        return self.http2.take()

    def expire(self, now: float) -> float:
        """Reset the streams whose push timeout has passed; returns when the next one does."""
        while self.flights:
            stream_id, flight = next(iter(self.flights.items()))
            deadline = flight.started + self._limits.push_timeout
            if deadline > now:
                return deadline
            del self.flights[stream_id]
            self.http2.reset(stream_id, ErrorCode.CANCEL)
            self._owner.finished(flight, NoAnswer(now - flight.started))
            if self._last_answer <= flight.started:
                self._strike("pushes without an answer")
            self._link.stream_ended()
        return math.inf

    def end(self, why: str, now: float) -> None:
        """The connection is over: reply to whatever is left."""
        flights, self.flights = self.flights, {}
        for stream_id, flight in flights.items():
            reply: Reply
            if stream_id > self._written_to:
                reply = NotSent(why)
            elif flight.status:
                reply = flight.answer(now)
            else:
                reply = MaybeDelivered(why)
            self._owner.finished(flight, reply)

    # Listener of http2

    def on_settings(self) -> None:
        """The limit of streams may have moved, either way."""
        self._link.settled()
        self._owner.room_made()

    def on_window(self) -> None:
        """A body may fit now."""
        self._owner.room_made()

    def on_pong(self) -> None:
        """That bytes came is all that counts."""

    def on_headers(self, stream_id: int, headers: list[Header], ended: bool) -> None:
        """Status of an answer, or trailers."""
        flight = self.flights.get(stream_id)
        if flight is not None:
            flight.read_headers(headers)
            if ended:
                self._answered(stream_id, flight)

    def on_data(self, stream_id: int, data: bytes, ended: bool) -> None:
        """Body of an answer, in any number of frames, empty ones too."""
        flight = self.flights.get(stream_id)
        if flight is None:
            return
        flight.body = flight.body + data if flight.body else data
        if ended:
            self._answered(stream_id, flight)
        elif len(flight.body) > MAX_ANSWER:
            self.http2.reset(stream_id, ErrorCode.CANCEL)
            self._answered(stream_id, flight)

    def on_reset(self, stream_id: int, code: int) -> None:
        """REFUSED_STREAM says that nothing was done (RFC 9113, 8.7); any other code says nothing about that."""
        flight = self.flights.get(stream_id)
        if flight is None:
            return
        if flight.status:
            self._answered(stream_id, flight)
            return
        del self.flights[stream_id]
        why = f"RST_STREAM {error_name(code)}"
        if code == ErrorCode.REFUSED_STREAM:
            self._owner.finished(flight, NotSent(why))
            if self._last_answer <= flight.started:
                self._strike("streams refused")
        else:
            self._owner.finished(flight, MaybeDelivered(why))
            if code == ErrorCode.ENHANCE_YOUR_CALM:
                self._owner.calm()
                self._link.retire(why)
        self._link.stream_ended()

    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        """Streams above the last one were not processed (RFC 9113, 6.8); the others still get their answers."""
        reason, _ = read_reason(debug)
        why = " ".join(part for part in ("GOAWAY", error_name(code), reason) if part)
        config = reason in CONFIG_REASONS
        self.config_fault = self.config_fault or config
        for stream_id in [stream_id for stream_id in self.flights if stream_id > last_stream_id]:
            self._owner.finished(self.flights.pop(stream_id), NotSent(why, config))
        if code == ErrorCode.ENHANCE_YOUR_CALM:
            self._owner.calm()
        self._link.retire(why)

    def _answered(self, stream_id: int, flight: Flight) -> None:
        del self.flights[stream_id]
        if flight.status:
            answer = flight.answer(self.now)
            self._judge(flight, answer.status, answer.reason)
            self._owner.finished(flight, answer)
        else:
            self._owner.finished(flight, MaybeDelivered("answer without a status"))
            self._strike("answers without a status")
        self._link.stream_ended()

    def _judge(self, flight: Flight, status: int, reason: str | None) -> None:
        """What the answer says about the connection and the token."""
        self._last_answer = self.now
        if reason in TOKEN_REASONS:
            self._owner.token_refused(flight, reason or "")
        sign = sign_of(status, reason)
        if sign is Sign.GOOD:
            self._strikes = 0
            self.proven = True
            self._owner.good_answer(flight)
        elif sign is Sign.STRIKE:
            self._strike(f"answers {status}")
        elif sign is Sign.LEAVE:
            self._link.retire(f"answer {status} {reason or ''}".rstrip())

    def _strike(self, why: str) -> None:
        self._strikes += 1
        if self._strikes >= self._limits.strikes:
            self._link.retire(f"{self._strikes} {why} in a row")
