"""Claims: which rows a batch takes, from which of the three sources, inside the caller's transaction."""

from __future__ import annotations

import asyncio
import math

import asyncpg

from common.schema import qualify
from relay import sql
from relay.batch import SWEEP_SHARE, Batch, Source, split
from relay.keyed import KeyedClaimer
from relay.model import OutboxRow

__all__ = ["Batch", "Claimer", "Source"]


class Claimer:
    """The claims of one lane. Its cursors are hints that save work; losing them loses nothing.

    Args:
        schema: name of the schema.
        limit: rows of one batch.
        sweep_interval: seconds after which a source is read from its beginning again at the latest, for rows that
            committed late with an id below the cursor (ThreeDotsLabs/watermill#311). While sweeps are cheap they
            come sooner: dead rows that a snapshot keeps alive are what makes them dear.
    """

    def __init__(self, schema: str, limit: int, sweep_interval: float) -> None:
        self._limit = limit
        self._sweep_interval = sweep_interval
        self._fresh, self._retry = (
            qualify(statement, schema) for statement in (sql.CLAIM_FRESH, sql.CLAIM_RETRY)
        )
        self.keyed = KeyedClaimer(schema, limit, sweep_interval)
        self._last_id = 0
        self._sweep_at = 0.0
        self._swept = True

    def forget(self) -> None:
        """Start from the beginning: rows below the cursors may be open again (a batch was not marked whole)."""
        self._sweep_at = 0.0
        self.keyed.forget()

    def put_off(self) -> None:
        """Fresh rows below the cursor wait for the next tick: those behind them go first."""
        self._sweep_at = asyncio.get_running_loop().time() + self._sweep_interval

    def sweep_owed_in(self) -> float:
        """Seconds until the look from the beginning that follows one from a cursor; infinite when none is owed."""
        fresh = math.inf if self._swept else self._sweep_at
        return min(fresh, self.keyed.pass_owed_at) - asyncio.get_running_loop().time()

    async def claim(self, connection: asyncpg.Connection, source: Source) -> Batch:
        """Lock and return the next batch of a source. Nothing is written; a rollback undoes it all."""
        match source:
            case Source.FRESH:
                return await self._claim_fresh(connection)
            case Source.RETRY:
                return await self._claim_retry(connection)
            case Source.KEYED:
                return await self.keyed.claim(connection)

    async def _claim_fresh(self, connection: asyncpg.Connection) -> Batch:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._swept = began >= self._sweep_at
        records = await connection.fetch(self._fresh, 0 if self._swept else self._last_id, self._limit)
        if self._swept:
            now = loop.time()
            self._sweep_at = now + min(self._sweep_interval, SWEEP_SHARE * (now - began))
        rows = [OutboxRow(*record) for record in records]
        full = len(rows) == self._limit
        if rows:
            # A sweep that did not get through goes on from where it is; one that did has seen all up to the cursor.
            self._last_id = rows[-1].id if full else max(self._last_id, rows[-1].id)
        return Batch(Source.FRESH, rows, more=full)

    async def _claim_retry(self, connection: asyncpg.Connection) -> Batch:
        rows = [OutboxRow(*record) for record in await connection.fetch(self._retry, self._limit)]
        return split(Source.RETRY, rows, more=len(rows) == self._limit)
