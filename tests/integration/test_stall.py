"""A daemon that achieves nothing ends itself; one that only waits for others does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from common.lifecycle import Lifecycle
from common.logs import Logger
from common.metrics import WorkerMetrics
from common.probes import Health

BOUND = 0.8


def lifecycle() -> Lifecycle:
    return Lifecycle(Health(60.0), WorkerMetrics(CollectorRegistry(), ("lane-1",)), Logger(daemon="relay"))


async def failure_of(life: Lifecycle, seen: Callable[[], float | None], seconds: float) -> str | None:
    """Watch for so long; why the daemon would have ended."""
    task = asyncio.create_task(life.watch_stall(BOUND, seen))
    with capture_logs():
        await asyncio.wait({task}, timeout=seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return life.failure


async def test_a_daemon_that_achieves_nothing_while_all_it_needs_is_there_ends_itself():
    life = lifecycle()
    assert "no success for" in str(await failure_of(life, time.monotonic, 10 * BOUND))
    assert life.stopping.is_set()


async def test_an_outage_longer_than_the_bound_is_no_stall_when_it_ends():
    """The database answers again before the lane's next try: that is the moment to go on, not to restart."""
    life = lifecycle()
    comes_back = time.monotonic() + 3 * BOUND
    seen = lambda: time.monotonic() if time.monotonic() > comes_back else None  # noqa: E731
    assert await failure_of(life, seen, 3.6 * BOUND) is None


async def test_success_after_the_outage_keeps_it_alive_and_its_absence_does_not():
    life = lifecycle()
    comes_back = time.monotonic() + 2 * BOUND
    seen = lambda: time.monotonic() if time.monotonic() > comes_back else None  # noqa: E731
    assert "no success for" in str(await failure_of(life, seen, 10 * BOUND))
    assert time.monotonic() > comes_back + BOUND / 2
