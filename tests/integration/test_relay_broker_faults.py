"""Faults of the broker around real relays: nothing burnt, lost or held open, little said, and on by itself.

Every fault lasts longer than a batch may. Two relays are in it: one goes on when it ends, one is stopped in its midst.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from deploy.local.proxy import SilentProxy
from deploy.local.rabbitmq import PrivateRabbit
from tests.integration.amqp_proxy import AmqpProxy
from tests.support.broker import Broker
from tests.support.database import Database
from tests.support.watching import transaction_ages

DEADLINE = 3.5
SETTINGS = {
    "RELAY_CONFIRM_TIMEOUT": 1.5,
    "RELAY_BATCH_DEADLINE": DEADLINE,
    "RELAY_AMQP_CONNECT_TIMEOUT": 2,
    "RELAY_BACKOFF_CAP": 1,
    "RELAY_NACK_DELAY": 0.5,
}
LASTS = 4.5
ROWS = 300
UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"


@dataclass(frozen=True)
class Scene:
    """What a fault may be done to."""

    rabbit: PrivateRabbit
    broker: Broker
    proxy: Callable[[int], SilentProxy]


@contextlib.asynccontextmanager
async def silent(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """Packets are dropped, nothing is refused (mosquito/aio-pika#46, ag2ai/faststream#1579)."""
    way.deaf = True
    yield
    way.hear()


@contextlib.asynccontextmanager
async def away(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """Connections are lost, new ones refused."""
    way.refuse = True
    way.cut()
    yield
    way.refuse = False


@contextlib.asynccontextmanager
async def swallowed(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """Messages arrive, no confirm comes back (OpenSDN-io/community#129, ruby-amqp/bunny#425)."""
    way.swallow = lambda frame: getattr(frame, "name", "") == "Basic.Ack"
    yield
    way.swallow = lambda _: False


@contextlib.asynccontextmanager
async def full(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """The queue rejects every publish."""
    async with scene.broker.channel() as channel:
        await channel.queue_delete("all")
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await channel.queue_declare("all", durable=True, arguments=arguments)
        await channel.queue_bind("all", "events", "#")
    await scene.broker.publish(b"{}", "filler", message_id="filler")
    yield
    async with scene.broker.channel() as channel:
        await channel.queue_delete("all")
        await channel.queue_declare("all", durable=True)
        await channel.queue_bind("all", "events", "#")


@contextlib.asynccontextmanager
async def killed(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """kill -9, and a start later (dotnetcore/CAP#730, JasperFx/wolverine#1430)."""
    await asyncio.to_thread(scene.rabbit.kill)
    yield
    await asyncio.to_thread(scene.rabbit.start)


@contextlib.asynccontextmanager
async def frozen(scene: Scene, way: AmqpProxy) -> AsyncIterator[None]:
    """The broker's process stops; its sockets stay."""
    scene.rabbit.pause()
    yield
    scene.rabbit.resume()


FAULTS = [silent, away, swallowed, full, killed, frozen]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
async def test_an_outage_of_the_broker_burns_nothing_holds_nothing_open_and_ends_by_itself(
    fault, database: Database, own_rabbit, own_broker: Broker, proxy, relay
):
    await own_broker.declare()
    scene = Scene(own_rabbit, own_broker, proxy)
    loop = asyncio.get_running_loop()
    async with AmqpProxy(own_broker.url) as way, transaction_ages(database) as ages:
        first, second = (relay(RELAY_AMQP_URL=way.url, **SETTINGS) for _ in range(2))
        await database.enqueue_events(20)
        await database.until(UNPUBLISHED)
        marks = first.mark(), second.mark()
        async with fault(scene, way):
            began = loop.time()
            await database.enqueue_events(ROWS)
            await database.enqueue_events(ROWS, key="'k' || (n % 20)")
            await asyncio.sleep(LASTS / 2)
            stopped = loop.time()
            second.terminate()
            assert await second.ended() == 0, second.tail()
            assert loop.time() - stopped < DEADLINE + 5.0
            await asyncio.sleep(max(0.0, began + LASTS - loop.time()))
            rows = await database.fetch(
                "SELECT attempts, quarantined_at, count(*) FROM {schema}.outbox "
                "WHERE published_at IS NULL GROUP BY 1, 2"
            )
            assert [tuple(row) for row in rows] == [(0, None, 2 * ROWS)], (
                "attempts were burnt, or rows marked"
            )
        ended = loop.time()
        await database.until(
            "SELECT count(*) > 20 FROM {schema}.outbox WHERE published_at IS NOT NULL", timeout=60
        )
        print(f"{fault.__name__}: first row {loop.time() - ended:.2f} s after the end", end=" ")
        await database.until(UNPUBLISHED, timeout=60)
        seconds = loop.time() - began
        print(f"oldest transaction {ages.oldest:.2f} s", end=" ")
    assert ages.oldest < DEADLINE + 2.0
    for daemon, mark in zip((first, second), marks, strict=True):
        said = [line["event"] for line in daemon.lines[mark:]]
        print(len(said), "lines", end=" ")
        assert len(said) <= 2 * seconds, said
        assert "" not in said, daemon.tail()
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    delivered = {message.message_id for message in await own_broker.take(count=2 * ROWS)}
    events = await database.fetch("SELECT event_id FROM {schema}.outbox WHERE id > 20")
    assert {str(row["event_id"]) for row in events} <= delivered
    assert first.stop() == 0


async def test_during_an_alarm_nothing_is_published_and_after_it_each_row_arrives_once_or_twice(
    database: Database, own_rabbit, own_broker: Broker, relay
):
    """rabbitmq/rabbitmq-server#23, AMQP.md E6: each try during an alarm is one more duplicate after it."""
    await own_broker.declare()
    first = relay(broker=own_broker, **SETTINGS)
    await database.enqueue_events(20)
    await database.until(UNPUBLISHED)
    mark = first.mark()
    async with transaction_ages(database) as ages:
        own_rabbit.admin.set_memory_alarm()
        await database.enqueue_events(ROWS)
        await database.enqueue_events(50, key="'k'")
        await first.seen("broker_blocked")
        # One that starts meanwhile learns it before it publishes a row.
        second = relay(broker=own_broker, **SETTINGS)
        await second.seen("broker_blocked")
        await asyncio.sleep(DEADLINE)
        failures = first.metrics().sum("relay_batch_failures_total")
        flights = first.metrics().sum("relay_publish_duration_seconds_count")
        assert first.metrics().value("relay_broker_blocked") == 1
        assert first.get("/readyz")[0] == 503
        assert "low on memory" in first.get("/readyz")[1]
        assert first.get("/livez")[0] == 200
        assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
        assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 20
        assert second.stop() == 0
        await asyncio.sleep(2.0)
        assert first.metrics().sum("relay_batch_failures_total") > failures, "it does not look again"
        assert first.metrics().sum("relay_publish_duration_seconds_count") == flights, (
            "published while blocked"
        )
        own_rabbit.admin.clear_memory_alarm()
        await database.until(UNPUBLISHED)
        assert first.metrics().value("relay_broker_blocked") == 0
    assert ages.oldest < DEADLINE + 2.0
    said = [line["event"] for line in first.lines[mark:]]
    assert Counter(said)["broker_blocked"] == Counter(said)["broker_unblocked"] == 1
    assert len(said) < 10, said
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    copies = Counter(message.message_id for message in await own_broker.take(count=20 + ROWS + 50))
    assert len(copies) == 20 + ROWS + 50
    assert set(copies.values()) <= {1, 2}
    assert first.stop() == 0


async def test_connections_and_channels_closed_by_the_broker_twenty_times_are_replaced_by_the_next_batch(
    database: Database, broker: Broker, relay
):
    """JasperFx/wolverine#1514, #3171; mosquito/aio-pika#577, #231: dead until the process restarts."""
    await broker.declare()
    daemon = relay(RELAY_TICK=0.05, **SETTINGS)
    await database.enqueue_events(100)
    await database.until(UNPUBLISHED)
    for number in range(20):
        if number % 2:
            assert await asyncio.to_thread(broker.close_connections) >= 1
        else:
            # While nothing is in flight: a row in flight would be blamed for the closed channel, once.
            assert await asyncio.to_thread(broker.close_channels) >= 1
        await database.enqueue_events(20)
        await database.until(UNPUBLISHED, timeout=10)
    assert len({message.message_id for message in await broker.take(count=500)}) == 500
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    assert daemon.metrics().sum("relay_broker_connections_total") == 11
    said = Counter(line["event"] for line in daemon.lines)
    assert said["broker_unavailable"] <= 10
    assert sum(said.values()) <= 4 * 10 + 10, said
    assert daemon.stop() == 0
    assert daemon.output == ""


async def test_what_is_marked_when_the_broker_is_killed_is_in_the_queue_when_it_is_back(
    database: Database, own_rabbit, own_broker: Broker, relay
):
    """dotnetcore/CAP#730, BrighterCommand/Brighter#721: no confirms, or messages that are not persistent."""
    await own_broker.declare()
    await database.enqueue_events(10_000)
    daemon = relay(broker=own_broker, **SETTINGS)
    await database.until("SELECT count(published_at) > 2000 FROM {schema}.outbox")
    await asyncio.to_thread(own_rabbit.kill)
    assert daemon.stop() == 0
    marked = await database.fetch("SELECT event_id FROM {schema}.outbox WHERE published_at IS NOT NULL")
    assert len(marked) < 10_000, "the broker died too late to prove anything"
    await asyncio.to_thread(own_rabbit.start)
    found = {message.message_id for message in await own_broker.take(count=len(marked))}
    assert {str(row["event_id"]) for row in marked} <= found
    survivor = relay(broker=own_broker, **SETTINGS)
    await database.until(UNPUBLISHED, timeout=60)
    found |= {message.message_id for message in await own_broker.take(count=10_000 - len(marked))}
    assert len(found) == 10_000
    assert survivor.stop() == 0


@pytest.mark.slow
async def test_twenty_kills_and_starts_of_the_broker_in_a_row(
    database: Database, own_rabbit, own_broker, relay
):
    await own_broker.declare()
    daemon = relay(broker=own_broker, **SETTINGS)
    for number in range(20):
        await database.enqueue_events(500)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own_rabbit.kill)
        await database.enqueue_events(500)
        await asyncio.to_thread(own_rabbit.start)
        await database.until(UNPUBLISHED, timeout=30)
        assert daemon.alive, number
    assert len({message.message_id for message in await own_broker.take(count=20_000)}) == 20_000
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    assert len(daemon.lines) < 20 * 12
    assert daemon.stop() == 0
    assert daemon.output == ""


async def test_a_body_over_the_brokers_limit_stays_back_with_the_size_in_its_error(
    database: Database, own_rabbit, own_broker: Broker, relay
):
    """celery/py-amqp#428, rabbitmq/amqp091-go#285: the channel closes with 406, and the whole batch with it."""
    own_rabbit.admin.eval("application:set_env(rabbit, max_message_size, 1000000).")
    try:
        await own_broker.declare()
        await database.enqueue_events(25)
        await database.enqueue_events(1, body="""'"' || repeat('x', 2000000) || '"'""")
        await database.enqueue_events(24)
        daemon = relay(broker=own_broker, RELAY_MAX_ATTEMPTS=2, RELAY_RETRY_BASE=0.2, **SETTINGS)
        await database.until("SELECT count(*) = 1 FROM {schema}.outbox WHERE quarantined_at IS NOT NULL")
        row = (await database.fetch("SELECT * FROM {schema}.outbox WHERE published_at IS NULL"))[0]
        assert (row["id"], row["attempts"]) == (26, 2)
        assert "message size 2000002 is larger than configured max size 1000000" in row["last_error"]
        assert len(await own_broker.take(count=49)) == 49
        assert daemon.metrics().sum("relay_broker_connections_total") == 1
        assert daemon.stop() == 0
    finally:
        own_rabbit.admin.eval("application:set_env(rabbit, max_message_size, 134217728).")
