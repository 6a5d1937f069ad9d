"""Pruning: rows past their retention are deleted in small batches, by one process at a time, within a budget."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg

from common import events
from common.backoff import Backoff
from common.database import Database
from common.errors import DATABASE_ERRORS
from common.logs import Logger
from common.outage import Outage

if TYPE_CHECKING:
    from prometheus_client import Counter

    from common.lifecycle import Lifecycle

DAY = 86400.0

# No index. One process prunes a queue at a time, whichever gets the lock; it is gone with the transaction, so a
# pruner that dies holds nobody up (Viren070/AIOStreams#975). $1 is derived from the name of queue and schema.
TRY_PRUNE_LOCK = "SELECT pg_try_advisory_xact_lock($1)"


@dataclass(frozen=True, slots=True)
class Retention:
    """What is deleted of one table: ``statement`` takes the retention in seconds and the number of rows."""

    table: str
    statement: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PrunePace:
    """Rows of one DELETE, seconds between two rounds, seconds of one round."""

    batch: int
    interval: float
    budget: float


def lock_key(queue: str, schema: str) -> int:
    """Key of the advisory lock: a signed 64 bit number of the queue's and the schema's name."""
    return (zlib.crc32(queue.encode()) << 32 | zlib.crc32(schema.encode())) - (1 << 63)


class Pruner:
    """One background task of a daemon."""

    def __init__(
        self,
        retentions: Sequence[Retention],
        pace: PrunePace,
        key: int,
        database: Database,
        pruned: Counter,
        lifecycle: Lifecycle,
        logger: Logger,
    ) -> None:
        self._retentions = retentions
        self._pace = pace
        self._key = key
        self._database = database
        self._pruned = pruned
        self._lifecycle = lifecycle
        self._logger = logger
        self._outage = Outage(logger, events.PRUNE_FAILED, events.PRUNE_RECOVERED)

    async def run(self) -> None:
        """Prune in rounds until the daemon stops."""
        backoff = Backoff(self._pace.interval, 10 * self._pace.interval)
        while not self._lifecycle.stopping.is_set():
            delay = self._pace.interval
            try:
                for retention in self._retentions:
                    await self._round(retention)
            except DATABASE_ERRORS as error:
                self._outage.failed(error)
                delay = backoff.next()
            else:
                self._outage.worked()
                backoff.reset()
            await self._lifecycle.pause(delay)

    async def _round(self, retention: Retention) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._pace.budget
        total = 0
        while not self._lifecycle.stopping.is_set() and loop.time() < end:
            began = loop.time()
            deleted = await self.prune_batch(retention)
            if deleted is None:
                break
            total += deleted
            self._pruned.labels(retention.table).inc(deleted)
            if deleted < self._pace.batch:
                break
            # As long at rest as at work: the daemon's own work goes first.
            await asyncio.sleep(loop.time() - began)
        if total:
            self._logger.emit(events.PRUNED, table=retention.table, rows=total)

    async def prune_batch(self, retention: Retention) -> int | None:
        """Delete one batch and return its size; None when another process prunes now."""
        async with self._database.connection() as connection, connection.transaction():
            return await prune_batch(
                connection, self._key, retention.statement, retention.seconds, self._pace.batch
            )


async def prune_batch(
    connection: asyncpg.Connection, key: int, statement: str, seconds: float, batch: int
) -> int | None:
    """Delete one batch within the caller's transaction and return its size; None when another process prunes now."""
    if not await connection.fetchval(TRY_PRUNE_LOCK, key):
        return None
    answer = await connection.execute(statement, seconds, batch)
    return int(answer.rpartition(" ")[2])
