"""Tables filled to a size, and the claims that are timed on them. Every claim is rolled back, so that it repeats."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import asyncpg

from common.schema import qualify
from drain import sql as drain_sql
from drain.claim import BEGINNING
from drain.model import Delivery
from relay import sql as relay_sql
from relay.keyed import KeyedClaimer
from relay.model import OutboxRow

SCHEMA = "relay_drain"
RELAY_ROWS, DRAIN_ROWS = 100, 50
KEYS = 5000
CHUNK = 100_000
NEVER = 1e9

Claim = Callable[[asyncpg.Connection], Awaitable[int]]
"""Claims once, within the caller's transaction, and returns the number of rows."""


async def outbox(
    connection: asyncpg.Connection, rows: int, *, keyed: bool = False, published: bool = False
) -> None:
    """Add rows to the outbox."""
    key = f"'k' || (n % {KEYS})" if keyed else "NULL"
    for _ in range(0, rows, CHUNK):
        await connection.execute(
            f"""INSERT INTO {SCHEMA}.outbox
                    (aggregate_type, aggregate_id, event_type, payload, ordering_key, published_at)
                SELECT 'order', n::text, 'order.placed', '{{"total": 17}}', {key}, {"now()" if published else "NULL"}
                FROM generate_series(1, {min(rows, CHUNK)}) AS n""",
            timeout=600,
        )


async def ledger(connection: asyncpg.Connection, rows: int, *, sent: bool = False) -> None:
    """Add deliveries that are due, or long sent."""
    for _ in range(0, rows, CHUNK):
        await connection.execute(
            f"""INSERT INTO {SCHEMA}.notification_deliveries
                    (app, device_token, payload, status, next_attempt_at, finished_at)
                SELECT 'shop', lpad(to_hex(n), 64, '0'), '{{"aps": {{}}}}', {"'sent'" if sent else "'pending'"},
                    clock_timestamp() - interval '1 hour' + n * interval '1 microsecond', {"now()" if sent else "NULL"}
                FROM generate_series(1, {min(rows, CHUNK)}) AS n""",
            timeout=600,
        )


async def settle(connection: asyncpg.Connection) -> None:
    """What autovacuum does in time."""
    for table in ("outbox", "notification_deliveries"):
        await connection.execute(f"VACUUM ANALYZE {SCHEMA}.{table}", timeout=600)


async def empty(connection: asyncpg.Connection) -> None:
    """Start again."""
    await connection.execute(
        f"TRUNCATE {SCHEMA}.outbox, {SCHEMA}.notification_deliveries RESTART IDENTITY", timeout=600
    )


def relay_fresh(last_id: int = 0) -> Claim:
    """The fresh claim from a cursor; 0 is the beginning, which the sweep does."""
    statement = qualify(relay_sql.CLAIM_FRESH, SCHEMA)

    async def claim(connection: asyncpg.Connection) -> int:
        return len([OutboxRow(*record) for record in await connection.fetch(statement, last_id, RELAY_ROWS)])

    return claim


def relay_keyed() -> Claim:
    """The keyed claim of a pass, from one of several places among the keys, as lanes and replicas stand."""

    async def claim(connection: asyncpg.Connection) -> int:
        claimer = KeyedClaimer(SCHEMA, RELAY_ROWS, NEVER)
        claimer.after = random.choice(("", "k2", "k3", "k4"))
        return len(await claimer.claim(connection))

    return claim


def relay_keyed_new(last_id: int) -> Claim:
    """The keyed claim between passes, by a lane that has seen the rows up to ``last_id``."""
    floors: dict[str, int] = {}

    async def claim(connection: asyncpg.Connection) -> int:
        claimer = KeyedClaimer(SCHEMA, RELAY_ROWS, NEVER)
        claimer._whole, claimer.pass_at, claimer._last_id, claimer._floors = True, math.inf, last_id, floors
        return len(await claimer.claim(connection))

    return claim


def drain_due(cursor: object = BEGINNING) -> Claim:
    """Drain's claim from a due time on."""
    statement = qualify(drain_sql.CLAIM, SCHEMA)

    async def claim(connection: asyncpg.Connection) -> int:
        records = await connection.fetch(statement, ["shop"], [DRAIN_ROWS], [cursor], 120.0, "bench")
        return len([Delivery(*record) for record in records])

    return claim


async def timed(connection: asyncpg.Connection, claim: Claim, runs: int, expected: int | None) -> float:
    """Median milliseconds of a claim, rows made and rolled back; the first few runs are thrown away.

    Raises:
        SystemExit: a claim took another number of rows than it should have.
    """
    took: list[float] = []
    for run in range(runs + 5):
        transaction = connection.transaction()
        await transaction.start()
        began = time.perf_counter()
        rows = await claim(connection)
        took.append((time.perf_counter() - began) * 1000)
        await transaction.rollback()
        if expected is not None and rows != expected:
            raise SystemExit(f"a claim took {rows} rows instead of {expected} (run {run})")
    return statistics.median(took[5:])
