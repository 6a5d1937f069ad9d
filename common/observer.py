"""Reads the queue's lag in the background, at a bounded cost, and keeps the gauges honest.

A look that fails drops the series, and the observation timestamp stands still: absence and age can be alerted
on, a stale number can not (docs/runbook.md, DbObservationStale).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime

import asyncpg

from common import events, sql
from common.database import connect_arguments, waiting_helps
from common.errors import DATABASE_ERRORS
from common.logs import Logger
from common.metrics import DeliveryGauges, OutboxGauges, WorkerMetrics
from common.outage import Outage
from common.schema import qualify
from common.settings import SharedSettings

Look = Callable[[asyncpg.Connection], Awaitable[None]]


class Observer:
    """One background task with its own connection and its own time-out."""

    def __init__(
        self,
        settings: SharedSettings,
        application_name: str,
        metrics: WorkerMetrics,
        look: Look,
        forget: Callable[[], None],
        logger: Logger,
    ) -> None:
        self._settings = settings
        self._name = application_name
        self._metrics = metrics
        self._look = look
        self._forget = forget
        self._outage = Outage(logger, events.OBSERVATION_FAILED, events.OBSERVATION_RECOVERED)
        self._connection: asyncpg.Connection | None = None
        self.last_contact: float | None = None
        """Monotonic time of the last look that worked: the database answered then."""

    @staticmethod
    def now() -> float:
        """The clock of ``last_contact``; safe from the probe thread."""
        return time.monotonic()

    async def run(self) -> None:
        """Look for ever; cancel it to stop."""
        try:
            while True:
                await self._turn()
                await asyncio.sleep(self._settings.observe_interval * random.uniform(0.9, 1.1))
        finally:
            if self._connection is not None:
                self._connection.terminate()

    async def _turn(self) -> None:
        try:
            await self._observe()
        except DATABASE_ERRORS as error:
            self._metrics.observe_failures.inc()
            self._forget()
            self._metrics.oldest_transaction.clear()
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            # A statement that is wrong (no privilege, no table) is worth a line as well, once.
            self._outage.failed(error, waiting_helps=waiting_helps(error))
        else:
            self._outage.worked()
            self.last_contact = self.now()
            self._metrics.observed.set_to_current_time()

    async def _observe(self) -> None:
        if self._connection is None or self._connection.is_closed():
            arguments = connect_arguments(self._settings, self._name + "-observer")
            arguments["command_timeout"] = self._settings.observe_timeout
            self._connection = await asyncpg.connect(**arguments)
        connection = self._connection
        await self._look(connection)
        oldest = await connection.fetchval(sql.OLDEST_TRANSACTION)
        if oldest is None:
            self._metrics.oldest_transaction.clear()
        else:
            self._metrics.oldest_transaction.labels("database").set(oldest.timestamp())


def outbox_look(gauges: OutboxGauges, schema: str) -> Look:
    """Return the look at the outbox."""
    statement = qualify(sql.OUTBOX_LAG, schema)

    async def look(connection: asyncpg.Connection) -> None:
        row = await connection.fetchrow(statement)
        for source in ("fresh", "retry", "keyed"):
            gauges.unpublished.labels(source).set(row["retrying" if source == "retry" else source])
        gauges.quarantined.labels("database").set(row["quarantined"])
        if row["oldest_created_at"] is None:
            gauges.oldest.clear()
        else:
            gauges.oldest.labels("database").set(row["oldest_created_at"].timestamp())

    return look


UNCONFIGURED = "unconfigured"
"""Label of all apps that have rows and no settings: one label, so that their number stays bounded."""


def deliveries_look(gauges: DeliveryGauges, schema: str, apps: Callable[[], list[str]]) -> Look:
    """Return the look at the ledger; ``apps`` are the configured ones."""
    lag, dead, known = (
        qualify(statement, schema)
        for statement in (sql.DELIVERIES_LAG, sql.DELIVERIES_DEAD, sql.DELIVERIES_APPS)
    )

    async def look(connection: asyncpg.Connection) -> None:
        configured = apps()
        others = [row["app"] for row in await connection.fetch(known) if row["app"] not in configured]
        counts: dict[str, Counter[str]] = {name: Counter() for name in [*configured, UNCONFIGURED]}
        oldest: dict[str, datetime] = {}
        for row in await connection.fetch(lag, [*configured, *others]):
            name = row["app"] if row["app"] in configured else UNCONFIGURED
            counts[name].update(due=row["due"], leased=row["leased"], waiting=row["waiting"])
            if row["oldest_due_at"] is not None:
                oldest[name] = min(row["oldest_due_at"], oldest.get(name, row["oldest_due_at"]))
        gauges.oldest_due.clear()
        for name, count in counts.items():
            gauges.due.labels(name).set(count["due"])
            gauges.leased.labels(name).set(count["leased"])
            gauges.waiting.labels(name).set(count["waiting"])
        for name, at in oldest.items():
            gauges.oldest_due.labels(name).set(at.timestamp())
        gauges.dead.labels("database").set(await connection.fetchval(dead))

    return look
