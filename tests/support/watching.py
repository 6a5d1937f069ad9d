"""Watches a daemon while a test does harm around it: how old its transactions grow, how much it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.support.database import Database

AGES = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND application_name = $1
    AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL OR state LIKE 'idle in transaction%')
"""


@dataclass
class TransactionAges:
    """Ages in seconds of the oldest open transaction, one for each look."""

    seen: list[float] = field(default_factory=list)

    @property
    def oldest(self) -> float:
        return max(self.seen, default=0.0)


@contextlib.asynccontextmanager
async def transaction_ages(
    database: Database, application_name: str = "relay"
) -> AsyncIterator[TransactionAges]:
    """Look every 50 ms until the block ends."""
    ages = TransactionAges()

    async def look() -> None:
        async with database.session() as connection:
            while True:
                ages.seen.append(await connection.fetchval(AGES, application_name))
                await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield ages
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
