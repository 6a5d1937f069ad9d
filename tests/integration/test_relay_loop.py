"""The loop of one lane on a real database, with a publisher that answers as the test says."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from structlog.testing import capture_logs

from relay.claim import Claimer, Source
from relay.model import PUBLISHED, Left, Nacked, Unroutable
from tests.support.lanes import Publishing, lane_of

OPEN = "SELECT count(*) = $1 FROM {schema}.outbox WHERE published_at IS NULL"
SILENT = Left("not confirmed before the deadline")


async def test_nothing_is_claimed_after_the_stop(database):
    """collectiveidea/delayed_job#812. Neither the next source's rows nor those that a wait for the broker lets in."""
    await database.enqueue_events(5)
    await database.enqueue_events(5, key="'k' || n")

    async with lane_of(database) as bench:

        async def stop():
            bench.lifecycle.request_stop("test")

        bench.publishing.before = stop
        async with bench.running() as task:
            async with asyncio.timeout(10):
                await task
        assert bench.publishing.batches == [[1, 2, 3, 4, 5]]
    await database.until(OPEN, 5)


async def test_a_stop_during_the_wait_for_the_broker_claims_nothing(database):
    await database.enqueue_events(5)
    async with lane_of(database) as bench:

        async def ready(_):
            bench.lifecycle.request_stop("test")

        bench.publishing.ready = ready
        async with bench.running() as task:
            async with asyncio.timeout(10):
                await task
        assert bench.publishing.batches == []
    await database.until(OPEN, 5)


async def test_confirms_that_never_come_are_waited_out_with_backoff_and_said_once(database):
    """Each retry is one more duplicate in the broker: not at full speed, and not a line for each."""
    await database.enqueue_events(5)
    async with lane_of(
        database,
        Publishing(lambda _: SILENT),
        tick=0.01,
        confirm_timeout=0.02,
        backoff_base=0.2,
        backoff_cap=2.0,
    ) as bench:
        with capture_logs() as logs:
            async with bench.running():
                await asyncio.sleep(1.5)
                assert 2 <= len(bench.publishing.batches) <= 15
                before = len(bench.publishing.batches)
                bench.publishing.answer = lambda _: PUBLISHED
                await database.until(OPEN, 0)
                assert len(bench.publishing.batches) <= before + 2
        assert [entry["event"] for entry in logs] == ["batch_failed", "batch_recovered"]
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0


async def test_a_queue_that_confirms_nothing_does_not_hold_up_what_is_behind_its_rows(database):
    """Three batches of rows to a queue without quorum stand at the head of the table; the others pass them."""
    await database.enqueue_events(30)
    await database.enqueue_events(30)
    stuck = Publishing(lambda row: SILENT if row.id <= 30 else PUBLISHED)
    async with (
        lane_of(database, stuck, batch_size=10, tick=1.0, confirm_timeout=0.1) as bench,
        bench.running(),
    ):
        await database.until(OPEN, 30, timeout=10)
        assert len(bench.publishing.batches) < 20
        stuck.answer = lambda _: PUBLISHED
        await database.until(OPEN, 0)
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0


async def test_ten_thousand_nacks_are_few_log_lines(database):
    """graphile/worker#224: 30,000 lines in 20 s."""
    await database.enqueue_events(10_000)
    full = Publishing(lambda _: Nacked("nack: a queue refused the message"))
    async with lane_of(database, full, nack_delay=0.2, tick=0.05) as bench:
        with capture_logs() as logs:
            async with bench.running():
                await database.until(
                    "SELECT count(*) = 10000 FROM {schema}.outbox WHERE next_attempt_at IS NOT NULL"
                )
                await asyncio.sleep(1.0)
                full.answer = lambda _: PUBLISHED
                await database.until(OPEN, 0)
        assert len(logs) <= 5, [entry["event"] for entry in logs]
        assert logs[0]["event"] == "rows_nacked"
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0


async def test_a_missing_binding_with_a_thousand_rows_is_not_a_thousand_log_lines(database):
    await database.enqueue_events(1000)
    nowhere = Publishing(lambda _: Unroutable("unroutable: 312 NO_ROUTE"))
    async with lane_of(database, nowhere, max_attempts=2, retry_base=0.05) as bench:
        with capture_logs() as logs:
            async with bench.running():
                await database.until(
                    "SELECT count(*) = 1000 FROM {schema}.outbox WHERE quarantined_at IS NOT NULL"
                )
        assert Counter(entry["event"] for entry in logs) == {"row_failed": 5, "row_quarantined": 5}
        assert bench.metrics.rows.labels("unroutable")._value.get() == 2000
        assert bench.metrics.quarantined._value.get() == 1000


async def test_a_row_that_committed_late_is_found_at_its_wakeup_not_a_tick_later(database):
    """Transactions overlap under any load: a lower id that commits later must not wait for the sweep."""
    async with lane_of(database, tick=30) as bench, database.session() as late, database.session() as early:
        enqueue = "SELECT relay_drain.enqueue_event('order', '1', 'order.placed', '{}'::jsonb)"
        async with bench.running():
            transaction = late.transaction()
            await transaction.start()
            await late.execute(enqueue)
            for _ in range(20):
                await early.execute(enqueue)
                bench.wakeup.set()
            await database.until(OPEN, 0)
            await transaction.commit()
            bench.wakeup.set()
            await database.until(OPEN, 0, timeout=5)


async def test_a_row_that_committed_late_waits_one_tick_at_most_while_wakeups_come_and_go(database):
    """Without an announcement of its own: the trigger is off, or its notification was lost.

    The last wake-up just before the tick is over must not put off the look from the beginning by another tick.
    """
    tick = 1.0
    async with lane_of(database, tick=tick) as bench, database.session() as late:
        loop, waits = asyncio.get_running_loop(), []
        async with bench.running():
            for pauses in ((0.2,), (0.85,), (0.4, 0.5), (0.1, 0.1, 0.7)):
                transaction = late.transaction()
                await transaction.start()
                await late.execute("SELECT relay_drain.enqueue_event('order', '1', 'late', '{}'::jsonb)")
                await database.enqueue_events(1)
                bench.wakeup.set()
                await database.until(OPEN, 0)
                await transaction.commit()
                began = loop.time()
                for pause in pauses:
                    await asyncio.sleep(pause)
                    await database.enqueue_events(1)
                    bench.wakeup.set()
                await database.until(OPEN, 0)
                waits.append(loop.time() - began)
        assert max(waits) < tick + 0.3, waits


async def test_sweeps_take_a_twentieth_of_a_lanes_time_at_most(database):
    """A snapshot held elsewhere makes a look from the beginning dear: then the cursor does the work."""
    claimer = Claimer(database.schema, 100, sweep_interval=60.0)
    looks = {True: 0.0, False: 0.0}
    async with database.session() as connection:
        fetch = connection.fetch

        class Dear:
            async def fetch(self, statement, *arguments):
                if arguments[0] == 0:
                    await asyncio.sleep(0.02)
                return await fetch(statement, *arguments)

        await database.enqueue_events(1)
        loop = asyncio.get_running_loop()
        end = loop.time() + 1.5
        while (began := loop.time()) < end:
            await claimer.claim(Dear(), Source.FRESH)
            looks[claimer.sweep_owed_in() == math.inf] += loop.time() - began
    assert 0 < looks[True] / (looks[True] + looks[False]) < 0.08, looks


async def test_a_silent_queue_at_the_head_of_the_retries_does_not_hold_up_the_others(database):
    """Retried rows are claimed by time: those that are left untouched would come first for ever."""
    await database.enqueue_events(30)
    await database.fetch(
        """UPDATE {schema}.outbox SET next_attempt_at = now() - interval '1 hour' + id * interval '1 ms',
           attempts = CASE WHEN id % 2 = 0 THEN 1 ELSE 0 END"""
    )
    before = await database.fetch("SELECT id, attempts FROM {schema}.outbox ORDER BY id")
    stuck = Publishing(lambda row: SILENT if row.id <= 20 else PUBLISHED)
    async with lane_of(database, stuck, batch_size=10, confirm_timeout=0.1) as bench, bench.running():
        await database.until(OPEN, 20, timeout=15)
        stuck.answer = lambda _: PUBLISHED
        await database.until(OPEN, 0)
    assert await database.fetch("SELECT id, attempts FROM {schema}.outbox ORDER BY id") == before


async def test_a_sweep_that_finds_nothing_does_not_send_the_cursor_back_to_the_beginning(database):
    """Else an idle lane walks over every dead row of a held snapshot at each wake-up."""
    claimer = Claimer(database.schema, 100, sweep_interval=60.0)
    asked: list[int] = []
    async with database.session() as connection:
        fetch = connection.fetch

        class Asked:
            async def fetch(self, statement, last_id, limit):
                asked.append(last_id)
                await asyncio.sleep(0.01)
                return await fetch(statement, last_id, limit)

        await database.enqueue_events(30)
        assert len(await claimer.claim(Asked(), Source.FRESH)) == 30
        await connection.execute("UPDATE relay_drain.outbox SET published_at = now()")
        claimer.forget()
        for _ in range(3):
            assert not len(await claimer.claim(Asked(), Source.FRESH))
    assert asked == [0, 0, 30, 30]
