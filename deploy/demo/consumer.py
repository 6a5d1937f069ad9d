"""The shop's notification service: applies each event once and enqueues pushes. ``python -m deploy.demo.consumer``

RabbitMQ may deliver an event twice (relay publishes at least once, and so does the broker). ``accept_event`` is
called first in the transaction that applies the event: false means that this consumer has applied it already. The
delivery is enqueued in the same transaction, so an applied event has its push and a rolled back one has none. The
message is acknowledged after the commit; a crash in between brings it again, and the inbox drops it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any
from uuid import UUID

import aio_pika
import asyncpg
from pydantic import SecretStr

from common.settings import SharedSettings, Source, load, setting

CONSUMER = "shop-notifications"
QUEUE = "shop.notifications"


class DemoSettings(Source):
    """Read as the daemons read theirs: environment, or a file of the container's secrets."""

    amqp_url: SecretStr = setting(SecretStr("amqp://guest:guest@localhost/"), "RabbitMQ URL")
    demo_app: str = setting("shop", "app of DRAIN_APPS that notifications are for")


class Notifications:
    """One consumer process."""

    def __init__(self, pool: asyncpg.Pool, schema: str, app: str) -> None:
        self.pool = pool
        self.schema = schema
        self.app = app
        self.applied = 0
        self.repeated = 0

    async def handle(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Apply one message; acknowledged when the transaction committed, requeued when it could not."""
        event_id = UUID(message.message_id or "")
        event = json.loads(message.body)
        async with message.process(requeue=True), self.pool.acquire() as connection, connection.transaction():
            if not await connection.fetchval(
                f"SELECT {self.schema}.accept_event($1, $2)", CONSUMER, event_id
            ):
                self.repeated += 1
                return
            if message.type == "order.placed":
                await self.order_placed(connection, event_id, event)
            elif message.type == "device_token.dead":
                await connection.execute(
                    "UPDATE shop.customers SET device_token = NULL WHERE device_token = $1",
                    event["device_token"],
                )
            self.applied += 1

    async def order_placed(
        self, connection: asyncpg.Connection, event_id: UUID, event: dict[str, Any]
    ) -> None:
        """Count the order as notified, and tell the customer's device."""
        await connection.execute(
            """INSERT INTO shop.notified AS n (order_id, times) VALUES ($1, 1)
               ON CONFLICT (order_id) DO UPDATE SET times = n.times + 1""",
            event["order_id"],
        )
        token = await connection.fetchval(
            "SELECT device_token FROM shop.customers WHERE id = $1", event["customer_id"]
        )
        if token is None:
            return
        text = f"Order {event['order_id']} over {event['cents'] / 100:.2f} is placed"
        await connection.execute(
            f"""SELECT {self.schema}.enqueue_delivery(
                    app => $1, device_token => $2, payload => $3, event_id => $4, collapse_id => $5)""",
            self.app,
            token,
            json.dumps({"aps": {"alert": {"title": "Thank you", "body": text}}}),
            event_id,
            f"order-{event['order_id']}",
        )


async def consume(amqp_url: str, service: Notifications, stop: asyncio.Event) -> None:
    """Declare the queue, bind it, and handle messages until stopped."""
    connection = await aio_pika.connect_robust(amqp_url)
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=100)
        exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True)
        for pattern in ("order.*", "device_token.dead"):
            await queue.bind(exchange, pattern)
        tag = await queue.consume(service.handle)
        print(json.dumps({"event": "consumer_ready", "queue": QUEUE}), flush=True)
        await stop.wait()
        await queue.cancel(tag)


async def main() -> int:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    settings, demo = load(SharedSettings), load(DemoSettings)
    pool = await asyncpg.create_pool(settings.database_url.get_secret_value(), min_size=0, max_size=4)
    service = Notifications(pool, settings.database_schema, demo.demo_app)
    await consume(demo.amqp_url.get_secret_value(), service, stop)
    await pool.close()
    print(
        json.dumps({"event": "consumer_stopped", "applied": service.applied, "repeated": service.repeated}),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
