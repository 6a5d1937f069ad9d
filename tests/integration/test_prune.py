"""Pruning: what is past its retention goes, in small batches, by one relay at a time, and nothing else ever."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from common.prune import DAY, PrunePace, Pruner, Retention, lock_key
from common.schema import qualify
from relay import sql
from tests.support.lanes import lane_of

OLD, YOUNG = "now() - interval '2 days'", "now() - interval '1 hour'"
QUICK = {"RELAY_RETENTION_DAYS": 1, "RELAY_INBOX_RETENTION_DAYS": 1, "RELAY_PRUNE_INTERVAL": 0.2}


async def fill(database, rows: int, event_type: str, **columns: str) -> None:
    names, values = ", ".join(["", *columns]), ", ".join(["", *columns.values()])
    await database.fetch(
        f"""INSERT INTO {{schema}}.outbox (aggregate_type, aggregate_id, event_type, payload{names})
            SELECT 'order', n::text, '{event_type}', '{{}}'{values} FROM generate_series(1, {rows}) AS n"""
    )


async def fill_inbox(database, rows: int, received_at: str) -> None:
    await database.fetch(
        f"""INSERT INTO {{schema}}.inbox (consumer, event_id, received_at)
            SELECT 'test', gen_random_uuid(), {received_at} FROM generate_series(1, {rows})"""
    )


async def fill_all(database) -> None:
    await fill(database, 2500, "published.old", published_at=OLD)
    await fill(database, 100, "published.young", published_at=YOUNG)
    await fill(
        database, 20, "quarantined.old", quarantined_at=OLD, created_at=OLD, attempts="5", next_attempt_at=OLD
    )
    await fill(
        database, 30, "waiting.old", created_at=OLD, attempts="1", next_attempt_at="now() + interval '1 hour'"
    )
    await fill_inbox(database, 1500, OLD)
    await fill_inbox(database, 10, YOUNG)


async def kinds(database) -> dict[str, int]:
    rows = await database.fetch("SELECT event_type, count(*) FROM {schema}.outbox GROUP BY 1")
    return {row["event_type"]: row["count"] for row in rows}


KEPT = {"published.young": 100, "quarantined.old": 20, "waiting.old": 30}


async def test_what_is_past_its_retention_goes_and_nothing_else(database, broker, relay):
    await fill_all(database)
    daemon = relay(RELAY_PRUNE_BATCH=200, **QUICK)
    await database.until("SELECT count(*) = 150 FROM {schema}.outbox")
    await database.until("SELECT count(*) = 10 FROM {schema}.inbox")
    assert await kinds(database) == KEPT
    # Constant load: what grows old goes, again and again.
    for _ in range(3):
        await fill(database, 300, "published.old", published_at=OLD)
        await database.until("SELECT count(*) = 150 FROM {schema}.outbox")
    metrics = daemon.metrics()
    assert metrics.value("relay_pruned_total", table="outbox") == 3400
    assert metrics.value("relay_pruned_total", table="inbox") == 1500
    assert sum(line["rows"] for line in daemon.events("pruned", table="outbox")) == 3400
    assert daemon.stop() == 0


async def test_retention_below_zero_keeps_for_ever(database, broker, relay):
    await broker.declare()
    await fill_all(database)
    daemon = relay(**QUICK | {"RELAY_RETENTION_DAYS": -1})
    await database.until("SELECT count(*) = 10 FROM {schema}.inbox")
    await database.enqueue_events(10)
    await database.until("SELECT count(published_at) = 2610 FROM {schema}.outbox")
    assert await kinds(database) == {**KEPT, "published.old": 2500, "order.placed": 10}
    assert daemon.stop() == 0
    daemon = relay(**QUICK | {"RELAY_RETENTION_DAYS": -1, "RELAY_INBOX_RETENTION_DAYS": -1})
    await fill_inbox(database, 5, OLD)
    await asyncio.sleep(1.0)
    assert await database.fetchval("SELECT count(*) FROM {schema}.inbox") == 15
    assert daemon.stop() == 0


async def test_while_another_prunes_a_relay_leaves_it_alone_and_publishes_on(database, broker, relay):
    await broker.declare()
    await fill(database, 500, "published.old", published_at=OLD)
    async with database.session() as other:
        transaction = other.transaction()
        await transaction.start()
        assert await other.fetchval(
            "SELECT pg_try_advisory_xact_lock($1)", lock_key("outbox", database.schema)
        )
        daemon = relay(**QUICK)
        await database.enqueue_events(50)
        await database.until("SELECT count(published_at) = 550 FROM {schema}.outbox")
        await asyncio.sleep(1.0)
        assert (await kinds(database))["published.old"] == 500
        await transaction.rollback()
    await database.until("SELECT count(*) = 50 FROM {schema}.outbox")
    assert daemon.stop() == 0
    assert not daemon.events("prune_failed")


async def test_four_relays_prune_and_publish_without_a_deadlock_and_one_prunes_at_a_time(
    database, broker, relay
):
    """dotnetcore/CAP#1809, Particular/NServiceBus.Persistence.Sql#778."""
    await broker.declare()
    await fill(database, 20_000, "published.old", published_at=OLD)
    most, holders = 0, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    daemons = [relay(RELAY_PRUNE_BATCH=100, wait_for=None, **QUICK) for _ in range(4)]
    await database.enqueue_events(3000)
    async with database.session() as connection, asyncio.timeout(60):
        while await connection.fetchval("SELECT count(*) <> 3000 FROM relay_drain.outbox"):
            most = max(most, await connection.fetchval(holders))
        await database.until("SELECT count(published_at) = 3000 FROM {schema}.outbox")
    assert most == 1
    for daemon in daemons:
        await daemon.seen("started")
    assert [daemon.stop() for daemon in daemons] == [0] * 4
    assert (
        sum(line["rows"] for daemon in daemons for line in daemon.events("pruned", table="outbox")) == 20_000
    )
    assert (
        await database.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        == 0
    )
    assert len(await broker.take(count=3000)) == 3000


def pruner(bench, database, pace: PrunePace) -> Pruner:
    return Pruner(
        [Retention("outbox", qualify(sql.PRUNE_PUBLISHED, database.schema), DAY)],
        pace,
        lock_key("outbox", database.schema),
        bench.pool,
        bench.metrics.pruned,
        bench.lifecycle,
        bench.lane.telling._logger,
    )


async def test_a_round_keeps_its_budget_and_rests_as_long_as_it_works(database):
    """It must not slow publishing down: half the time at most, and no longer than the budget in each interval."""
    await fill(database, 30_000, "published.old", published_at=OLD)
    loop = asyncio.get_running_loop()
    async with lane_of(database) as bench:
        mine = pruner(bench, database, PrunePace(batch=50, interval=60.0, budget=0.5))
        worked, real = 0.0, mine.prune_batch

        async def timed(retention):
            nonlocal worked
            began = loop.time()
            try:
                return await real(retention)
            finally:
                worked += loop.time() - began

        mine.prune_batch = timed
        with capture_logs() as logs:
            began = loop.time()
            task = asyncio.create_task(mine.run())
            while not logs:
                await asyncio.sleep(0.01)
            took = loop.time() - began
            bench.lifecycle.stopping.set()
            await task
        assert 0.45 < took < 2.0
        assert worked < 0.75 * took
        assert 0 < logs[0]["rows"] < 30_000
        left = await database.fetchval("SELECT count(*) FROM {schema}.outbox")
        assert left == 30_000 - logs[0]["rows"]


async def test_a_pruner_that_can_not_prune_says_so_once_and_goes_on_when_it_can(database):
    await fill(database, 10, "published.old", published_at=OLD)
    async with lane_of(database) as bench:
        mine = pruner(bench, database, PrunePace(batch=50, interval=0.05, budget=0.5))
        await database.fetch("ALTER TABLE {schema}.outbox RENAME TO elsewhere")
        with capture_logs() as logs:
            task = asyncio.create_task(mine.run())
            await asyncio.sleep(1.0)
            assert [line["event"] for line in logs] == ["prune_failed"]
            await database.fetch("ALTER TABLE {schema}.elsewhere RENAME TO outbox")
            await database.until("SELECT count(*) = 0 FROM {schema}.outbox")
            bench.lifecycle.stopping.set()
            await task
        assert sorted(line["event"] for line in logs) == ["prune_failed", "prune_recovered", "pruned"]


def test_the_lock_is_another_one_for_each_queue_and_schema():
    keys = {
        lock_key(queue, schema) for queue in ("outbox", "deliveries") for schema in ("a", "b", "relay_drain")
    }
    assert len(keys) == 6
    assert all(-(2**63) <= key < 2**63 for key in keys)
