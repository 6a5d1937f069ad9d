"""Everything that reaches below aio-pika's public interface: one write per batch, confirms by delivery tag.

aio-pika and aiormq connect, authenticate, tune, send heartbeats and read frames. What they do per message
(a task, two futures, an ordered dict, a map by message_id that credits the wrong message) is replaced here:

- `Link` is one connection. It keeps the socket's writer, so that a batch is one write and a dead peer can be
  cut off at once, and it knows at once when the connection is lost or blocked.
- `ConfirmChannel` takes the place of aiormq's Channel in the connection's table of channels. aiormq's reader
  hands it each frame; it needs no task, no queue and no future per message.

The names used are private or undocumented, so the versions are pinned and tests/unit/test_wire_internals.py
asserts each of them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from uuid import uuid4

import aio_pika
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPError
from pamqp import commands
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.exceptions import PAMQPException
from pamqp.frame import marshal
from pamqp.header import ContentHeader
from yarl import URL

from common.errors import RelayDrainError
from relay.amqp import frames
from relay.flight import CONFIRMED, REFUSED, Flight, finish
from relay.message import OUTBOX_ID, Message

_Answer = TypeVar("_Answer", bound=Frame)

_CLOSE_CHANNEL = commands.Channel.Close(reply_code=200, reply_text="", class_id=0, method_id=0)

# What may come out of connecting: refused, reset, cut off, not a broker, wrong password, bad certificate.
_CONNECT_ERRORS = (AMQPError, PAMQPException, OSError, EOFError, ssl.SSLError, asyncio.TimeoutError)


class WireError(RelayDrainError):
    """The broker, or the way to it, does not do its part."""


class Unreachable(WireError):
    """No connection: refused, silent, or not let in; the text says which."""


class LinkLost(WireError):
    """The connection is gone, or never answered."""


class ChannelClosed(WireError):
    """The broker closed the channel; code and text are its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class _Tap(TransportFactory):
    """Opens the socket as aiormq would, and keeps the writer."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self.writer = await factory.create(url, **kwargs)
        return reader, self.writer

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()


class ConfirmChannel:
    """One channel in confirm mode; at most one flight at a time.

    Once ended (`ended` has the reason) it stays so. After any doubt its user calls `abandon` and opens
    another one: late confirms and returns then reach nobody.
    """

    def __init__(self, link: Link, number: int) -> None:
        self.ended: WireError | None = None
        self.frames = self  # aiormq's reader calls `channel.frames.put((weight, frame))`
        self.number = number
        self._link = link
        self._tag = 0
        self._flight: Flight | None = None
        self._answer: asyncio.Future[Frame | None] | None = None
        self._returning: commands.Basic.Return | None = None

    async def publish(self, messages: Sequence[Message], deadline: float) -> Flight:
        """Write all messages at once and wait until all are settled, the channel ended, or the deadline.

        Never raises but for cancellation. The caller reads the flight, then `ended`, and after a deadline
        or a cancellation abandons the channel.
        """
        flight = Flight(self._tag + 1, messages, self._link.loop.create_future())
        if self.ended is None:
            self._tag += len(messages)
            self._flight = flight
            self._link.write(frames(messages, self.number, self._link.frame_max))
            await _until(flight.done, deadline)
            self._flight = None
        return flight

    async def call(self, request: Frame, expected: type[_Answer], deadline: float) -> _Answer:
        """Send a synchronous method and return its answer.

        Raises:
            ChannelClosed: the broker closed the channel instead.
            LinkLost: the connection is gone, or no answer came until the deadline (the channel is abandoned).
        """
        if self.ended is not None:
            raise self.ended
        self._answer = self._link.loop.create_future()
        try:
            self._link.write(marshal(request, self.number))
            answer = await _until(self._answer, deadline)
        finally:
            self._answer = None
        if self.ended is not None:
            raise self.ended
        if not isinstance(answer, expected):
            self.abandon(f"no answer to {request.name}")
            raise LinkLost(
                f"no answer to {request.name}" if answer is None else f"{answer.name} to {request.name}"
            )
        return answer

    def abandon(self, why: str) -> None:
        """Use this channel no more. Its number is free when the broker has confirmed the close."""
        if self.ended is None:
            self._link.write(marshal(_CLOSE_CHANNEL, self.number))
            self.end(LinkLost(why))

    def end(self, error: WireError) -> None:
        """Remember the first reason and wake whoever waits."""
        if self.ended is None:
            self.ended = error
            if self._flight is not None:
                finish(self._flight.done)
                self._flight = None  # confirms that are read after this reach nobody, even within this turn
            if self._answer is not None:
                finish(self._answer)

    async def put(self, item: tuple[int, Any]) -> None:
        """Take one frame from aiormq's reader, in the order of arrival. Does not wait, must not raise."""
        frame = item[1]
        match frame:
            case commands.Basic.Ack():
                if self._flight is not None and frame.delivery_tag is not None:
                    self._flight.settle(frame.delivery_tag, frame.multiple, CONFIRMED)
            case commands.Basic.Nack():
                if self._flight is not None and frame.delivery_tag is not None:
                    self._flight.settle(frame.delivery_tag, frame.multiple, REFUSED)
            case commands.Basic.Return():
                self._returning = frame
            case ContentHeader():
                self._returned(frame)
            case ContentBody():
                pass  # of a returned message; the row still has it
            case commands.Channel.Close():
                self._link.write(marshal(commands.Channel.CloseOk(), self.number))
                self.end(ChannelClosed(frame.reply_code or 0, frame.reply_text or "channel closed"))
            case _:
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(frame)

    def _returned(self, header: ContentHeader) -> None:
        """Match a returned message by the header that is unique for each row in flight, never by message_id."""
        frame, self._returning = self._returning, None
        if frame is None or self._flight is None or self.ended is not None:
            return
        why = (
            f"unroutable: {frame.reply_code} {frame.reply_text}: "
            f"exchange {frame.exchange!r}, routing key {frame.routing_key!r}"
        )
        row_id = (header.properties.headers or {}).get(OUTBOX_ID)
        if not self._flight.give_back(row_id, why):
            # Some message of this flight is lost and nobody knows which: no later confirm can be believed.
            self.abandon("a returned message could not be matched to its row")


class Link:
    """One AMQP connection. `lost` is done, with the reason, once it is of no more use."""

    def __init__(
        self, connection: aio_pika.Connection, tap: _Tap, on_blocked: Callable[[str | None], None]
    ) -> None:
        assert connection.transport is not None
        assert tap.writer is not None
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self.loop.create_future()
        self.blocked: str | None = None  # the broker's reason while it takes no publishes
        self.proven: set[str] = set()  # exchanges that took a publish on this connection
        self._connection = connection
        self._amqp = cast(Any, connection.transport.connection)
        self._tap = tap
        self._writer = tap.writer
        self._on_blocked = on_blocked
        self._channels: set[ConfirmChannel] = set()
        self._number = 0
        self._probing: ConfirmChannel | None = None
        self.frame_max: int = self._amqp.connection_tune.frame_max
        self._channel_max: int = self._amqp.connection_tune.channel_max or 65535
        self._wrap("_Connection__handle_connection_blocked", lambda frame: frame.reason or "no reason given")
        self._wrap("_Connection__handle_connection_unblocked", lambda _: None)
        self._amqp._reader_task.add_done_callback(self._reader_done)

    def _wrap(self, name: str, reason: Callable[[Any], str | None]) -> None:
        """Hear of Blocked and Unblocked: aiormq keeps them to itself."""
        original = getattr(self._amqp, name)

        async def heard(frame: Any) -> None:
            await original(frame)
            self.blocked = reason(frame)
            if self.blocked is not None and self._probing is not None:
                self._probing.abandon("blocked")
            self._on_blocked(self.blocked)

        setattr(self._amqp, name, heard)

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport; on a lost connection they go nowhere, and `lost` says so."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def open_channel(self, deadline: float) -> ConfirmChannel:
        """Open a channel and put it in confirm mode.

        Raises:
            WireError: refused, or no answer until the deadline.
        """
        self._channels = {channel for channel in self._channels if channel.ended is None}
        taken = self._amqp.channels
        # Numbers go round: one that was just closed from both sides may still get the broker's Close-Ok.
        for _ in range(self._channel_max):
            self._number = self._number % self._channel_max + 1
            if self._number not in taken:
                break
        channel = ConfirmChannel(self, self._number)
        if self.lost.done():
            raise LinkLost(self.lost.result())
        taken[self._number] = channel
        self._channels.add(channel)
        try:
            await channel.call(commands.Channel.Open(), commands.Channel.OpenOk, deadline)
            await channel.call(commands.Confirm.Select(), commands.Confirm.SelectOk, deadline)
        except BaseException:
            channel.abandon("not opened")
            raise
        return channel

    async def probe(self, channel: ConfirmChannel, deadline: float) -> None:
        """Find out whether the broker takes publishes; `blocked` has the answer. Ends the channel.

        RabbitMQ says that it is blocked only to a connection that publishes, and it would deliver that
        publish after the alarm all the same. So the first one is an empty message to no queue, which it drops;
        then it stops reading, so an answer to anything sent later means that it is not blocked.

        Raises:
            LinkLost: no answer until the deadline, and not blocked.
        """
        nowhere = commands.Basic.Publish(exchange="", routing_key=f"relay.probe.{uuid4().hex}")
        self._probing = channel
        try:
            self.write(marshal(nowhere, channel.number) + marshal(ContentHeader(), channel.number))
            await channel.call(_CLOSE_CHANNEL, commands.Channel.CloseOk, deadline)
            channel.end(LinkLost("closed"))
        except ChannelClosed:
            pass  # this user may not write there; but the broker has read it
        except LinkLost:
            if self.blocked is None:
                raise
        finally:
            self._probing = None

    def abort(self, why: str) -> None:
        """Cut the connection off: a peer that does not answer gets no goodbye."""
        self._mark_lost(why)
        self._tap.abort()

    async def close(self, timeout: float) -> None:
        """Say goodbye, for at most `timeout` seconds, then cut off. Leaves no task and no socket."""
        self._mark_lost("closed")
        await _bounded(asyncio.ensure_future(self._connection.close()), timeout, self._tap)

    def _reader_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            stuck = self._amqp.is_connection_was_stuck
            self._mark_lost("no heartbeat from the broker" if stuck else "closed")
        else:
            self._mark_lost(_describe(task.exception()))

    def _mark_lost(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
        for channel in self._channels:
            channel.end(LinkLost(f"connection lost: {self.lost.result()}"))
        self._channels.clear()


async def connect(
    url: str,
    *,
    name: str,
    heartbeat: int,
    timeout: float,
    ssl_context: ssl.SSLContext | None,
    on_blocked: Callable[[str | None], None],
) -> Link:
    """Open one connection: name look-up, TCP, TLS and AMQP handshake within one timeout.

    Raises:
        Unreachable: with the reason; nothing of the attempt is left behind.
    """
    tap = _Tap()
    connection = aio_pika.Connection(
        URL(url).update_query(heartbeat=str(heartbeat), name=name), ssl_context=ssl_context
    )
    connection.kwargs["transport_factory"] = tap
    attempt = asyncio.ensure_future(connection.connect())
    answered = False
    try:
        answered = await _bounded(attempt, timeout, tap)
    finally:
        if not answered or attempt.exception() is not None:
            tap.abort()
            await connection.close()
    if not answered:
        raise Unreachable(f"no answer within {timeout:g} s")
    try:
        attempt.result()
    except _CONNECT_ERRORS as error:
        raise Unreachable(_describe(error)) from None
    return Link(connection, tap, on_blocked)


async def _bounded(task: asyncio.Future[None], timeout: float, tap: _Tap) -> bool:
    """Wait for a task of the library; after the timeout, or when cancelled, cut its socket and cancel it."""
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # never "exception not retrieved"
    try:
        await asyncio.wait({task}, timeout=timeout)
        return task.done() and not task.cancelled()
    finally:
        if not task.done():
            tap.abort()
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)


async def _until(future: asyncio.Future[Any], deadline: float) -> Any:
    """Wait for a future that is never failed; None at the deadline (time of the loop)."""
    timer = future.get_loop().call_at(deadline, finish, future)
    try:
        return await future
    finally:
        timer.cancel()


def _describe(error: BaseException | None) -> str:
    if error is None:
        return "closed by the broker"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
