"""The shop's order service: writes an order and its event in one transaction. ``python -m deploy.demo.producer``

The whole integration is one SQL call inside the transaction that the service has anyway. If that transaction rolls
back, there is no order and no event; if it commits, the event will reach RabbitMQ, whatever dies meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
from pathlib import Path

import asyncpg

from common.settings import SharedSettings, load

SHOP = Path(__file__).with_name("shop.sql")


async def place_order(connection: asyncpg.Connection, schema: str, customer: int | None = None) -> int:
    """Place one order, of a random customer unless one is named; return its id."""
    customer = customer or random.randint(1, 200)
    cents = random.randint(500, 20_000)
    async with connection.transaction():
        order_id = await connection.fetchval(
            "INSERT INTO shop.orders (customer_id, cents) VALUES ($1, $2) RETURNING id", customer, cents
        )
        await connection.execute(
            f"""SELECT {schema}.enqueue_event(
                    aggregate_type => 'order', aggregate_id => $1, event_type => 'order.placed',
                    payload => $2, ordering_key => $3)""",
            str(order_id),
            json.dumps({"order_id": order_id, "customer_id": customer, "cents": cents}),
            f"customer-{customer}",
        )
    return int(order_id)


async def produce(database_url: str, schema: str, rate: float, limit: int | None, stop: asyncio.Event) -> int:
    """Place orders at a rate until stopped; survive any outage of the database by trying again."""
    placed = 0
    while not stop.is_set() and (limit is None or placed < limit):
        try:
            connection = await asyncpg.connect(database_url, timeout=5, command_timeout=5)
        except (OSError, asyncpg.PostgresError, TimeoutError):
            await asyncio.sleep(0.5)
            continue
        try:
            await connection.execute(SHOP.read_text())
            loop = asyncio.get_running_loop()
            due = loop.time()
            while not stop.is_set() and (limit is None or placed < limit):
                await place_order(connection, schema)
                placed += 1
                due = max(due + 1 / rate, loop.time() - 1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), max(0.0, due - loop.time()))
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            await asyncio.sleep(0.5)
        finally:
            connection.terminate()
    return placed


async def main() -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=20.0, help="orders per second")
    parser.add_argument("--limit", type=int, help="stop after so many orders")
    arguments = parser.parse_args()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    settings = load(SharedSettings)
    database_url, schema = settings.database_url.get_secret_value(), settings.database_schema
    placed = await produce(database_url, schema, arguments.rate, arguments.limit, stop)
    print(json.dumps({"event": "producer_stopped", "orders": placed}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
