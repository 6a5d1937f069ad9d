"""Relay's claims touch what they take and little else, whatever the backlog, the history, and the statistics."""

from __future__ import annotations

import asyncpg
import pytest

from common.schema import qualify
from relay import sql
from relay.claim import Claimer, Source
from tests.plan.explain import explain

SCHEMA = "relay_drain"
LIMIT = 100


@pytest.fixture
async def connection(database):
    connection = await database.connect()
    yield connection
    await connection.close()


async def fill(connection, rows: int, *, published: bool = False, key: str = "NULL", start: int = 0) -> None:
    await connection.execute(
        f"""INSERT INTO {SCHEMA}.outbox (aggregate_type, aggregate_id, event_type, payload, ordering_key, published_at)
            SELECT 'order', n::text, 'order.placed', '{{}}', {key}, {"now()" if published else "NULL"}
            FROM generate_series({start + 1}, {start + rows}) AS n"""
    )


async def test_claim_reads_only_its_rows_behind_history_and_before_backlog(connection):
    await fill(connection, 60_000, published=True)
    await fill(connection, 20_000)
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")
    plan = await explain(connection, qualify(sql.CLAIM_FRESH, SCHEMA), 0, LIMIT)
    assert plan.indexes() == {"outbox_fresh"}
    assert not {"Seq Scan", "Sort"} & plan.kinds()
    assert plan.rows_touched() <= LIMIT
    assert plan.buffers() < 1000


async def test_claim_with_stale_statistics_takes_no_more_than_the_limit(connection):
    await connection.execute(f"ANALYZE {SCHEMA}.outbox")
    await fill(connection, 30_000)
    for setting in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "enable_material"):
        await connection.execute(f"SET {setting} = off")
    async with connection.transaction():
        assert len(await connection.fetch(qualify(sql.CLAIM_FRESH, SCHEMA), 0, LIMIT)) == LIMIT
        heads = await connection.fetch(qualify(sql.CLAIM_HEADS, SCHEMA), "", 5 * LIMIT, LIMIT)
        assert [record["id"] for record in heads] == [None]


async def test_a_thousand_quarantined_and_backing_off_rows_at_the_head_cost_nothing(connection):
    await fill(connection, 2000)
    await connection.execute(
        f"""UPDATE {SCHEMA}.outbox SET attempts = 1, next_attempt_at = now() + interval '1 hour',
            quarantined_at = CASE WHEN id % 2 = 0 THEN now() END"""
    )
    await fill(connection, 300)
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")
    plan = await explain(connection, qualify(sql.CLAIM_FRESH, SCHEMA), 0, LIMIT)
    assert plan.rows_touched() <= LIMIT


async def test_keyed_claim_steps_over_a_blocked_key_with_many_rows_in_one_probe(connection):
    await fill(connection, 20_000, key="'blocked'")
    await connection.execute(
        f"UPDATE {SCHEMA}.outbox SET quarantined_at = now(), attempts = 5, next_attempt_at = now() WHERE id = 1"
    )
    await fill(connection, 50, key="'k' || n")
    await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")
    plan = await explain(connection, qualify(sql.CLAIM_HEADS, SCHEMA), "", 5 * LIMIT, LIMIT)
    assert "Seq Scan" not in plan.kinds()
    assert plan.rows_touched() <= 3 * 51
    async with connection.transaction():
        batch = await Claimer(SCHEMA, LIMIT, 5.0).keyed.claim(connection)
        keys = {row.ordering_key for row in batch.rows}
        assert "blocked" not in keys


async def test_followers_come_in_order_and_stop_at_the_first_blocked_row(connection):
    await fill(connection, 10, key="'a'")
    await connection.execute(f"UPDATE {SCHEMA}.outbox SET quarantined_at = now() WHERE id = 6")
    claimer = Claimer(SCHEMA, LIMIT, 5.0)
    claimer.keyed.after = ""
    async with connection.transaction():
        batch = await claimer.claim(connection, Source.KEYED)
    assert [row.id for row in batch.rows] == [1, 2, 3, 4, 5]


async def test_a_key_whose_head_another_relay_holds_is_left_alone(connection, database):
    await fill(connection, 5, key="'a'")
    other: asyncpg.Connection = await database.connect()
    try:
        transaction = other.transaction()
        await transaction.start()
        await other.fetch(f"SELECT FROM {SCHEMA}.outbox WHERE id = 1 FOR UPDATE")
        claimer = Claimer(SCHEMA, LIMIT, 5.0)
        claimer.keyed.after = ""
        async with connection.transaction():
            assert not len(await claimer.claim(connection, Source.KEYED))
        await transaction.rollback()
    finally:
        await other.close()


async def test_claim_is_flat_while_a_snapshot_keeps_published_rows_alive(connection, database):
    """The cursor: a claim that starts behind the dead rows does not walk over them."""
    holder = await database.connect()
    try:
        await fill(connection, 30_000)
        snapshot = holder.transaction(isolation="repeatable_read")
        await snapshot.start()
        await holder.fetchval(f"SELECT count(*) FROM {SCHEMA}.outbox")
        await connection.execute(f"UPDATE {SCHEMA}.outbox SET published_at = now()")
        await fill(connection, 500, start=30_000)
        await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")
        from_start = await explain(connection, qualify(sql.CLAIM_FRESH, SCHEMA), 0, LIMIT)
        from_cursor = await explain(connection, qualify(sql.CLAIM_FRESH, SCHEMA), 30_000, LIMIT)
        assert from_start.buffers() > 3 * from_cursor.buffers(), "the snapshot must make a difference"
        assert from_cursor.rows_touched() <= LIMIT
        await snapshot.rollback()
    finally:
        await holder.close()


async def test_rows_that_committed_late_with_a_lower_id_are_found_by_the_sweep(connection, database):
    late = await database.connect()
    try:
        transaction = late.transaction()
        await transaction.start()
        await late.execute(f"SELECT {SCHEMA}.enqueue_event('order', 'late', 'order.placed', '{{}}'::jsonb)")
        await fill(connection, 250)
        claimer = Claimer(SCHEMA, LIMIT, sweep_interval=3600.0)
        seen: list[int] = []
        async with connection.transaction():
            while (batch := await claimer.claim(connection, Source.FRESH)).rows:
                seen += [row.id for row in batch.rows]
            assert len(seen) == 250
            await transaction.commit()
            assert not (await claimer.claim(connection, Source.FRESH)).rows, (
                "below the cursor, before the sweep"
            )
            claimer.forget()  # what the tick does
            assert 1 in [row.id for row in (await claimer.claim(connection, Source.FRESH)).rows]
    finally:
        await late.close()


async def test_keyed_claim_is_flat_while_a_snapshot_keeps_published_rows_alive(connection, database):
    """Between passes: new rows from the last seen id, and their heads from the floors of their keys."""
    holder = await database.connect()
    try:
        await fill(connection, 20_000, key="'k' || (n % 50)")
        snapshot = holder.transaction(isolation="repeatable_read")
        await snapshot.start()
        await holder.fetchval(f"SELECT count(*) FROM {SCHEMA}.outbox")
        await connection.execute(f"UPDATE {SCHEMA}.outbox SET published_at = now()")
        await fill(connection, 500, key="'k' || (n % 50)", start=20_000)
        await connection.execute(f"VACUUM ANALYZE {SCHEMA}.outbox")
        keys, none = [f"k{n}" for n in range(50)], [0] * 50
        from_start = await explain(connection, qualify(sql.CLAIM_HEADS_OF, SCHEMA), keys, none, LIMIT)
        from_floors = await explain(
            connection, qualify(sql.CLAIM_HEADS_OF, SCHEMA), keys, [20_001] * 50, LIMIT
        )
        unseen = await explain(connection, qualify(sql.KEYED_UNSEEN, SCHEMA), 20_000, LIMIT)
        assert from_start.buffers() > 3 * from_floors.buffers(), "the snapshot must make a difference"
        assert from_floors.rows_touched() <= 3 * 50
        assert unseen.rows_touched() <= LIMIT
        assert unseen.buffers() < 200
        assert "Seq Scan" not in from_floors.kinds() | unseen.kinds()
        await snapshot.rollback()
    finally:
        await holder.close()


async def test_between_passes_the_keyed_claim_takes_new_rows_and_never_one_behind_an_open_one(connection):
    claimer = Claimer(SCHEMA, LIMIT, 60.0).keyed
    claimer.after = ""
    async with connection.transaction():
        while (await claimer.claim(connection)).more:
            pass
        claimer.pass_at = float("inf")
        await fill(connection, 3, key="'a'")
        await connection.execute(f"UPDATE {SCHEMA}.outbox SET quarantined_at = now() WHERE id = 2")
        await fill(connection, 5, key="'b'")
        assert [row.id for row in (await claimer.claim(connection)).rows] == [1, 4, 5, 6, 7, 8]
        await connection.execute(
            f"UPDATE {SCHEMA}.outbox SET published_at = now() WHERE id = ANY('{{1,4,5,6}}')"
        )
        await fill(connection, 1, key="'a'")
        await fill(connection, 1, key="'b'")
        # Of b the open rows from 7 on; of a nothing, for 2 stands before 3 and 9.
        assert [row.id for row in (await claimer.claim(connection)).rows] == [7, 8, 10]
        assert claimer.pass_owed_at == claimer.pass_at
        await connection.execute(f"UPDATE {SCHEMA}.outbox SET quarantined_at = NULL WHERE id = 2")
        assert not len(await claimer.claim(connection)), "nothing is new"
        claimer.forget()
        found = [row.id for row in (await claimer.claim(connection)).rows]
        assert found == [2, 7, 3, 9, 8, 10] or sorted(found) == [2, 3, 7, 8, 9, 10]
