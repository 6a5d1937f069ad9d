"""One measurement: events committed at a light rate, each timed until a consumer of the queue has it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import aiormq
import asyncpg

ENQUEUE = "SELECT relay_drain.enqueue_event('order', $1, 'order.placed', '{}'::jsonb)"
PATIENCE = 60.0
"""Seconds that the last event may take."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from before the commit was sent until a consumer had the message, sorted."""

    milliseconds: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The smallest figure that this share of the events stays within."""
        return self.milliseconds[min(len(self.milliseconds) - 1, int(share * len(self.milliseconds)))]

    def __str__(self) -> str:
        figures = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        told = ", ".join(f"{name} {self.quantile(share):.1f} ms" for name, share in figures)
        return f"{told}, max {self.milliseconds[-1]:.1f} ms, {len(self.milliseconds)} events"


async def measure(
    database_url: str, amqp_url: str, queue: str, *, events: int, rate: float, producers: int = 1
) -> Latency:
    """Commit ``events`` at ``rate`` per second, over several connections, whose transactions then overlap.

    Raises:
        TimeoutError: not all of them came.
    """
    sent: dict[str, float] = {}
    took: list[float] = []
    everything = asyncio.Event()

    async def on_message(message: aiormq.abc.DeliveredMessage) -> None:
        began = sent.pop(str((message.header.properties.headers or {}).get("x-aggregate-id")), None)
        if began is not None:
            took.append((time.perf_counter() - began) * 1000)
        if len(took) == events:
            everything.set()

    async def produce(number: int) -> None:
        connection = await asyncpg.connect(database_url)
        try:
            for n in range(number, events, producers):
                await asyncio.sleep(random.expovariate(rate / producers))
                async with connection.transaction():
                    await connection.execute(ENQUEUE, str(n))
                    if producers > 1:  # the id is drawn long before the commit
                        await asyncio.sleep(random.uniform(0, 0.02))
                    sent[str(n)] = time.perf_counter()
        finally:
            await connection.close()

    consumer = await aiormq.connect(amqp_url)
    try:
        channel = await consumer.channel()
        await channel.basic_consume(queue, on_message, no_ack=True)
        await asyncio.gather(*(produce(number) for number in range(producers)))
        async with asyncio.timeout(PATIENCE):
            await everything.wait()
    finally:
        await consumer.close()
    return Latency(tuple(sorted(took)))
