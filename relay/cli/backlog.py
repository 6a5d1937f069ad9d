"""The outbox as it stands: one look in one snapshot, every count bounded, so that it costs the same at any size."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from common import sql as common_sql
from common.schema import qualify
from common.sql import CAP
from common.text import error_class
from relay import admin_sql

RATE_SECONDS = 60.0
"""The rate is that of the last minute."""


@dataclass(frozen=True, slots=True)
class ExchangeStatus:
    """One exchange. ``waiting`` is counted within the oldest SAMPLE rows of each source, ``quarantined`` within the
    newest PARKED rows: a false ``*_complete`` says that there may be more."""

    exchange: str
    waiting: int
    waiting_complete: bool
    oldest_created_at: datetime | None
    published_per_second: float
    quarantined: int
    quarantined_complete: bool


@dataclass(frozen=True, slots=True)
class QuarantineStatus:
    """One kind of error, and the event types that have it."""

    error: str
    rows: int
    event_types: dict[str, int]
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class BlockedKey:
    """An ordering key whose head can not be published now. ``until`` is null in quarantine."""

    ordering_key: str
    row_id: int
    why: str
    until: datetime | None
    attempts: int
    error: str | None
    behind: int


@dataclass(frozen=True, slots=True)
class Status:
    """One look. Counts stop at ``count_cap``; times are the database's."""

    schema: str
    observed_at: datetime
    read_only: bool
    count_cap: int
    fresh: int
    retrying: int
    keyed: int
    quarantined: int
    oldest_created_at: datetime | None
    oldest_age_seconds: float | None
    published_per_second: float
    last_published_at: datetime | None
    oldest_transaction_at: datetime | None
    exchanges: list[ExchangeStatus]
    quarantine: list[QuarantineStatus]
    keys_visited: int
    keys_in_quarantine: int
    keys_backing_off: int
    blocked_keys: list[BlockedKey]


async def read(connection: asyncpg.Connection, schema: str, default_exchange: str) -> Status:
    """Read everything in one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        lag = await connection.fetchrow(qualify(common_sql.OUTBOX_LAG, schema))
        waiting = await connection.fetch(qualify(admin_sql.STATUS_EXCHANGES, schema))
        published = await connection.fetch(qualify(admin_sql.STATUS_RATE, schema), RATE_SECONDS)
        parked = await connection.fetch(qualify(admin_sql.STATUS_QUARANTINED, schema))
        parked_keys = sorted({key for row in parked for key in row["keys"] or ()})[: admin_sql.KEYS]
        heads = await connection.fetch(qualify(admin_sql.STATUS_HEADS, schema), parked_keys)
        blocked = await blocked_keys(connection, schema, heads)
        last = await connection.fetchval(qualify(admin_sql.STATUS_LAST_PUBLISHED, schema))
        oldest_transaction = await connection.fetchval(common_sql.OLDEST_TRANSACTION)
        read_only = await connection.fetchval(common_sql.READ_ONLY)
    now, oldest = lag["observed_at"], lag["oldest_created_at"]
    total = sum(row["rows"] for row in published)
    window = RATE_SECONDS
    if total >= CAP:  # the newest CAP rows only: the rate is that of the time which they cover
        window = max(0.001, (now - min(row["first"] for row in published)).total_seconds())
    return Status(
        schema=schema,
        observed_at=now,
        read_only=read_only,
        count_cap=CAP,
        fresh=lag["fresh"],
        retrying=lag["retrying"],
        keyed=lag["keyed"],
        quarantined=lag["quarantined"],
        oldest_created_at=oldest,
        oldest_age_seconds=None if oldest is None else (now - oldest).total_seconds(),
        published_per_second=round(total / window, 1),
        last_published_at=last,
        oldest_transaction_at=oldest_transaction,
        exchanges=by_exchange(waiting, published, parked, window, default_exchange),
        quarantine=by_error(parked),
        keys_visited=heads[0]["visited"],
        keys_in_quarantine=sum(1 for row in heads if row["id"] and row["quarantined_at"] is not None),
        keys_backing_off=sum(1 for row in heads if row["id"] and row["quarantined_at"] is None),
        blocked_keys=blocked,
    )


async def blocked_keys(
    connection: asyncpg.Connection, schema: str, heads: Sequence[asyncpg.Record]
) -> list[BlockedKey]:
    """Describe the first blocked keys, those in quarantine before those that only wait."""
    found = sorted(
        (row for row in heads if row["id"] is not None),
        key=lambda row: (row["quarantined_at"] is None, row["id"]),
    )[: admin_sql.SHOWN_KEYS]
    keys = [row["ordering_key"] for row in found]
    counts = await connection.fetch(qualify(admin_sql.STATUS_BEHIND, schema), keys) if keys else []
    behind = {row["ordering_key"]: row["behind"] for row in counts}
    return [
        BlockedKey(
            ordering_key=row["ordering_key"],
            row_id=row["id"],
            why="backing off" if row["quarantined_at"] is None else "quarantine",
            until=row["next_attempt_at"] if row["quarantined_at"] is None else None,
            attempts=row["attempts"],
            error=row["last_error"],
            behind=behind[row["ordering_key"]],
        )
        for row in found
    ]


def by_exchange(
    waiting: Sequence[asyncpg.Record],
    published: Sequence[asyncpg.Record],
    parked: Sequence[asyncpg.Record],
    window: float,
    default_exchange: str,
) -> list[ExchangeStatus]:
    """Put the three counts of each exchange together; rows that name none go to the configured one."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    oldest: dict[str, datetime] = {}
    for kind, found in (("waiting", waiting), ("published", published), ("parked", parked)):
        for row in found:
            name = row["exchange"] or default_exchange
            if kind != "waiting" or row["source"] != "parked":
                counts[name][kind] += row["rows"]
            if kind == "waiting" and row["source"] != "parked":
                oldest[name] = min(row["oldest"], oldest.get(name, row["oldest"]))
    sources: Counter[str] = Counter()
    for row in waiting:
        sources["keyed" if row["source"] == "parked" else row["source"]] += row["rows"]
    waiting_complete = max(sources.values(), default=0) < admin_sql.SAMPLE
    parked_complete = sum(row["rows"] for row in parked) < admin_sql.PARKED
    return [
        ExchangeStatus(
            exchange=name,
            waiting=count["waiting"],
            waiting_complete=waiting_complete,
            oldest_created_at=oldest.get(name),
            published_per_second=round(count["published"] / window, 1),
            quarantined=count["parked"],
            quarantined_complete=parked_complete,
        )
        for name, count in sorted(counts.items())
    ]


def by_error(parked: Sequence[asyncpg.Record]) -> list[QuarantineStatus]:
    """Count quarantined rows by the kind of their error, the most frequent first."""
    kinds: dict[str, list[asyncpg.Record]] = defaultdict(list)
    for row in parked:
        kinds[error_class(row["last_error"])].append(row)
    found = []
    for kind, members in kinds.items():
        types: Counter[str] = Counter()
        for row in members:
            types[row["event_type"]] += row["rows"]
        found.append(
            QuarantineStatus(
                error=kind,
                rows=types.total(),
                event_types=dict(types.most_common()),
                first_at=min(row["first"] for row in members),
                last_at=max(row["last"] for row in members),
            )
        )
    return sorted(found, key=lambda status: -status.rows)
