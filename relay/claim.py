"""Claims: which rows a batch takes, from which of the three sources, inside the caller's transaction."""

from __future__ import annotations

import asyncio
import enum
import math
import random
import string
from dataclasses import dataclass, field

import asyncpg

from common.schema import qualify
from relay import sql
from relay.model import OutboxRow

_COLUMNS = 13
SWEEP_SHARE = 20
"""A sweep is due again after so many times its own duration: it takes a twentieth of a lane's time at most."""
KEYS_PER_ROW = 5
"""A keyed claim looks at this many keys for each row it may take: blocked keys are stepped over, not waited for."""


class Source(enum.Enum):
    """The ways for a row to be claimed; each has its own index (relay/sql.py)."""

    FRESH = "fresh"
    KEYED = "keyed"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Batch:
    """Claimed rows, locked until the end of the transaction.

    ``suspects`` failed before: they are sent one at a time, so that one that closes the channel harms no other.
    ``more`` says that the source may have more right now.
    """

    source: Source
    rows: list[OutboxRow] = field(default_factory=list)
    suspects: list[OutboxRow] = field(default_factory=list)
    more: bool = False

    def __len__(self) -> int:
        return len(self.rows) + len(self.suspects)


class Claimer:
    """The claims of one lane. Its cursors are hints that save work; losing them loses nothing.

    Args:
        schema: name of the schema.
        limit: rows of one batch.
        sweep_interval: seconds after which the fresh source is read from its beginning again at the latest, for
            rows that committed late with an id below the cursor (ThreeDotsLabs/watermill#311). While sweeps are
            cheap they come sooner: dead rows that a snapshot keeps alive are what makes them dear.
    """

    def __init__(self, schema: str, limit: int, sweep_interval: float) -> None:
        self._limit = limit
        self._sweep_interval = sweep_interval
        self._fresh, self._retry, self._heads, self._followers = (
            qualify(statement, schema)
            for statement in (sql.CLAIM_FRESH, sql.CLAIM_RETRY, sql.CLAIM_HEADS, sql.CLAIM_FOLLOWERS)
        )
        self._last_id = 0
        self._sweep_at = 0.0
        self._swept = True
        # Lanes and replicas start at different keys, or all would queue up at the same first ones.
        self._key = random.choice(string.ascii_letters)
        self._pass_found = 0
        self._pass_is_whole = False

    def forget(self) -> None:
        """Start from the beginning: rows below the cursors may be open again (a batch was not marked whole)."""
        self._sweep_at = 0.0

    def put_off(self) -> None:
        """Rows below the cursor wait for the next tick: those behind them go first."""
        self._sweep_at = asyncio.get_running_loop().time() + self._sweep_interval

    def sweep_owed_in(self) -> float:
        """Seconds until the sweep that follows a claim from the cursor; infinite after a sweep."""
        return math.inf if self._swept else self._sweep_at - asyncio.get_running_loop().time()

    async def claim(self, connection: asyncpg.Connection, source: Source) -> Batch:
        """Lock and return the next batch of a source. Nothing is written; a rollback undoes it all."""
        match source:
            case Source.FRESH:
                return await self._claim_fresh(connection)
            case Source.RETRY:
                return await self._claim_retry(connection)
            case Source.KEYED:
                return await self._claim_keyed(connection)

    async def _claim_fresh(self, connection: asyncpg.Connection) -> Batch:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._swept = began >= self._sweep_at
        records = await connection.fetch(self._fresh, 0 if self._swept else self._last_id, self._limit)
        if self._swept:
            now = loop.time()
            self._last_id = 0
            self._sweep_at = now + min(self._sweep_interval, SWEEP_SHARE * (now - began))
        rows = [OutboxRow(*record) for record in records]
        if rows:
            self._last_id = rows[-1].id
        return Batch(Source.FRESH, rows, more=len(rows) == self._limit)

    async def _claim_retry(self, connection: asyncpg.Connection) -> Batch:
        rows = [OutboxRow(*record) for record in await connection.fetch(self._retry, self._limit)]
        return split(Source.RETRY, rows, more=len(rows) == self._limit)

    async def _claim_keyed(self, connection: asyncpg.Connection) -> Batch:
        visits = self._limit * KEYS_PER_ROW
        records = await connection.fetch(self._heads, self._key, visits, self._limit)
        heads = [OutboxRow(*record[:_COLUMNS]) for record in records if record["id"] is not None]
        followers = await self._claim_followers(connection, [head for head in heads if not head.attempts])
        self._pass_found += len(heads)
        if len(heads) == self._limit:
            # The scan may have seen keys behind the last one taken: go on from there.
            self._key = heads[-1].ordering_key or ""
            more = True
        elif records[0]["visited"] == visits:
            self._key = records[0]["last_key"]
            more = True
        else:
            # The end of the keys: from the beginning again if this pass found anything, or began in the middle.
            more = self._pass_found > 0 or not self._pass_is_whole
            self._key, self._pass_found, self._pass_is_whole = "", 0, True
        return split(Source.KEYED, heads + followers, more=more)

    async def _claim_followers(
        self, connection: asyncpg.Connection, heads: list[OutboxRow]
    ) -> list[OutboxRow]:
        room = self._limit - len(heads)
        if not heads or room <= 0:
            return []
        records = await connection.fetch(
            self._followers, [head.ordering_key for head in heads], [head.id for head in heads], room, room
        )
        return contiguous(records)


def contiguous(records: list[asyncpg.Record]) -> list[OutboxRow]:
    """Keep, of each key, the rows up to its first gap: what stands in the gap holds back what is behind it."""
    by_key: dict[str, list[asyncpg.Record]] = {}
    for record in records:
        by_key.setdefault(record["ordering_key"], []).append(record)
    kept: list[OutboxRow] = []
    for behind in by_key.values():
        behind.sort(key=lambda record: int(record["position"]))
        for expected, record in enumerate(behind, start=1):
            # A row that failed before is a suspect: it is sent alone, when it has become the head.
            if record["position"] != expected or record["attempts"]:
                break
            kept.append(OutboxRow(*record[:_COLUMNS]))
    return kept


def split(source: Source, rows: list[OutboxRow], more: bool) -> Batch:
    """Set the rows apart that failed before."""
    return Batch(
        source,
        rows=[row for row in rows if row.attempts == 0],
        suspects=[row for row in rows if row.attempts > 0],
        more=more,
    )
