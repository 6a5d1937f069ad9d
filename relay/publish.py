"""A lane's publisher: a claimed batch goes in, a verdict for each row comes out, within the deadline.

A batch without trouble is one write and one wait. A fault of one row harms no other row (`relay.waves`), and a fault
of the broker is held against none: what it confirmed is published, the rest is left, and the channel is replaced.

What a crash in the middle leaves: messages in the broker whose rows are not marked. They are published again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from relay.broker import Broker, BrokerUnavailable
from relay.message import Encoder, MessageConfig
from relay.model import Left, OutboxRow, Verdict
from relay.observer import PublishObserver, Silent, Tracer
from relay.waves import Batch
from relay.wire import ChannelClosed, ConfirmChannel, Link, WireError

# Reply codes that say "this message": content too large, no route, access refused, no exchange, locked, precondition.
# Any other code is the broker's own trouble.
_THE_ROWS_FAULT = frozenset({311, 312, 313, 403, 404, 405, 406})

# No channel could be opened for this long on a connection that is not blocked: the connection is dead, whatever its
# heartbeats will say in a minute.
_DOUBT_SECONDS = 2.0


class Publisher:
    """Owns one channel of the broker's connection, and replaces it after any doubt. One batch at a time."""

    def __init__(
        self,
        broker: Broker,
        config: MessageConfig,
        unroutable: Literal["retry", "accept"] = "retry",
        observer: PublishObserver | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._broker = broker
        self._encoder = Encoder(config)
        self._accept_unroutable = unroutable == "accept"
        self._observer = observer or Silent()
        self._tracer = tracer
        self._link: Link | None = None
        self._channel: ConfirmChannel | None = None
        self._doubt_since: float | None = None  # since when no channel can be opened on this connection

    async def ready(self, timeout: float) -> None:
        """Wait until a batch can be published; to be asked before BEGIN. Opens the channel when need be.

        So a broker that is away, blocked or silent is found outside of any transaction.

        Raises:
            BrokerUnavailable: not so within `timeout` seconds; the text says why.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        await self._broker.ready(timeout)
        link = self._broker.link
        channel = "connection lost" if link is None else await self._open(link, deadline)
        if not isinstance(channel, ConfirmChannel):
            raise BrokerUnavailable(channel)

    async def publish(
        self, rows: Sequence[OutboxRow], deadline: float, *, one_at_a_time: bool = False
    ) -> list[Verdict]:
        """Publish a batch and say what became of each row, aligned with `rows`.

        Returns by `deadline` (time of the loop). Raises nothing for a fault of a row or of the broker; a
        cancellation goes through, and the channel is then not used again.

        Args:
            rows: those of one ordering key in id order.
            one_at_a_time: for rows that failed before: each is sent alone.
        """
        link = self._broker.link
        if link is None:
            return [Left(self._broker.problem() or "not connected")] * len(rows)
        started_ns = time.time_ns()
        batch = Batch(
            rows,
            self._encoder,
            link.frame_max,
            one_at_a_time=one_at_a_time,
            accept_unroutable=self._accept_unroutable,
        )
        try:
            why = await self._publish(batch, link, deadline)
        except BaseException:
            self._discard("a publish was given up")
            raise
        verdicts = batch.finish(why)
        for exchange in batch.unroutable:
            self._observer.message_unroutable(exchange, self._accept_unroutable)
        if self._tracer is not None:
            self._tracer.publishes(rows, verdicts, started_ns, time.time_ns())
        return verdicts

    def close(self) -> None:
        """Give the channel back to the connection."""
        self._discard("closed")

    async def _publish(self, batch: Batch, link: Link, deadline: float) -> str:
        """Send wave after wave until each row has its verdict; or stop, and say why the rest is left."""
        proven = link.proven
        while wave := batch.next_wave(proven):
            if (why := self._obstacle(link, deadline)) is not None:
                return why
            channel = await self._open(link, deadline)
            if not isinstance(channel, ConfirmChannel):
                return channel
            began = link.loop.time()
            flight = await channel.publish(batch.messages(wave), deadline)
            self._observer.flight_settled(len(wave), link.loop.time() - began)
            unanswered = batch.judge(wave, flight.states, flight.returned)
            if not unanswered:
                proven |= batch.exchanges(wave)
            elif channel.ended is None:
                self._discard("confirms did not come in time")
                return "not confirmed before the deadline"
            elif isinstance(channel.ended, ChannelClosed) and channel.ended.code in _THE_ROWS_FAULT:
                proven -= batch.exchanges(unanswered)
                batch.channel_closed(wave, unanswered, channel.ended.code, channel.ended.text)
            else:
                return str(channel.ended)
        return "not sent"

    @staticmethod
    def _obstacle(link: Link, deadline: float) -> str | None:
        """Why nothing may be written now."""
        if link.lost.done():
            return f"connection lost: {link.lost.result()}"
        if link.blocked is not None:
            return f"blocked by the broker: {link.blocked}"
        return "no time left before the deadline" if link.loop.time() >= deadline else None

    async def _open(self, link: Link, deadline: float) -> ConfirmChannel | str:
        """Return the channel of this connection, opened when there is none that is good; or why not."""
        if self._channel is not None and self._link is link and self._channel.ended is None:
            return self._channel
        self._discard("replaced")
        if self._link is not link:
            self._link, self._doubt_since = link, None
        self._doubt_since = self._doubt_since or link.loop.time()
        try:
            channel = await link.open_channel(deadline)
        except WireError as error:
            if link.blocked is not None:
                self._doubt_since = None
            elif link.loop.time() - self._doubt_since >= _DOUBT_SECONDS:
                link.abort(f"no channel could be opened: {error}")
            return str(error)
        self._channel, self._doubt_since = channel, None
        self._observer.channel_opened()
        return channel

    def _discard(self, why: str) -> None:
        if self._channel is not None:
            self._channel.abandon(why)
        self._channel = None
