"""Wake-up: an idle relay publishes at the commit, not at the tick; and whatever happens to it, the tick remains."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.latency.measure import measure
from migrations.__main__ import set_wakeup

TICK = 30
UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'relay-listen' AND datname = current_database()"


@pytest.fixture
def trigger(database):
    set_wakeup(database.url, database.schema, True)


async def woken(relay, **settings):
    """A relay that listens and has looked once, so that only a wake-up can make it look before the tick."""
    daemon = relay(RELAY_TICK=TICK, RELAY_WAKEUP="true", **settings)
    await daemon.seen("wakeup_listening")
    await daemon.seen("broker_connected")
    return daemon


@pytest.mark.parametrize("producers", [1, 4])
async def test_an_idle_relay_publishes_at_the_commit_and_not_at_the_tick(
    database, broker, relay, trigger, producers
):
    """With four producers transactions overlap: an id that commits late is woken for like any other."""
    queue = await broker.declare()
    daemon = await woken(relay)
    latency = await measure(database.url, broker.url, queue, events=200, rate=50, producers=producers)
    print(f"wake-up, {producers} producer(s): {latency}")
    assert latency.quantile(0.99) < 1000 < TICK * 1000
    assert daemon.stop() == 0


async def test_a_small_tick_does_without_the_trigger(database, broker, relay):
    queue = await broker.declare()
    daemon = relay(RELAY_TICK=0.02)
    await daemon.seen("broker_connected")
    latency = await measure(database.url, broker.url, queue, events=100, rate=50)
    print(f"tick 20 ms: {latency}")
    assert latency.quantile(0.99) < 1000
    assert await database.fetch("SELECT FROM pg_trigger WHERE tgname = 'outbox_wakeup'") == [], (
        "on by default"
    )
    assert daemon.stop() == 0


async def test_a_killed_listen_connection_is_replaced_and_what_it_missed_is_found(
    database, broker, relay, trigger
):
    """MagicStack/asyncpg#519, janbjorge/pgqueuer#253: dead, or listening again and silent; a gap before the scan."""
    await broker.declare()
    daemon = await woken(relay)
    for _ in range(3):
        (old,) = await database.fetch(BACKENDS)
        # One statement: the row is committed when the connection that should have been told is gone.
        await database.fetch(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) AS listening")
        await database.enqueue_events(1)
        await database.until(UNPUBLISHED, timeout=15)
        await database.until(
            f"SELECT count(*) = 1 FROM ({BACKENDS} AND pid <> $1 AND query LIKE 'LISTEN%') AS new", old["pid"]
        )
        began = time.monotonic()
        await database.enqueue_events(1)
        await database.until(UNPUBLISHED, timeout=15)
        assert time.monotonic() - began < 5.0 < TICK
    assert len(daemon.lines) < 15
    assert daemon.stop() == 0
    assert daemon.output == ""


async def test_a_listen_connection_that_fell_silent_is_found_out_and_the_tick_carries_on(
    database, broker, relay, trigger, proxy
):
    """Its own connection, by its own URL: past a pgbouncer, here past a network that drops packets."""
    await broker.declare()
    way = proxy(database.admin.port)
    daemon = relay(
        RELAY_TICK=1,
        RELAY_WAKEUP="true",
        RELAY_LISTEN_URL=way.rewrite(database.url),
        DATABASE_COMMAND_TIMEOUT=1,
        DATABASE_CONNECT_TIMEOUT=1,
    )
    await daemon.seen("wakeup_listening")
    mark = daemon.mark()
    way.stall()
    await database.enqueue_events(1)
    await database.until(UNPUBLISHED, timeout=15)
    await daemon.seen("wakeup_lost", start=mark)
    way.cut()
    way.forward()
    await daemon.seen("wakeup_listening", start=mark)
    assert daemon.stop() == 0


async def test_the_trigger_speaks_once_for_a_statement_with_an_empty_payload_and_not_for_a_rollback(
    database, trigger
):
    """LFDT-Panurus/panurus#1934: NOTIFY for each row serialises commits."""
    heard = []
    async with database.session() as listener, database.session() as producer:
        await listener.add_listener("relay_drain_outbox", lambda *told: heard.append(told[2:]))
        transaction = producer.transaction()
        await transaction.start()
        await producer.execute("SELECT relay_drain.enqueue_event('a', '1', 'b', '{}'::jsonb)")
        await transaction.rollback()
        await producer.execute(
            "INSERT INTO relay_drain.outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', n::text, 'order.placed', '{}' FROM generate_series(1, 1000) AS n"
        )
        async with asyncio.timeout(10):
            while not heard:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    assert heard == [("relay_drain_outbox", "")]
