"""What an operator asks costs the same at any size: buffers and rows touched have a bound, and the indexes are used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import pytest

from common import sql as common_sql
from common.schema import qualify
from drain import admin_sql as drain_sql
from relay import admin_sql as relay_sql
from tests.plan.explain import Plan, explain
from tests.support.database import Database

SCHEMA = "relay_drain"
ROWS = 40_000


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[asyncpg.Connection]:
    async with database.session(plan_cache_mode="force_custom_plan") as connection:
        yield connection


async def outbox(connection: asyncpg.Connection) -> None:
    """History, backlog, keys and quarantine, each larger than what a look takes."""
    for key, published, quarantined in (
        ("NULL", "now() - make_interval(secs => n / 1000.0)", "NULL"),
        ("NULL", "NULL", "NULL"),
        ("'key-' || n % 3000", "NULL", "NULL"),
        ("NULL", "NULL", "now() - make_interval(secs => n)"),
    ):
        await connection.execute(
            f"""INSERT INTO {SCHEMA}.outbox (aggregate_type, aggregate_id, event_type, payload, ordering_key,
                    published_at, quarantined_at, last_error)
                SELECT 'order', n::text, 'order.placed', '{{}}', {key}, {published}, {quarantined}, 'error ' || n
                FROM generate_series(1, {ROWS}) AS n"""
        )
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")


async def ledger(connection: asyncpg.Connection) -> None:
    """Finished and open rows of three apps."""
    for status in ("sent", "failed", "pending"):
        await connection.execute(
            f"""INSERT INTO {SCHEMA}.notification_deliveries (app, device_token, payload, status, last_reason,
                    next_attempt_at, finished_at)
                SELECT 'app-' || n % 3, md5(n::text), '{{}}', '{status}', 'Unregistered',
                    now() - make_interval(secs => n),
                    CASE WHEN '{status}' <> 'pending' THEN now() - make_interval(secs => n) END
                FROM generate_series(1, {ROWS}) AS n"""
        )
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.notification_deliveries")


async def plan_of(connection: asyncpg.Connection, statement: str, *arguments: object) -> Plan:
    plan = await explain(connection, qualify(statement, SCHEMA), *arguments)
    scans = {(node["Relation Name"]) for node in plan.nodes() if node["Node Type"] == "Seq Scan"}
    assert not scans, f"a whole table is read: {scans}"
    return plan


async def test_relay_status_touches_its_samples_and_no_more(connection: asyncpg.Connection) -> None:
    await outbox(connection)
    keys = [f"key-{n}" for n in range(relay_sql.KEYS)]
    for statement, arguments, most in (
        (common_sql.OUTBOX_LAG, (), 4 * common_sql.CAP + 2000),
        (relay_sql.STATUS_EXCHANGES, (), 3 * relay_sql.SAMPLE),
        (relay_sql.STATUS_RATE, (60.0,), common_sql.CAP),
        (relay_sql.STATUS_LAST_PUBLISHED, (), 1),
        (relay_sql.STATUS_QUARANTINED, (), relay_sql.PARKED),
        (relay_sql.STATUS_HEADS, (keys,), 4 * relay_sql.KEYS),
        (relay_sql.STATUS_BEHIND, (keys[:10],), 10 * relay_sql.BEHIND),
    ):
        plan = await plan_of(connection, statement, *arguments)
        assert plan.rows_touched() <= most, statement
        assert plan.buffers() <= 12_000, statement


async def test_drain_status_touches_its_samples_and_no_more(connection: asyncpg.Connection) -> None:
    await ledger(connection)
    apps = ["app-0", "app-1", "app-2"]
    for statement, arguments, most in (
        (common_sql.DELIVERIES_LAG, (apps,), 6 * common_sql.CAP + 3),
        (drain_sql.STATUS_FINISHED, (60.0,), 4 * drain_sql.SAMPLE),
        (drain_sql.STATUS_REASONS, (apps,), 3 * drain_sql.SAMPLE),
    ):
        plan = await plan_of(connection, statement, *arguments)
        assert plan.rows_touched() <= most, statement


async def test_a_write_by_ids_goes_by_the_primary_key(connection: asyncpg.Connection) -> None:
    await outbox(connection)
    await ledger(connection)
    ids = list(range(3 * ROWS + 1, 3 * ROWS + 1001))
    for statement, arguments in (
        (relay_sql.RELEASE_QUARANTINED, (ids,)),
        (relay_sql.PURGE_QUARANTINED, (ids,)),
        (relay_sql.REPLAY, (list(range(1, 1001)),)),
        (drain_sql.REQUEUE, (list(range(ROWS + 1, ROWS + 1001)), ["failed"], None)),
        (drain_sql.CANCEL, (list(range(2 * ROWS + 1, 2 * ROWS + 1001)),)),
    ):
        plan = await plan_of(connection, statement, *arguments)
        assert plan.rows_touched() <= 4000, statement


async def test_selections_go_by_the_index_of_what_they_are_filtered_by(
    connection: asyncpg.Connection,
) -> None:
    await outbox(connection)
    await ledger(connection)
    now = datetime.now(UTC)
    event_id = await connection.fetchval(f"SELECT event_id FROM {SCHEMA}.outbox WHERE id = 7")
    published = [None] * 8
    by_time = [*published[:5], now.replace(year=now.year + 1), None, None]
    by_event = [None, [event_id], *published[2:]]
    for arguments, index in ((by_time, "outbox_published"), (by_event, "outbox_event_id_key")):
        plan = await plan_of(connection, relay_sql.SELECT_PUBLISHED, *arguments)
        assert plan.indexes() == {index}
        assert plan.rows_touched() <= 1
    plan = await plan_of(connection, relay_sql.LIST_QUARANTINED, *[None] * 5, 50)
    assert plan.indexes() == {"outbox_quarantined"}
    assert plan.rows_touched() <= 50
    statuses = ["pending", "claimed", "sent", "failed", "expired", "superseded"]
    plan = await plan_of(connection, drain_sql.LIST, *[None] * 5, statuses, None, None, 50)
    assert plan.rows_touched() <= 1000
    plan = await plan_of(connection, drain_sql.LIST, [7], *[None] * 4, statuses, None, None, 50)
    assert plan.rows_touched() <= 20
