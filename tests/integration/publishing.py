"""What the publisher's tests share: rows, a broker of our own to look at queues, and a running publish side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import count
from typing import Any
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from relay.broker import Broker, BrokerConfig
from relay.message import MessageConfig
from relay.model import OutboxRow, Verdict
from relay.publish import Publisher

_IDS = count(1)
FAST: dict[str, Any] = {"backoff_base": 0.02, "backoff_cap": 0.2, "connect_timeout": 5.0}


def row(**changes: Any) -> OutboxRow:
    """A row that is fine, unless changed."""
    plain = OutboxRow(
        id=next(_IDS),
        event_id=uuid4(),
        aggregate_type="order",
        aggregate_id="1",
        event_type="order.placed",
        exchange=None,
        routing_key=None,
        ordering_key=None,
        body=b"{}",
        content_type="application/json",
        headers="{}",
        created_at=datetime.now(UTC),
        attempts=0,
    )
    return plain._replace(**changes)


def rows(number: int, **changes: Any) -> list[OutboxRow]:
    return [row(**changes) for _ in range(number)]


def kinds(verdicts: list[Verdict]) -> Counter[str]:
    return Counter(type(verdict).__name__ for verdict in verdicts)


class Counted:
    """An observer that counts."""

    def __init__(self) -> None:
        self.connections = self.channels = self.flights = 0
        self.unroutable: list[tuple[str, bool]] = []
        self.connected: list[bool] = []
        self.blocked: list[bool] = []

    def broker_connected(self, connected: bool) -> None:
        self.connected.append(connected)
        self.connections += connected

    def broker_blocked(self, blocked: bool) -> None:
        self.blocked.append(blocked)

    def channel_opened(self) -> None:
        self.channels += 1

    def flight_settled(self, messages: int, seconds: float) -> None:
        self.flights += 1

    def message_unroutable(self, exchange: str, accepted: bool) -> None:
        self.unroutable.append((exchange, accepted))


@dataclasses.dataclass
class Side:
    """A running publish side: the connection, one publisher, and what they told."""

    broker: Broker
    publisher: Publisher
    seen: Counted
    exchange: str

    async def publish(self, batch: list[OutboxRow], timeout: float = 5.0, **options: Any) -> list[Verdict]:
        return await self.publisher.publish(batch, asyncio.get_running_loop().time() + timeout, **options)


@contextlib.asynccontextmanager
async def publish_side(
    url: str, exchange: str, *, ready: bool = True, unroutable: Any = "retry", **config: Any
) -> AsyncIterator[Side]:
    """Start a broker connection and one publisher; close both at the end, within a bound."""
    seen = Counted()
    broker = Broker(BrokerConfig(url, exchange=exchange, **(FAST | config)), observer=seen)
    publisher = Publisher(broker, MessageConfig(exchange=exchange), unroutable, seen)
    await broker.start()
    try:
        if ready:
            await publisher.ready(5.0)
        yield Side(broker, publisher, seen, exchange)
    finally:
        publisher.close()
        began = asyncio.get_running_loop().time()
        await broker.close(3.0)
        assert asyncio.get_running_loop().time() - began < 4.5


class Queues:
    """Declares and reads queues through a connection of its own, never the one under test."""

    def __init__(self, channel: AbstractChannel, exchange: str) -> None:
        self.channel = channel
        self.exchange = exchange

    async def bind(self, key: str = "#", exchange: str | None = None, **options: Any) -> str:
        """Declare a queue that gets what is sent with this key; return its name."""
        topic = await self.channel.declare_exchange(exchange or self.exchange, "topic", durable=True)
        queue = await self.channel.declare_queue(f"test.{uuid4().hex}", durable=True, **options)
        await queue.bind(topic, key)
        return queue.name

    async def unbind(self, name: str, key: str = "#") -> None:
        queue = await self.channel.get_queue(name)
        await queue.unbind(self.exchange, key)

    async def take(self, name: str) -> list[AbstractIncomingMessage]:
        """Take everything out of a queue (counting by declare is stale: AMQP.md E11)."""
        queue = await self.channel.get_queue(name)
        taken: list[AbstractIncomingMessage] = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            taken.append(message)
        return taken

    async def ids(self, name: str) -> list[int]:
        """Row ids of the messages of a queue, in their order."""
        return [int(str(message.headers["x-outbox-id"])) for message in await self.take(name)]


@contextlib.asynccontextmanager
async def looking_at(url: str, exchange: str) -> AsyncIterator[Queues]:
    connection = await aio_pika.connect(url)
    try:
        async with connection.channel() as channel:
            yield Queues(channel, exchange)
    finally:
        await connection.close()


async def eventually(condition: Any, timeout: float = 10.0, what: str = "") -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)
