"""A vhost of one test, and what a test does with a broker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiormq
import aiormq.abc

from deploy.local.door import BrokerAdmin

EXCHANGE = "events"


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery; ``properties`` are those of AMQP (message_id, type, delivery_mode, headers, …)."""

    body: bytes
    exchange: str
    routing_key: str
    redelivered: bool
    properties: Any

    @property
    def message_id(self) -> str:
        """The event's id."""
        return str(self.properties.message_id)

    @property
    def headers(self) -> dict[str, Any]:
        """Headers; empty when there are none."""
        return dict(self.properties.headers or {})


@dataclass(frozen=True, slots=True)
class Broker:
    """One vhost. Every method that speaks AMQP opens and closes a connection of its own (a few milliseconds)."""

    vhost: str
    admin: BrokerAdmin

    @property
    def url(self) -> str:
        """AMQP URL of the vhost."""
        return self.admin.url(self.vhost)

    def through(self, port: int) -> str:
        """The same by way of a proxy on this port."""
        return self.admin.url(self.vhost, port)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[aiormq.abc.AbstractChannel]:
        """A channel with publisher confirms, on its own connection."""
        connection = await aiormq.connect(self.url)
        try:
            yield await connection.channel(publisher_confirms=True)
        finally:
            await connection.close()

    async def declare_exchange(self, name: str = EXCHANGE, kind: str = "topic") -> None:
        """Declare a durable exchange."""
        async with self.channel() as channel:
            await channel.exchange_declare(name, exchange_type=kind, durable=True)

    async def declare(
        self,
        queue: str = "all",
        key: str = "#",
        exchange: str = EXCHANGE,
        *,
        kind: str = "topic",
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Declare a durable exchange and a durable queue bound to it by ``key``; return the queue's name."""
        async with self.channel() as channel:
            await channel.exchange_declare(exchange, exchange_type=kind, durable=True)
            await channel.queue_declare(queue, durable=True, arguments=dict(arguments or {}))
            await channel.queue_bind(queue, exchange, key)
        return queue

    async def unbind(self, queue: str = "all", key: str = "#", exchange: str = EXCHANGE) -> None:
        """Take the binding away: what is published is unroutable."""
        async with self.channel() as channel:
            await channel.queue_unbind(queue, exchange, key)

    async def bind(self, queue: str = "all", key: str = "#", exchange: str = EXCHANGE) -> None:
        """Bind (again)."""
        async with self.channel() as channel:
            await channel.queue_bind(queue, exchange, key)

    async def publish(
        self, body: bytes, routing_key: str, exchange: str = EXCHANGE, **properties: Any
    ) -> None:
        """Publish one message and wait for its confirm."""
        async with self.channel() as channel:
            await channel.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=aiormq.spec.Basic.Properties(**properties),
            )

    async def take(
        self, queue: str = "all", count: int | None = None, *, timeout: float = 20.0, quiet: float = 0.3
    ) -> list[Message]:
        """Take messages out of a queue, in its order.

        Waits until there were ``count`` (at most ``timeout`` seconds), then until none has come for ``quiet``
        seconds: messages beyond ``count`` are returned too, so that a duplicate can not hide.
        """
        loop = asyncio.get_running_loop()
        messages: list[Message] = []
        last = loop.time()
        deadline = last + timeout

        async def on_message(delivery: aiormq.abc.DeliveredMessage) -> None:
            nonlocal last
            last = loop.time()
            messages.append(_message(delivery))

        async with self.channel() as channel:
            consumer = await channel.basic_consume(queue, on_message, no_ack=True)
            while (missing := len(messages) < (count or 0)) or loop.time() - last < quiet:
                if missing and loop.time() >= deadline:
                    break
                await asyncio.sleep(0.01)
            await channel.basic_cancel(consumer.consumer_tag or "")
        return messages

    async def peek(self, queue: str = "all") -> list[Message]:
        """What is ready in a queue now; all of it stays there."""
        messages = []
        async with self.channel() as channel:
            # Closing the connection gives back what was not acknowledged.
            while (delivery := await channel.basic_get(queue)).delivery_tag is not None:
                messages.append(_message(delivery))
        return messages

    def depth(self, queue: str = "all") -> int:
        """Messages of a queue, ready and unacknowledged; blocking."""
        return self.admin.queue_depths(self.vhost)[queue]

    def connections(self) -> int:
        """Connections open in this vhost; blocking."""
        return self.admin.connections(self.vhost)

    def close_connections(self) -> int:
        """Close them from the broker's side; return how many."""
        return self.admin.close_connections(self.vhost)

    def close_channels(self) -> int:
        """Close the channels only, from the broker's side; return how many."""
        return self.admin.close_channels(self.vhost)


def _message(delivery: aiormq.abc.DeliveredMessage) -> Message:
    return Message(
        body=delivery.body,
        exchange=delivery.exchange or "",
        routing_key=delivery.routing_key or "",
        redelivered=bool(delivery.redelivered),
        properties=delivery.header.properties,
    )


@contextlib.contextmanager
def fresh_vhost(admin: BrokerAdmin) -> Iterator[Broker]:
    """Make a vhost, delete it in the end."""
    broker = Broker(f"test-{secrets.token_hex(6)}", admin)
    admin.add_vhost(broker.vhost)
    try:
        yield broker
    finally:
        admin.delete_vhost(broker.vhost)
