"""Many replicas without faults: no message and no push twice. The same end by SIGTERM and by SIGKILL."""

from __future__ import annotations

import asyncio
from collections import Counter

EVENTS, DELIVERIES, REPLICAS = 20_000, 5_000, 4


async def test_twenty_thousand_events_through_four_relays_are_twenty_thousand_messages(
    database, broker, relay
):
    await broker.declare()
    await database.enqueue_events(EVENTS)
    daemons = [relay(RELAY_TICK=1) for _ in range(REPLICAS)]
    await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL", timeout=180)
    assert [daemon.stop() for daemon in daemons] == [0] * REPLICAS
    messages = await broker.take(count=EVENTS, timeout=120)
    assert len(messages) == EVENTS
    assert len({message.message_id for message in messages}) == EVENTS
    assert all(message.properties.delivery_mode == 2 for message in messages[:100])


async def test_five_thousand_deliveries_through_four_drains_are_one_push_each(database, simulator, drain):
    await database.enqueue_deliveries(DELIVERIES)
    daemons = [drain() for _ in range(REPLICAS)]
    await database.until(
        "SELECT count(*) = $1 FROM {schema}.notification_deliveries WHERE status = 'sent'",
        DELIVERIES,
        timeout=180,
    )
    assert [daemon.stop() for daemon in daemons] == [0] * REPLICAS
    stats = simulator.control.stats()
    assert stats["requests"] == DELIVERIES
    assert stats["distinct_ids"] == DELIVERIES
    assert stats["distinct_tokens"] == 1
    attempts = await database.fetch(
        "SELECT DISTINCT attempts, claim_version FROM {schema}.notification_deliveries"
    )
    assert [tuple(row) for row in attempts] == [(1, 1)]
    deadlocks = await database.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == 0


async def test_rows_that_commit_out_of_id_order_are_all_published(database, broker, relay):
    await broker.declare()
    daemon = relay(RELAY_BATCH_SIZE=10)
    async with database.session() as late, database.session() as early:
        first = late.transaction()
        await first.start()
        await late.execute("SELECT relay_drain.enqueue_event('order', 'late', 'order.placed', '{}'::jsonb)")
        for n in range(50):
            await early.execute(
                "SELECT relay_drain.enqueue_event('order', $1, 'order.placed', '{}'::jsonb)", str(n)
            )
        await database.until("SELECT count(*) = 50 FROM {schema}.outbox WHERE published_at IS NOT NULL")
        await first.commit()
    await database.until("SELECT count(*) = 51 FROM {schema}.outbox WHERE published_at IS NOT NULL")
    assert await database.fetchval("SELECT published_at IS NOT NULL FROM {schema}.outbox WHERE id = 1")
    assert daemon.stop() == 0
    assert len(await broker.take(count=51)) == 51


async def final_rows_of_drain(database, simulator, drain, end: str) -> Counter:
    """50 slow pushes, half of them answered in time; then TERM or KILL, lease moved, a second drain finishes."""
    control = simulator.control
    control.script([{"do": "pass", "times": 25}, {"do": "hold"}], end="repeat_last")
    await database.enqueue_deliveries(50)
    first = drain(DRAIN_DRAIN_DEADLINE=0.5)
    await control.until(requests=50)
    await database.until("SELECT count(*) = 25 FROM {schema}.notification_deliveries WHERE status = 'sent'")
    if end == "TERM":
        assert first.stop() == 0
        left = await database.fetch(
            "SELECT status FROM {schema}.notification_deliveries WHERE status = 'claimed'"
        )
        assert not left, "SIGTERM left rows claimed"
    else:
        first.kill()
    control.clear_scripts()
    await database.fetch(
        "UPDATE {schema}.notification_deliveries SET next_attempt_at = now() WHERE status IN ('claimed', 'pending')"
    )
    second = drain()
    await database.until("SELECT count(*) = 50 FROM {schema}.notification_deliveries WHERE status = 'sent'")
    assert second.stop() == 0
    rows = await database.fetch(
        "SELECT status, attempts, claim_version FROM {schema}.notification_deliveries"
    )
    assert simulator.control.stats()["requests"] == 75
    return Counter(tuple(row) for row in rows)


async def test_sigterm_of_drain_ends_in_the_same_final_rows_as_sigkill(database, simulator, drain):
    by_term = await final_rows_of_drain(database, simulator, drain, "TERM")
    await database.fetch("TRUNCATE {schema}.notification_deliveries")
    await asyncio.to_thread(simulator.control.reset)
    by_kill = await final_rows_of_drain(database, simulator, drain, "KILL")
    assert by_term == by_kill == {("sent", 1, 1): 25, ("sent", 2, 2): 25}


async def final_rows_of_relay(database, broker, relay, proxy, end: str) -> Counter:
    """A batch whose confirms never come; then TERM or KILL; a second relay finishes."""
    queue = await broker.declare(f"all-{end}", f"{end}.#")
    way = proxy(broker.admin.amqp_port)
    first = relay(
        RELAY_AMQP_URL=way.rewrite(broker.url), RELAY_CONFIRM_TIMEOUT=3, RELAY_BATCH_DEADLINE=5, RELAY_LANES=1
    )
    enqueue = "SELECT count({schema}.enqueue_event('order', n::text, $1, '{}'::jsonb)) FROM generate_series(1, $2) AS n"
    await database.fetch(
        enqueue, f"{end}.first", 1
    )  # the first message proves the exchange, and opens the channel
    await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
    way.swallow("to_client")
    await database.fetch(enqueue, f"{end}.placed", 100)
    async with asyncio.timeout(20):
        while broker.depth(queue) < 101:
            await asyncio.sleep(0.02)
    if end == "TERM":
        assert first.stop() == 0
    else:
        first.kill()
    assert (
        await database.fetchval(
            "SELECT count(published_at) FROM {schema}.outbox WHERE event_type = $1", f"{end}.placed"
        )
        == 0
    )
    second = relay()
    await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
    assert second.stop() == 0
    messages = await broker.take(queue, count=201)
    rows = await database.fetch(
        """SELECT attempts, last_error, quarantined_at, published_at IS NOT NULL FROM {schema}.outbox
           WHERE event_type = $1""",
        f"{end}.placed",
    )
    return Counter(
        [tuple(row) for row in rows] + [("messages", len(messages), len({m.message_id for m in messages}), 0)]
    )


async def test_sigterm_of_relay_ends_in_the_same_final_rows_as_sigkill(database, broker, relay, proxy):
    by_term = await final_rows_of_relay(database, broker, relay, proxy, "TERM")
    by_kill = await final_rows_of_relay(database, broker, relay, proxy, "KILL")
    assert by_term == by_kill == {(0, None, None, True): 100, ("messages", 201, 101, 0): 1}
