"""Pruning: rows past their retention are deleted in small batches, by one relay at a time, within a budget."""

from __future__ import annotations

import asyncio
import zlib

import asyncpg

from common.backoff import Backoff
from common.database import Database
from common.lifecycle import Lifecycle
from common.logs import Logger
from common.outage import Outage
from common.schema import qualify
from relay import events, sql
from relay.metrics import RelayMetrics
from relay.settings import RelaySettings

DAY = 86400.0


def lock_key(schema: str) -> int:
    """Key of the advisory lock of one schema's pruner; a signed 32 bit number in a space of its own."""
    return (0x52454C59 << 32 | zlib.crc32(schema.encode())) - (1 << 63 if 0x52454C59 >> 31 else 0)


class Pruner:
    """One background task of the daemon."""

    def __init__(
        self,
        settings: RelaySettings,
        schema: str,
        database: Database,
        metrics: RelayMetrics,
        lifecycle: Lifecycle,
        logger: Logger,
    ) -> None:
        self._settings = settings
        self._database = database
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._logger = logger
        self._outage = Outage(logger, events.PRUNE_FAILED, events.PRUNE_RECOVERED)
        self._key = lock_key(schema)
        self._lock = sql.TRY_PRUNE_LOCK
        self._work = [
            (table, qualify(statement, schema), days * DAY)
            for table, statement, days in (
                ("outbox", sql.PRUNE_PUBLISHED, settings.retention_days),
                ("inbox", sql.PRUNE_INBOX, settings.inbox_retention_days),
            )
            if days >= 0
        ]

    async def run(self) -> None:
        """Prune in rounds until the daemon stops."""
        backoff = Backoff(self._settings.prune_interval, 10 * self._settings.prune_interval)
        while not self._lifecycle.stopping.is_set():
            delay = self._settings.prune_interval
            try:
                for table, statement, retention in self._work:
                    await self._round(table, statement, retention)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                self._outage.failed(error)
                delay = backoff.next()
            else:
                self._outage.worked()
                backoff.reset()
            await self._lifecycle.pause(delay)

    async def _round(self, table: str, statement: str, retention: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.prune_budget
        total = 0
        while not self._lifecycle.stopping.is_set() and loop.time() < end:
            began = loop.time()
            deleted = await self.prune_batch(statement, retention, self._settings.prune_batch)
            if deleted is None:
                return
            total += deleted
            self._metrics.pruned.labels(table).inc(deleted)
            if deleted < self._settings.prune_batch:
                break
            # As long at rest as at work: publishing goes first.
            await asyncio.sleep(loop.time() - began)
        if total:
            self._logger.emit(events.PRUNED, table=table, rows=total)

    async def prune_batch(self, statement: str, retention: float, rows: int) -> int | None:
        """Delete one batch; None when another relay prunes now."""
        async with self._database.connection() as connection, connection.transaction():
            if not await connection.fetchval(self._lock, self._key):
                return None
            answer = await connection.execute(statement, retention, rows)
            return int(answer.rpartition(" ")[2])
