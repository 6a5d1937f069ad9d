"""One lane of relay inside the test's own loop: real database, a publisher whose verdicts the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from common.backoff import Backoff
from common.database import Database as Pool
from common.lifecycle import Lifecycle
from common.logs import Logger
from common.metrics import WorkerMetrics
from common.outage import Outage
from common.probes import Health
from common.settings import SharedSettings
from relay import events
from relay.claim import Claimer
from relay.loop import Lane
from relay.mark import Marker, RetryPolicy
from relay.metrics import RelayMetrics
from relay.model import PUBLISHED, Left, OutboxRow, Verdict
from relay.settings import RelaySettings
from relay.telling import Telling
from tests.support.database import Database

Answer = Callable[[OutboxRow], Verdict]


@dataclass
class Publishing:
    """Stands in for the publisher. ``answer`` gives each row's verdict; ``before`` is awaited first.

    A row that is left costs the wait until the deadline, as with a silent broker.
    """

    answer: Answer = lambda _: PUBLISHED
    before: Callable[[], Any] | None = None
    batches: list[list[int]] = field(default_factory=list)
    asked: int = 0

    async def ready(self, timeout: float) -> None:
        self.asked += 1
        await asyncio.sleep(0)

    async def publish(
        self, rows: Sequence[OutboxRow], deadline: float, *, one_at_a_time: bool = False
    ) -> list[Verdict]:
        self.batches.append([row.id for row in rows])
        if self.before is not None:
            await self.before()
        verdicts = [self.answer(row) for row in rows]
        silent = any(isinstance(verdict, Left) for verdict in verdicts)
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()) if silent else 0)
        return verdicts


@dataclass
class Bench:
    """A lane and what it works with."""

    lane: Lane
    pool: Pool
    publishing: Publishing
    lifecycle: Lifecycle
    metrics: RelayMetrics
    wakeup: asyncio.Event

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The lane's loop as a task, stopped in the end."""
        task = asyncio.create_task(self.lane.run())
        try:
            yield task
            self.lifecycle.stopping.set()
            async with asyncio.timeout(20):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def shared_settings(database: Database, **changes: Any) -> SharedSettings:
    """Settings of a test's database."""
    return SharedSettings(database_url=SecretStr(database.url), database_schema=database.schema, **changes)


@contextlib.asynccontextmanager
async def lane_of(
    database: Database,
    publishing: Publishing | None = None,
    *,
    shared: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Bench]:
    """Put a lane together as the daemon does; ``changes`` are fields of RelaySettings."""
    publishing = publishing or Publishing()
    relay = RelaySettings(**{"tick": 0.1, "backoff_base": 0.02, "backoff_cap": 0.1, **changes})
    settings = shared_settings(database, **(shared or {}))
    registry = CollectorRegistry()
    worker, metrics = WorkerMetrics(registry, ("lane-1",)), RelayMetrics(registry, relay.exchange)
    logger, wakeup = Logger(daemon="relay"), asyncio.Event()
    lifecycle = Lifecycle(Health(settings.live_after), worker, logger)
    pool = Pool(settings, "relay", worker)
    await pool.open()
    lane = Lane(
        name="lane-1",
        settings=relay,
        database=pool,
        publisher=publishing,  # type: ignore[arg-type]
        claimer=Claimer(database.schema, relay.batch_size, relay.tick),
        marker=Marker(database.schema),
        policy=RetryPolicy(relay.max_attempts, relay.retry_base, relay.retry_cap, relay.nack_delay),
        metrics=metrics,
        lifecycle=lifecycle,
        wakeup=wakeup,
        telling=Telling(logger),
        outage=Outage(logger, events.BATCH_FAILED, events.BATCH_RECOVERED),
        backoff=Backoff(relay.backoff_base, relay.backoff_cap),
    )
    try:
        yield Bench(lane, pool, publishing, lifecycle, metrics, wakeup)
    finally:
        await pool.close(5.0)
