"""Settling: outcomes are written in small batches, one fenced statement for many rows, however long it takes.

A settlement leaves the buffer only when the database has answered. While the database is away the buffer keeps
it; the buffer is bounded by the window, for a row counts as in flight until it is settled, so claiming stops when
it is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.backoff import Backoff
from common.database import Database, waiting_helps
from common.errors import DATABASE_ERRORS
from common.logs import Logger
from common.outage import Outage
from common.schema import qualify
from drain import events, sql
from drain.metrics import DrainMetrics
from drain.model import Settlement

MAX_REASON = 300
"""Characters of ``last_reason``."""


class Settler:
    """One background task; :meth:`add` never waits.

    Args:
        size: settlements of one statement at most.
        age: seconds that a settlement waits for company at most.
        settled: called with what left the buffer, whether it matched or not.
    """

    def __init__(
        self,
        database: Database,
        schema: str,
        size: int,
        age: float,
        settled: Callable[[Sequence[Settlement]], None],
        metrics: DrainMetrics,
        logger: Logger,
    ) -> None:
        self._database = database
        self._statement = qualify(sql.SETTLE, schema)
        self._size = size
        self._age = age
        self._settled = settled
        self._metrics = metrics
        self._logger = logger
        self._buffer: list[Settlement] = []
        self._filled = asyncio.Event()
        self._full = asyncio.Event()
        self._closing = False
        self._outage = Outage(logger, events.SETTLE_FAILED, events.SETTLE_RECOVERED)

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def waiting_ids(self) -> list[int]:
        """Ids of the rows whose outcome is not written."""
        return [settlement.delivery.id for settlement in self._buffer]

    def add(self, settlement: Settlement) -> None:
        """Take one outcome; it will be written soon."""
        self._buffer.append(settlement)
        self._filled.set()
        if len(self._buffer) >= self._size:
            self._full.set()

    async def run(self) -> None:
        """Write until :meth:`finish` was called and the buffer is empty."""
        backoff = Backoff(0.1, 5.0)
        uncertain = False
        while self._buffer or not self._closing:
            await self._filled.wait()
            if not self._buffer:
                self._filled.clear()
                continue
            await self._wait_for_company()
            batch = self._buffer[: self._size]
            try:
                await self._write(batch, uncertain)
            except DATABASE_ERRORS as error:
                # The statement may have committed before the connection broke: what does not match next time
                # was perhaps written by ourselves.
                uncertain = True
                self._outage.failed(error, waiting=len(self._buffer))
                if waiting_helps(error):
                    await self._database.suspect()
                await asyncio.sleep(backoff.next())
                continue
            uncertain = False
            self._outage.worked()
            backoff.reset()

    def finish(self) -> None:
        """Ask :meth:`run` to write what is left without waiting for company, and to end then."""
        self._closing = True
        self._filled.set()
        self._full.set()

    async def _wait_for_company(self) -> None:
        if self._closing or len(self._buffer) >= self._size:
            return
        self._full.clear()
        try:
            async with asyncio.timeout(self._age):
                await self._full.wait()
        except TimeoutError:
            pass

    async def _write(self, batch: list[Settlement], uncertain: bool) -> None:
        rows = sorted(batch, key=lambda settlement: settlement.delivery.id)
        async with self._database.connection() as connection:
            records = await connection.fetch(self._statement, *columns(rows))
        del self._buffer[: len(batch)]
        if not self._buffer:
            self._filled.clear()
        if len(self._buffer) < self._size:
            self._full.clear()
        written = {record["id"] for record in records}
        stale = [settlement for settlement in rows if settlement.delivery.id not in written]
        self._metrics.settled(rows, stale, uncertain)
        if stale and not uncertain:
            self._logger.emit(
                events.OUTCOMES_STALE,
                rows=len(stale),
                ids=[settlement.delivery.id for settlement in stale[:10]],
                outcomes=sorted({settlement.label for settlement in stale}),
            )
        self._settled(rows)


def columns(rows: Sequence[Settlement]) -> tuple[list[object], ...]:
    """The arguments of ``sql.SETTLE``, one list for each column."""
    return (
        [row.delivery.id for row in rows],
        [row.delivery.claim_version for row in rows],
        [row.status for row in rows],
        [row.delay for row in rows],
        [int(row.give_back) for row in rows],
        [row.http_status for row in rows],
        [None if row.reason is None else storable(row.reason) for row in rows],
        [row.token_dead for row in rows],
        [(row.dead_since or row.delivery.claimed_at) if row.token_dead else None for row in rows],
    )


def storable(text: str) -> str:
    """Shorten a text and take out what PostgreSQL's text type refuses (NUL, lone surrogates)."""
    return text.replace("\x00", "\\0").encode("utf-8", "replace").decode()[:MAX_REASON]
