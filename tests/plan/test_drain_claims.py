"""Drain's claim and settle touch what they take and little else."""

from __future__ import annotations

import pytest

from common.schema import qualify
from drain import sql
from drain.claim import BEGINNING
from tests.plan.explain import explain

SCHEMA = "relay_drain"
LIMIT = 50
CLAIM = qualify(sql.CLAIM, SCHEMA)


@pytest.fixture
async def connection(database):
    connection = await database.connect()
    yield connection
    await connection.close()


async def fill(
    connection, rows: int, *, app: str = "shop", status: str = "pending", due: str = "now()"
) -> None:
    finished = "NULL" if status in ("pending", "claimed") else "now()"
    await connection.execute(
        f"""INSERT INTO {SCHEMA}.notification_deliveries
                (app, device_token, payload, status, next_attempt_at, finished_at)
            SELECT '{app}', lpad(to_hex(n), 8, '0'), '{{}}', '{status}', {due}, {finished}
            FROM generate_series(1, {rows}) AS n"""
    )


async def test_claim_reads_only_due_rows_among_history_leased_and_future_ones(connection):
    await fill(connection, 30_000, status="sent", due="now() - interval '1 day'")
    await fill(connection, 10_000, status="claimed", due="now() + interval '1 minute'")
    await fill(connection, 10_000, due="now() + interval '1 hour'")
    await fill(connection, 10_000, due="now() - n * interval '1 ms'")
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.notification_deliveries")
    plan = await explain(connection, CLAIM, ["shop"], [LIMIT], [BEGINNING], 120.0, "test")
    assert "deliveries_due" in plan.indexes()
    assert "Seq Scan" not in plan.kinds()
    assert plan.rows_touched() <= 3 * LIMIT
    assert plan.buffers() < 3000


async def test_claim_with_stale_statistics_takes_no_more_than_the_limit(connection):
    await connection.execute(f"ANALYZE {SCHEMA}.notification_deliveries")
    await fill(connection, 30_000)
    for setting in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "enable_material"):
        await connection.execute(f"SET {setting} = off")
    rows = await connection.fetch(CLAIM, ["shop"], [LIMIT], [BEGINNING], 120.0, "test")
    assert len(rows) == LIMIT
    claimed = await connection.fetchval(
        f"SELECT count(*) FROM {SCHEMA}.notification_deliveries WHERE status = 'claimed'"
    )
    assert claimed == LIMIT


async def test_one_statement_claims_for_every_app_its_own_number_of_rows(connection):
    for app, rows in (("big", 2000), ("small", 10), ("idle", 0)):
        await fill(connection, rows, app=app)
    rows = await connection.fetch(
        CLAIM, ["big", "small", "idle"], [LIMIT, LIMIT, LIMIT], [BEGINNING] * 3, 120.0, "t"
    )
    found = [row["app"] for row in rows]
    assert found.count("big") == LIMIT
    assert found.count("small") == 10


async def test_claim_is_flat_while_a_snapshot_keeps_settled_rows_alive(connection, database):
    holder = await database.connect()
    try:
        await fill(connection, 30_000, due="now() - interval '1 hour' + n * interval '1 ms'")
        snapshot = holder.transaction(isolation="repeatable_read")
        await snapshot.start()
        await holder.fetchval(f"SELECT count(*) FROM {SCHEMA}.notification_deliveries")
        await connection.execute(
            f"UPDATE {SCHEMA}.notification_deliveries SET status = 'sent', finished_at = now()"
        )
        cursor = await connection.fetchval(
            f"SELECT max(next_attempt_at) FROM {SCHEMA}.notification_deliveries"
        )
        await fill(connection, 500)
        await connection.execute(f"VACUUM ANALYZE {SCHEMA}.notification_deliveries")
        from_start = await explain(connection, CLAIM, ["shop"], [LIMIT], [BEGINNING], 120.0, "t")
        from_cursor = await explain(connection, CLAIM, ["shop"], [LIMIT], [cursor], 120.0, "t")
        assert from_start.buffers() > from_cursor.buffers() + 300, "the snapshot must make a difference"
        assert from_cursor.rows_touched() <= 3 * LIMIT
        await snapshot.rollback()
    finally:
        await holder.close()


async def test_settle_finds_its_rows_by_primary_key(connection):
    await fill(connection, 20_000, status="claimed", due="now() + interval '1 minute'")
    await connection.execute(f"UPDATE {SCHEMA}.notification_deliveries SET claim_version = 1")
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.notification_deliveries")
    ids = list(range(101, 201))
    plan = await explain(
        connection,
        qualify(sql.SETTLE, SCHEMA),
        ids,
        [1] * 100,
        ["sent"] * 100,
        [None] * 100,
        [0] * 100,
        [200] * 100,
        [None] * 100,
        [False] * 100,
        [None] * 100,
    )
    assert "Seq Scan" not in plan.kinds()
    assert plan.rows_touched() <= 4 * 100
