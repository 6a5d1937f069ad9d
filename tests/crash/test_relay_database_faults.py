"""Faults of the database around real relays: nothing marked outside the claim's transaction, nothing lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from deploy.local.amqp_gate import PublishGate
from tests.support.watching import transaction_ages

UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"
# Short time-outs, so that a fault of seconds is one of minutes.
SHORT = {
    "DATABASE_COMMAND_TIMEOUT": 1,
    "DATABASE_CONNECT_TIMEOUT": 1,
    "DATABASE_ACQUIRE_TIMEOUT": 1,
    "RELAY_CONFIRM_TIMEOUT": 1,
    "RELAY_BATCH_DEADLINE": 3,
    "RELAY_BACKOFF_CAP": 1,
    "OBSERVE_INTERVAL": 1,
}
SESSIONS = 4 + 1
"""Of one relay at most: its pool and its observer."""


async def delivered(broker, count: int) -> set[str]:
    return {message.message_id for message in await broker.take(count=count)}


async def no_deadlock(database) -> None:
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await database.fetchval(query) == 0


@pytest.mark.parametrize("stage", ["publish", "mark", "commit", "committed"])
async def test_a_relay_killed_at_any_step_leaves_rows_that_the_next_one_publishes(
    database, broker, relay, stage
):
    """MassTransit/MassTransit#5339, #3869: orphan rows that nobody picks up."""
    await broker.declare()
    await database.enqueue_events(50)
    await database.enqueue_events(50, key="'k' || (n % 5)")
    victim = relay(argv=("-m", "tests.crash.dies_at", stage), RELAY_LANES=1, wait_for=None)
    assert await victim.ended() == -9
    marked = await database.fetchval("SELECT count(published_at) FROM {schema}.outbox")
    assert marked == (50 if stage == "committed" else 0)
    survivor = relay()
    await database.until(UNPUBLISHED)
    sent_twice = 0 if stage in ("publish", "committed") else 50
    assert len(await delivered(broker, 100 + sent_twice)) == 100
    assert survivor.stop() == 0


async def test_backends_terminated_fifty_times_under_load(database, broker, relay):
    """MagicStack/asyncpg#1307: a pool that deadlocks after its connections were aborted."""
    await broker.declare()
    daemon = relay(RELAY_TICK=0.02, **SHORT)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(50):
        await database.enqueue_events(20)
        await database.enqueue_events(5, key="'k' || n")
        await asyncio.sleep(random.uniform(0, 0.05))
        await asyncio.to_thread(database.terminate_sessions)
    await database.enqueue_events(50)
    await database.until(UNPUBLISHED, timeout=20)
    seconds = loop.time() - began
    assert len(await delivered(broker, 1300)) == 1300
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    assert len(database.sessions()) <= SESSIONS
    assert len(daemon.lines) < 10 + 2 * seconds, [line["event"] for line in daemon.lines]
    await no_deadlock(database)
    assert daemon.stop() == 0
    assert daemon.output == ""


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_a_restart_of_postgres_under_load_is_survived_by_itself(
    own_database, own_postgres, broker, relay, way
):
    """graphile/worker#185: after a long outage it never polls again."""
    await broker.declare()
    daemon = relay(database=own_database, RELAY_TICK=0.05, **SHORT)
    await own_database.enqueue_events(2000)
    await own_database.until("SELECT count(published_at) > 100 FROM {schema}.outbox")
    await asyncio.to_thread(getattr(own_postgres, way))
    mark = daemon.mark()
    await asyncio.sleep(4.5)
    status, body = daemon.get("/readyz")
    assert (status, daemon.get("/livez")[0]) == (503, 200)
    assert "database" in body
    lines = len(daemon.lines) - mark
    await asyncio.to_thread(own_postgres.start)
    await own_database.enqueue_events(100)
    await own_database.until(UNPUBLISHED, timeout=30)
    assert lines < 10
    assert len(await delivered(broker, 2100)) == 2100
    async with asyncio.timeout(10):
        while daemon.get("/readyz")[0] != 200:
            await asyncio.sleep(0.1)
    assert daemon.stop() == 0
    assert daemon.output == ""


async def test_a_silent_database_is_waited_out_and_its_transaction_ends_on_the_server_too(
    database, broker, relay, proxy
):
    """hushh-labs/hushh-research#5869, MemMachine/MemMachine#1552: alive and wedged for hours after a network loss."""
    await broker.declare()
    way = proxy(database.admin.port)
    gate = PublishGate(40)
    slow = proxy(broker.admin.amqp_port)
    slow.change("to_server", gate)
    daemon = relay(
        DATABASE_URL=way.rewrite(database.url),
        RELAY_AMQP_URL=slow.rewrite(broker.url),
        RELAY_DECLARE_EXCHANGE="false",
        RELAY_LANES=1,
        **SHORT,
    )
    await database.enqueue_events(100)
    assert await asyncio.to_thread(gate.reached.wait, 20), daemon.tail()
    async with transaction_ages(database) as ages:
        way.stall()  # amid a batch: the transaction is open
        mark = daemon.mark()
        await asyncio.sleep(8.0)
        assert daemon.get("/livez")[0] == 200
        assert daemon.get("/readyz")[0] == 503
        assert ages.seen[-1] == 0, "the server still holds the transaction of a client that is gone"
        assert len(daemon.lines) - mark < 12, daemon.tail()
        slow.cut()
        slow.forward()
        way.forward()
        await database.until(UNPUBLISHED, timeout=20)
    assert ages.oldest < SHORT["RELAY_BATCH_DEADLINE"] + 2.0
    assert len(await delivered(broker, 100)) == 100
    assert daemon.stop() == 0


async def test_sigterm_while_the_database_is_silent_ends_within_the_grace(database, broker, relay, proxy):
    await broker.declare()
    way = proxy(database.admin.port)
    daemon = relay(DATABASE_URL=way.rewrite(database.url), RELAY_TICK=0.05, **SHORT)
    await database.enqueue_events(10)
    await database.until(UNPUBLISHED)
    way.stall()
    await asyncio.sleep(0.5)
    began = asyncio.get_running_loop().time()
    daemon.terminate()
    assert await daemon.ended() == 0, daemon.tail()
    assert asyncio.get_running_loop().time() - began < 15
    way.cut()
    way.forward()


async def test_nothing_is_published_to_the_broker_while_the_database_can_not_be_written(
    database, broker, relay
):
    """gpustack/gpustack#6105, graphile/worker#449: a pool pinned to a demoted primary; 25006 for days."""
    await broker.declare()
    daemon = relay(RELAY_TICK=0.1, **SHORT)
    await database.enqueue_events(10)
    await database.until(UNPUBLISHED)
    await asyncio.to_thread(database.admin.set_read_only, database.name, True)
    await asyncio.to_thread(database.terminate_sessions)
    mark = daemon.mark()
    async with database.session(default_transaction_read_only="off") as producer:
        await producer.execute(
            "SELECT count(relay_drain.enqueue_event('order', n::text, 'order.placed', '{}'::jsonb)) "
            "FROM generate_series(1, 50) AS n"
        )
        await daemon.seen("batch_failed", start=mark, error_type="ReadOnlySQLTransactionError")
        await asyncio.sleep(2.0)
        assert broker.depth() == 10, "published before it was known that it can be marked"
        assert daemon.get("/livez")[0] == 200
        # The sessions that were opened meanwhile are pinned to read-only; nobody ends them.
        await asyncio.to_thread(database.admin.set_read_only, database.name, False)
        await database.until(UNPUBLISHED, timeout=10)
    assert len(await delivered(broker, 60)) == 60
    assert len(daemon.lines) - mark < 20
    assert daemon.stop() == 0


async def test_a_relay_frozen_past_its_deadline_holds_nobody_up_and_marks_nothing_when_it_wakes(
    database, broker, relay, proxy
):
    """The server ends the idle transaction; another relay publishes; the frozen one's marks come too late."""
    await broker.declare()
    gate = PublishGate(40)
    way = proxy(broker.admin.amqp_port)
    way.change("to_server", gate)
    await database.enqueue_events(100)
    frozen = relay(
        RELAY_AMQP_URL=way.rewrite(broker.url), RELAY_DECLARE_EXCHANGE="false", RELAY_LANES=1, **SHORT
    )
    assert await asyncio.to_thread(gate.reached.wait, 20), frozen.tail()
    frozen.pause()
    async with transaction_ages(database) as ages:
        second = relay(**SHORT)
        await database.until(UNPUBLISHED, timeout=20)
    assert ages.oldest < SHORT["RELAY_BATCH_DEADLINE"] + 2.0
    rows = "SELECT id, published_at, attempts FROM {schema}.outbox ORDER BY id"
    before = await database.fetch(rows)
    way.forward()
    mark = frozen.mark()
    frozen.resume()
    await frozen.seen("batch_failed", start=mark)
    await database.enqueue_events(20)
    await database.until(UNPUBLISHED)
    assert (await database.fetch(rows))[:100] == before
    assert len(await delivered(broker, 160)) == 120
    assert frozen.stop() == 0
    assert second.stop() == 0


async def test_a_pool_of_one_serves_lane_pruner_and_observer(database, broker, relay):
    """MagicStack/asyncpg#1247, procrastinate-org/procrastinate#1435: pool exhausted, acquire waits for ever."""
    await broker.declare()
    await database.enqueue_events(3000)
    await database.fetch(
        "UPDATE {schema}.outbox SET published_at = now() - interval '30 days' WHERE id <= 1000"
    )
    daemon = relay(
        DATABASE_POOL_SIZE=1,
        RELAY_LANES=1,
        RELAY_PRUNE_INTERVAL=0.1,
        RELAY_PRUNE_BATCH=100,
        OBSERVE_INTERVAL=1,
    )
    await database.until("SELECT count(*) = 2000 AND count(published_at) = 2000 FROM {schema}.outbox")
    assert len(database.sessions("relay")) == 1
    assert not daemon.events("prune_failed")
    assert not daemon.events("batch_failed", stage="connect")
    assert daemon.stop() == 0


async def test_ddl_under_a_live_relay_heals_by_itself(database, broker, relay):
    """A new column; a changed type (the cached plans' result changes); a lock that is held for seconds."""
    await broker.declare()
    daemon = relay(RELAY_TICK=0.05, **SHORT)

    async def flows() -> None:
        await database.enqueue_events(20)
        await database.enqueue_events(20, key="'k' || n")
        await database.until(UNPUBLISHED, timeout=20)

    await flows()
    for statement in (
        "ALTER TABLE {schema}.outbox ADD COLUMN tenant text DEFAULT 'none'",
        "ALTER TABLE {schema}.outbox ALTER COLUMN routing_key TYPE varchar(500)",
        "ALTER TABLE {schema}.outbox ALTER COLUMN content_type TYPE varchar(200)",
        "DROP INDEX {schema}.outbox_fresh",
        "CREATE INDEX outbox_fresh ON {schema}.outbox (id) WHERE published_at IS NULL AND quarantined_at IS NULL "
        "AND next_attempt_at IS NULL AND ordering_key IS NULL",
    ):
        await database.fetch(statement)
        await flows()
    async with database.session() as operator:
        transaction = operator.transaction()
        await transaction.start()
        await operator.execute("LOCK TABLE relay_drain.outbox IN ACCESS EXCLUSIVE MODE")
        await asyncio.sleep(SHORT["RELAY_BATCH_DEADLINE"] + 1.0)
        assert daemon.get("/livez")[0] == 200
        await transaction.rollback()
    await flows()
    assert len(await delivered(broker, 7 * 40)) == 7 * 40
    await no_deadlock(database)
    assert len(daemon.lines) < 40
    assert daemon.stop() == 0
