"""Keyed claims: passes over all keys, and between two of them the keys of rows that are new.

A pass finds everything: rows that were blocked and are due, that committed late, that were released. It walks over
each entry that is dead and kept alive by a snapshot somebody holds, so a pass that wasted its time is not repeated
at once. Between passes a claim starts at the last seen id. Both take only the head of a key, and what follows it
without a gap (docs/decisions/0003-order-by-head-lock.md).
"""

from __future__ import annotations

import asyncio
import math
import random
import string
from collections.abc import Iterable

import asyncpg

from common.schema import qualify
from relay import sql
from relay.batch import COLUMNS, SWEEP_SHARE, Batch, Source, split
from relay.model import OutboxRow

KEYS_PER_ROW = 5
"""Where most keys are blocked, a claim looks at this many for each row it may take: they are stepped over."""
CHEAP_KEY = 50e-6
"""Seconds that a pass may take for each key without counting as wasted; it takes 10 to 20 µs without dead rows."""
FLOORS = 20_000
"""Keys whose floor is remembered."""


class KeyedClaimer:
    """The keyed claims of one lane.

    Args:
        schema: name of the schema.
        limit: rows of one batch.
        interval: seconds after which a pass is due at the latest.
    """

    def __init__(self, schema: str, limit: int, interval: float) -> None:
        self._limit = limit
        self._interval = interval
        self._pass, self._heads_of, self._followers, self._unseen, self._newest = (
            qualify(statement, schema)
            for statement in (
                sql.CLAIM_HEADS,
                sql.CLAIM_HEADS_OF,
                sql.CLAIM_FOLLOWERS,
                sql.KEYED_UNSEEN,
                sql.KEYED_NEWEST,
            )
        )
        # Lanes and replicas start at different keys, or all would queue up at the same first ones.
        self.after = random.choice(string.ascii_letters)
        """The key that the pass goes on after."""
        self.pass_at = 0.0
        """When the next pass may begin, in the loop's time."""
        self.pass_owed_at = math.inf
        """The same when claims were made meanwhile, which may have left something behind; else infinite."""
        self._whole = False
        self._passing = False
        self._widen = False
        self._last_id = 0
        self._newest_id = 0
        self._floors: dict[str, int] = {}
        self._start_counting()

    def forget(self) -> None:
        """A pass is due at once."""
        self.pass_at = 0.0

    async def claim(self, connection: asyncpg.Connection) -> Batch:
        """Lock and return the next batch."""
        now = asyncio.get_running_loop().time()
        if self._passing or now >= self.pass_at:
            return await self._go_on(connection)
        self.pass_owed_at = self.pass_at
        return await self._claim_unseen(connection)

    async def _go_on(self, connection: asyncpg.Connection) -> Batch:
        """Take the next keys of the pass, the first ones when none is under way."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not self._passing:
            self._passing = True
            # What is committed by now the pass will see; a claim of new rows starts behind it.
            self._newest_id = await connection.fetchval(self._newest) or 0
        visits = self._limit * (KEYS_PER_ROW if self._widen else 1)
        records = await connection.fetch(self._pass, self.after, visits, self._limit)
        self._seconds += loop.time() - began
        visited, last_key = records[0]["visited"], records[0]["last_key"]
        heads = [OutboxRow(*record[:COLUMNS]) for record in records if record["id"] is not None]
        self._visited += visited
        self._found += len(heads)
        rows = heads + await self._claim_followers(connection, heads)
        if len(heads) == self._limit:
            # The scan may have seen keys behind the last one taken: go on from there.
            self.after = heads[-1].ordering_key or ""
        elif visited == visits:
            self._widen = 2 * len(heads) < self._limit
            self.after = last_key
        else:
            return split(Source.KEYED, rows, more=self._end_pass(loop.time()))
        return split(Source.KEYED, rows, more=True)

    def _end_pass(self, now: float) -> bool:
        """Say when the next one may begin; whether there may be more to claim right now."""
        wasted = max(0.0, self._seconds - CHEAP_KEY * self._visited) if self._found else self._seconds
        again = self._found > 0 or not self._whole
        self.pass_at = now + min(self._interval, SWEEP_SHARE * wasted) if self._whole else now
        self.pass_owed_at = self.pass_at if again else math.inf
        self._last_id = max(self._last_id, self._newest_id)
        self.after, self._whole, self._passing, self._widen = "", True, False, False
        self._start_counting()
        return again

    def _start_counting(self) -> None:
        self._found, self._visited, self._seconds = 0, 0, 0.0

    async def _claim_unseen(self, connection: asyncpg.Connection) -> Batch:
        """Take the keys of rows that came since; what can not be taken now is left to the next pass."""
        unseen = await connection.fetch(self._unseen, self._last_id, self._limit)
        if not unseen:
            return Batch(Source.KEYED)
        self._last_id = unseen[-1]["id"]
        keys = list(dict.fromkeys(record["ordering_key"] for record in unseen))
        floors = [self._floors.get(key, 0) for key in keys]
        records = await connection.fetch(self._heads_of, keys, floors, self._limit)
        if len(self._floors) > FLOORS:
            self._floors.clear()
        self._floors.update((record["head_key"], record["head_id"]) for record in records)
        heads = [OutboxRow(*record[:COLUMNS]) for record in records if record["id"] is not None]
        rows = heads + await self._claim_followers(connection, heads)
        return split(Source.KEYED, rows, more=len(unseen) == self._limit)

    async def _claim_followers(
        self, connection: asyncpg.Connection, heads: list[OutboxRow]
    ) -> list[OutboxRow]:
        """Take what follows heads that never failed, up to the limit."""
        room = self._limit - len(heads)
        sound = [head for head in heads if not head.attempts]
        if not sound or room <= 0:
            return []
        keys, ids = [head.ordering_key for head in sound], [head.id for head in sound]
        return contiguous(await connection.fetch(self._followers, keys, ids, room, room))


def contiguous(records: Iterable[asyncpg.Record]) -> list[OutboxRow]:
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
            kept.append(OutboxRow(*record[:COLUMNS]))
    return kept
