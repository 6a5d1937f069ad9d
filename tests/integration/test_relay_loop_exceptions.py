"""Whatever goes wrong inside a lane, the next cycle runs; however it is cancelled, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from asyncpg.pool import PoolConnectionProxy
from structlog.testing import capture_logs

from common.backoff import Backoff
from common.prune import DAY, PrunePace, Pruner, Retention, lock_key
from common.schema import qualify
from relay import sql
from relay.broker import BrokerUnavailable
from relay.claim import Claimer
from relay.keyed import KeyedClaimer
from relay.mark import Marker
from tests.support.lanes import Publishing, lane_of

ERRORS: list[Callable[[], Exception]] = [
    lambda: RuntimeError("a fault of ours"),
    lambda: asyncpg.DeadlockDetectedError("deadlock detected"),
    lambda: ConnectionResetError("reset"),
    lambda: TimeoutError(),
]


class Once:
    """Raises once, before or after the real thing is done."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, only: str, after: bool
    ) -> None:
        self.error: Exception | None = None
        self.raised = asyncio.Event()
        original = getattr(owner, name)

        async def faulty(*arguments: Any, **options: Any) -> Any:
            ours = self.error is not None and (not only or any(only in str(a) for a in arguments))
            if ours and not after:
                self.throw()
            result = await original(*arguments, **options)
            if ours and after:
                self.throw()
            return result

        monkeypatch.setattr(owner, name, faulty)

    def throw(self) -> None:
        assert self.error is not None
        error, self.error = self.error, None
        self.raised.set()
        raise error


POINTS = {
    "the wait for the broker": (Publishing, "ready", ""),
    "the acquisition of a connection": (asyncpg.Pool, "acquire", ""),
    "BEGIN": (PoolConnectionProxy, "execute", "BEGIN"),
    "the claim": (Claimer, "claim", ""),
    "the fresh claim": (Claimer, "_claim_fresh", ""),
    "the keyed claim": (KeyedClaimer, "claim", ""),
    "the retry claim": (Claimer, "_claim_retry", ""),
    "the publish": (Publishing, "publish", ""),
    "the marks": (Marker, "write", ""),
    "COMMIT": (PoolConnectionProxy, "execute", "COMMIT"),
    "ROLLBACK": (PoolConnectionProxy, "execute", "ROLLBACK"),
    "the release of a connection": (asyncpg.Pool, "release", ""),
}
# Faults that asyncpg would have to have: a connection is opened or kept, and nobody is told.
NOT_OURS = {("the acquisition of a connection", True), ("the release of a connection", False)}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_exception_at_any_await_of_the_loop_leaves_a_loop_that_works(database, monkeypatch, after):
    """fedify-dev/fedify#581, dotnetcore/CAP#1661, BrighterCommand/Brighter#3680."""
    points = {
        name: Once(monkeypatch, owner, attribute, only, after)
        for name, (owner, attribute, only) in POINTS.items()
        if (name, after) not in NOT_OURS
    }
    async with lane_of(database, tick=0.02, backoff_cap=0.02) as bench, database.session() as producer:
        with capture_logs():
            async with bench.running() as task:
                for name, point in points.items():
                    for make in ERRORS:
                        point.error, wanted = make(), str(make())
                        point.raised.clear()
                        event = await producer.fetchval(
                            "SELECT relay_drain.enqueue_event('order', $1, 'order.placed', '{}'::jsonb)",
                            wanted,
                        )
                        async with asyncio.timeout(10):
                            await point.raised.wait()
                        async with asyncio.timeout(10):
                            while not await producer.fetchval(
                                "SELECT published_at IS NOT NULL FROM relay_drain.outbox WHERE event_id = $1",
                                event,
                            ):
                                assert not task.done(), name
                                await asyncio.sleep(0.005)
        assert bench.pool.in_use == 0
        failures = sum(
            sample.value
            for metric in bench.metrics.failures.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        assert failures >= len(points) * len(ERRORS)
        assert len(database.sessions("relay")) <= 4


async def test_a_broker_that_comes_back_is_used_at_once_however_long_it_was_away(database):
    """The backoff of a lane must not add to that of the connection: the wait for the broker is the wait."""
    await database.enqueue_events(1)
    async with lane_of(database, backoff_base=0.1, backoff_cap=60.0) as bench:
        away = asyncio.Event()

        async def ready(timeout):
            try:
                async with asyncio.timeout(0.01):
                    await away.wait()
            except TimeoutError:
                raise BrokerUnavailable("away") from None

        bench.publishing.ready = ready
        with capture_logs() as logs:
            async with bench.running():
                await asyncio.sleep(2.0)
                assert bench.lane.backoff.failures == 0
                away.set()
                began = asyncio.get_running_loop().time()
                await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
                assert asyncio.get_running_loop().time() - began < 1.0
        assert [entry["event"] for entry in logs] == ["batch_failed", "batch_recovered"]


def test_backoff_resets_after_a_success_and_never_waits_nothing():
    backoff = Backoff(0.25, 10.0)
    assert [0.25 / 4 <= backoff.next() <= 0.25, 0.5 / 4 <= backoff.next() <= 0.5] == [True, True]
    for _ in range(50):
        assert 0.0 < backoff.next() <= 10.0
    backoff.reset()
    assert backoff.next() <= 0.25


async def cancel_at_random_points(bench, database, times: int) -> None:
    bench.publishing.before = lambda: asyncio.sleep(random.uniform(0, 0.004))
    size = bench.pool._settings.database_pool_size
    for number in range(times):
        await database_row(bench, number)
        task = asyncio.create_task(bench.lane.run())
        await asyncio.sleep(random.choice((0.0, 0.001, 0.002, 0.004, 0.008, 0.015)) * random.random())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.pool.in_use == 0
        if number % 50 == 0:
            assert len(database.sessions("relay")) <= size + 1  # a backend notices a cut a moment later


async def database_row(bench, number: int) -> None:
    if number % 5 == 0:
        await bench.producer.execute(
            "SELECT relay_drain.enqueue_event('order', '1', 'order.placed', '{}'::jsonb, ordering_key => $1)",
            None if number % 2 else f"k{number % 7}",
        )


@asynccontextmanager
async def cancelled_lane(database):
    async with (
        lane_of(database, shared={"database_pool_size": 2}, tick=0.01) as bench,
        database.session() as own,
    ):
        bench.producer = own
        yield bench


@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_cancellation_at_random_points_leaks_no_connection_and_no_lock(database, times):
    """MagicStack/asyncpg#955, #1052, #467: acquire cancelled, connection lost to the pool; close waits for ever."""
    with capture_logs():
        async with cancelled_lane(database) as bench:
            await cancel_at_random_points(bench, database, times)
            async with bench.running():
                await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
            async with database.session() as other:
                await other.execute("SELECT FROM relay_drain.outbox FOR UPDATE NOWAIT")
            await database.until(
                "SELECT count(*) <= 2 FROM pg_stat_activity WHERE application_name = 'relay'"
                " AND datname = current_database()"
            )
            began = asyncio.get_running_loop().time()
            await bench.pool.close(5.0)
            assert asyncio.get_running_loop().time() - began < 5.0
    await database.until(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'relay'"
        " AND datname = current_database()"
    )


async def test_a_cancelled_pruner_leaves_no_advisory_lock(database):
    """Viren070/AIOStreams#975: a session's lock goes back into the pool with its connection."""
    await database.enqueue_events(2000)
    await database.fetch("UPDATE {schema}.outbox SET published_at = now() - interval '30 days'")
    locks = "SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'advisory'"
    async with lane_of(database) as bench:
        pruner = Pruner(
            [Retention("outbox", qualify(sql.PRUNE_PUBLISHED, database.schema), 7 * DAY)],
            PrunePace(batch=5, interval=0.01, budget=1.0),
            lock_key("outbox", database.schema),
            bench.pool,
            bench.metrics.pruned,
            bench.lifecycle,
            bench.lane.telling._logger,
        )
        with capture_logs():
            for _ in range(60):
                task = asyncio.create_task(pruner.run())
                await asyncio.sleep(random.uniform(0, 0.01))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert bench.pool.in_use == 0
        await database.until(locks, timeout=1.0)


async def test_a_commit_that_ends_as_a_rollback_is_not_believed(database, monkeypatch):
    """An aborted transaction answers COMMIT with ROLLBACK and no error: nothing of the batch is marked."""
    await database.enqueue_events(5)
    real = Marker.write

    async def aborted(self, connection, marks):
        await real(self, connection, marks)
        with contextlib.suppress(asyncpg.PostgresError):
            await connection.execute("SELECT 1 / 0")

    monkeypatch.setattr(Marker, "write", aborted)
    async with lane_of(database) as bench:
        with capture_logs() as logs:
            async with bench.running():
                async with asyncio.timeout(10):
                    while len(bench.publishing.batches) < 2:
                        await asyncio.sleep(0.01)
                assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
                monkeypatch.setattr(Marker, "write", real)
                await database.until("SELECT count(published_at) = 5 FROM {schema}.outbox")
        assert [line["event"] for line in logs] == ["batch_failed", "batch_recovered"]
        assert logs[0]["error_type"] == "CommitLost"
