"""Trace 1 of the design: relay killed mid-batch. The real entry point, a real SIGKILL, the figures asserted."""

from __future__ import annotations

import asyncio

import pytest

from deploy.local.amqp_gate import PublishGate

BATCH, PUBLISHED = 100, 40


async def kill_mid_batch(database, broker, relay, proxy, argv=("-m", "relay", "run")):
    """Claim 100 rows, let 40 publishes reach the broker, SIGKILL."""
    await broker.declare()
    await database.enqueue_events(BATCH)
    gate = PublishGate(PUBLISHED)
    way = proxy(broker.admin.amqp_port)
    way.change("to_server", gate)
    daemon = relay(
        RELAY_AMQP_URL=way.rewrite(broker.url), RELAY_LANES=1, RELAY_DECLARE_EXCHANGE="false", argv=argv
    )
    assert await asyncio.to_thread(gate.reached.wait, 20), daemon.tail()
    async with asyncio.timeout(20):
        while broker.depth() < PUBLISHED:
            await asyncio.sleep(0.02)
    daemon.kill()
    assert daemon.returncode == -9


async def check_nothing_is_lost(database, broker, relay):
    """After the crash another relay publishes whatever is not marked: all 100 events must have reached the broker."""
    survivor = relay()
    await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
    messages = await broker.take(count=BATCH)
    assert survivor.stop() == 0
    assert len({message.message_id for message in messages}) == BATCH, "events were lost"
    return messages


async def test_relay_killed_mid_batch_leaves_nothing_marked_and_loses_nothing(database, broker, relay, proxy):
    await kill_mid_batch(database, broker, relay, proxy)
    assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
    messages = await check_nothing_is_lost(database, broker, relay)
    assert len(messages) == BATCH + PUBLISHED

    applied = 0
    for message in messages:
        applied += await database.fetchval("SELECT {schema}.accept_event('test', $1)", message.message_id)
    assert applied == BATCH


async def test_the_crash_test_catches_the_wrong_order(database, broker, relay, proxy):
    """The mutant that commits first loses what the broker had not: the check above must see it."""
    await kill_mid_batch(database, broker, relay, proxy, argv=("-m", "tests.crash.commit_first"))
    assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == BATCH
    with pytest.raises(AssertionError, match="events were lost"):
        await check_nothing_is_lost(database, broker, relay)
