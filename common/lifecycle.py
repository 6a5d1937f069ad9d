"""Life of a daemon: signals, inner tasks, event-loop lag."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import asyncpg

from common import events
from common.backoff import Backoff
from common.database import connect_arguments
from common.errors import DATABASE_ERRORS
from common.logs import Logger
from common.metrics import WorkerMetrics
from common.outage import Outage
from common.probes import Health
from common.schema import check_revision, read_revision
from common.settings import SharedSettings

LAG_INTERVAL = 0.25
IDLE_TURN = 0.5
"""An idle loop says so often that it turns, in seconds; the least bound of liveness is 1 s."""


def instance_name(configured: str) -> str:
    """Name of this process in logs and ``claimed_by``: host and pid unless configured."""
    return configured or f"{socket.gethostname()}:{os.getpid()}"


class Lifecycle:
    """Stop requests and the tasks that must live as long as the daemon."""

    def __init__(self, health: Health, metrics: WorkerMetrics, logger: Logger) -> None:
        self.health = health
        self.metrics = metrics
        self.logger = logger
        self.stopping = asyncio.Event()
        """Set by the first signal, or when the daemon must end by itself."""
        self.aborting = asyncio.Event()
        """Set by the second signal: give back and leave at once."""
        self.failure: str | None = None
        """Why the daemon ends by itself, or None."""
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._successes: dict[str, float] = {}
        self._born = time.monotonic()

    def install_signals(self) -> None:
        """Take SIGTERM and SIGINT from now on; PID 1 has no default handlers, so this comes before any connect."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop, signal.Signals(number).name)

    def request_stop(self, why: str) -> None:
        """Stop; a second call asks to leave at once."""
        if not self.stopping.is_set():
            self.logger.emit(events.STOPPING, why=why)
            self.health.stopping = True
            self.stopping.set()
        elif not self.aborting.is_set():
            self.logger.emit(events.ABORTING, why=why)
            self.aborting.set()

    def tick(self, loop: str) -> None:
        """Say that a loop turned."""
        self.health.tick(loop)
        self.metrics.tick.labels(loop).set_to_current_time()

    def succeeded(self, loop: str) -> None:
        """Say that a loop turned and did its work (finding nothing to do is work done)."""
        self._successes[loop] = time.monotonic()
        self.metrics.success.labels(loop).set_to_current_time()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that must live until the daemon stops; its end by itself stops the daemon with 1."""
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        name = self._tasks.pop(task, task.get_name())
        error = None if task.cancelled() else task.exception()
        if self.stopping.is_set() and error is None:
            return
        if task.cancelled():
            return
        self.report_death(name, error)

    def report_death(self, name: str, error: BaseException | None) -> None:
        """A task ended that must not: the process stops and exits with 1."""
        self.failure = f"inner task {name} ended"
        self.health.died(name)
        self.logger.emit(events.INNER_TASK_DIED, error, task=name)
        self.request_stop(self.failure)

    async def cancel_tasks(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel tasks (all of :meth:`start` when none are named) and wait for their end."""
        chosen = list(tasks) or list(self._tasks)
        for task in chosen:
            task.cancel()
        if chosen:
            await asyncio.wait(chosen)

    async def finished(self, tasks: Sequence[asyncio.Task[None]], seconds: float) -> bool:
        """Wait for the end of tasks; False after ``seconds``, or when a second signal asks to leave at once."""
        everything = asyncio.ensure_future(asyncio.wait(tasks)) if tasks else None
        aborting = asyncio.ensure_future(self.aborting.wait())
        waits = [aborting] if everything is None else [everything, aborting]
        try:
            if everything is not None:
                await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return all(task.done() for task in tasks)
        finally:
            for wait in waits:
                wait.cancel()

    async def pause(self, seconds: float, *wakers: asyncio.Event) -> None:
        """Sleep; ends early when the daemon stops or one of ``wakers`` is set."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.stopping, *wakers)]
        try:
            await asyncio.wait(waits, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def idle(self, loop: str, seconds: float, *wakers: asyncio.Event) -> None:
        """:meth:`pause` of a watched loop: one that waits turns all the same, however long it waits."""
        until = time.monotonic() + seconds
        while not self.stopping.is_set() and not any(waker.is_set() for waker in wakers):
            left = until - time.monotonic()
            if left <= 0:
                return
            self.tick(loop)
            await self.pause(min(left, IDLE_TURN), *wakers)

    async def watch_loop_lag(self) -> None:
        """Measure how late the loop's timers fire."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due))

    async def watch_stall(self, bound: float, needs_seen: Callable[[], float | None]) -> None:
        """End the daemon when it achieves nothing although all it needs is there (n8n-io/n8n-hosting#124).

        An outage is no stall, nor is the moment in which it ends: the time counts from then.

        Args:
            bound: seconds without success; 0 watches nothing.
            needs_seen: monotonic time of the last contact, by another connection, with what the daemon needs;
                None while something of it is away.
        """
        since = self._born
        while bound > 0:
            await asyncio.sleep(min(5.0, bound / 4))
            now = time.monotonic()
            seen = needs_seen()
            if seen is None or now - seen >= bound / 2:
                since = now
            last = max([since, *self._successes.values()])
            if now - last > bound:
                self.failure = f"no success for {now - last:.0f} s"
                self.logger.emit(events.STALLED, seconds=round(now - last, 1), bound=bound)
                self.request_stop(self.failure)
                return
        await asyncio.Event().wait()


async def wait_for_schema(settings: SharedSettings, application_name: str, lifecycle: Lifecycle) -> bool:
    """Wait until the database answers and its schema fits; False when a stop was asked for meanwhile.

    Raises:
        SchemaMismatch: the database answers and the schema does not fit.
    """
    backoff = Backoff(0.25, 5.0)
    outage = Outage(lifecycle.logger, events.WAITING_FOR_DATABASE, events.DATABASE_REACHED)
    while not lifecycle.stopping.is_set():
        try:
            connection = await asyncpg.connect(**connect_arguments(settings, application_name))
            try:
                revision = await read_revision(connection, settings.database_schema)
            finally:
                connection.terminate()
        except DATABASE_ERRORS as error:
            outage.failed(error)
            await lifecycle.pause(backoff.next())
            continue
        outage.worked()
        check_revision(revision, settings.database_schema)
        return True
    return False


async def within(seconds: float, work: Awaitable[Any]) -> bool:
    """Await ``work`` for at most ``seconds``; say whether it ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
            return True
    return False
