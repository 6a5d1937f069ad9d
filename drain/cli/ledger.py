"""The ledger as it stands: one look in one snapshot, every count bounded, so that it costs the same at any size."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from common import sql as common_sql
from common.schema import qualify
from common.sql import CAP
from common.text import error_class
from drain import admin_sql

RATE_SECONDS = 60.0
"""The rate is that of the last minute."""
TERMINAL = ("sent", "failed", "expired", "superseded")


@dataclass(frozen=True, slots=True)
class AppStatus:
    """One app. ``last_day`` counts within the newest SAMPLE rows of each terminal status of all apps."""

    app: str
    configured: bool
    due: int
    leased: int
    waiting: int
    oldest_due_at: datetime | None
    oldest_due_age_seconds: float | None
    sent_per_second: float
    last_day: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReasonStatus:
    """Rows of one app that have one reason: waiting ones (``at``: the first is due), or finished ones (``at``: the
    last finished)."""

    app: str
    status: str
    reason: str
    rows: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Status:
    """One look. Counts of open rows stop at ``count_cap``; times are the database's."""

    schema: str
    observed_at: datetime
    read_only: bool
    count_cap: int
    oldest_transaction_at: datetime | None
    last_day_complete: dict[str, bool]
    apps: list[AppStatus]
    reasons: list[ReasonStatus]


async def read(connection: asyncpg.Connection, schema: str, configured: Collection[str]) -> Status:
    """Read everything in one snapshot. Apps that have rows and no settings are there too: nobody pushes them."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        with_rows = await connection.fetch(qualify(common_sql.DELIVERIES_APPS, schema))
        finished = await connection.fetch(qualify(admin_sql.STATUS_FINISHED, schema), RATE_SECONDS)
        found = {row["app"] for row in with_rows} | {row["app"] for row in finished}
        apps = [*configured, *sorted(found - set(configured))]
        lag = await connection.fetch(qualify(common_sql.DELIVERIES_LAG, schema), apps)
        waiting = await connection.fetch(qualify(admin_sql.STATUS_REASONS, schema), apps)
        oldest_transaction = await connection.fetchval(common_sql.OLDEST_TRANSACTION)
        read_only = await connection.fetchval(common_sql.READ_ONLY)
        now = await connection.fetchval("SELECT clock_timestamp()")
    totals: Counter[str] = Counter()
    for row in finished:
        totals[row["status"]] += row["rows"]
    complete = {status: totals[status] < admin_sql.SAMPLE for status in TERMINAL}
    return Status(
        schema=schema,
        observed_at=now,
        read_only=read_only,
        count_cap=CAP,
        oldest_transaction_at=oldest_transaction,
        last_day_complete=complete,
        apps=by_app(lag, finished, now, configured, complete["sent"]),
        reasons=by_reason(waiting, finished),
    )


def by_app(
    lag: Sequence[asyncpg.Record],
    finished: Sequence[asyncpg.Record],
    now: datetime,
    configured: Collection[str],
    complete: bool,
) -> list[AppStatus]:
    """Put the counts of each app together."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    recent: Counter[str] = Counter()
    window = RATE_SECONDS
    sent = [row for row in finished if row["status"] == "sent"]
    if sent and not complete:  # the sample may cover less than a minute: the rate is that of what it covers
        covered = (now - min(row["first"] for row in sent)).total_seconds()
        window = min(window, max(0.001, covered))
    for row in finished:
        counts[row["app"]][row["status"]] += row["rows"]
        if row["status"] == "sent":
            recent[row["app"]] += row["recent"]
    return [
        AppStatus(
            app=row["app"],
            configured=row["app"] in configured,
            due=row["due"],
            leased=row["leased"],
            waiting=row["waiting"],
            oldest_due_at=row["oldest_due_at"],
            oldest_due_age_seconds=(
                None if row["oldest_due_at"] is None else (now - row["oldest_due_at"]).total_seconds()
            ),
            sent_per_second=round(recent[row["app"]] / window, 1),
            last_day={status: counts[row["app"]][status] for status in TERMINAL},
        )
        for row in lag
    ]


def by_reason(waiting: Sequence[asyncpg.Record], finished: Sequence[asyncpg.Record]) -> list[ReasonStatus]:
    """Count rows by the kind of their reason: what waits first, then what failed; the most frequent first."""
    rows: Counter[tuple[str, str, str]] = Counter()
    at: dict[tuple[str, str, str], datetime] = {}
    for row in waiting:
        key = ("waiting", row["app"], error_class(row["last_reason"]))
        rows[key] += row["rows"]
        at[key] = min(row["next"], at.get(key, row["next"]))
    for row in finished:
        if row["status"] in ("failed", "expired"):
            key = (row["status"], row["app"], error_class(row["last_reason"] or "none given"))
            rows[key] += row["rows"]
            at[key] = max(row["last"], at.get(key, row["last"]))
    order = {"waiting": 0, "failed": 1, "expired": 2}
    return [
        ReasonStatus(app, status, reason, count, at[status, app, reason])
        for (status, app, reason), count in sorted(
            rows.items(), key=lambda item: (order[item[0][0]], -item[1])
        )
    ]
