"""Rows of the outbox as the tests of commands need them."""

from __future__ import annotations

from tests.support.database import Database

OUTBOX = "relay_drain.outbox"
NO_ROUTE = "unroutable: 312 NO_ROUTE: exchange 'events', routing key 'order.{}'"


def fill(database: Database, rows: int, event_type: str = "order.placed", **columns: str) -> None:
    """Insert rows; ``columns`` are SQL expressions over n, which counts from 1."""
    names, values = ", ".join(["", *columns]), ", ".join(["", *columns.values()])
    database.run(
        f"INSERT INTO {OUTBOX} (aggregate_type, aggregate_id, event_type, payload{names}) "
        f"SELECT 'order', n::text, '{event_type}', jsonb_build_object('n', n){values} "
        f"FROM generate_series(1, {rows}) AS n"
    )


def park(database: Database, rows: int, event_type: str = "order.placed", **columns: str) -> None:
    """Insert rows in quarantine, row n for n minutes."""
    parked = {
        "attempts": "5",
        "next_attempt_at": "now()",
        "last_error": f"'{NO_ROUTE.format('').replace(chr(39), chr(39) * 2)}' || n",
        "quarantined_at": "now() - make_interval(mins => n)",
    }
    fill(database, rows, event_type, **{**parked, **columns})


def publish(database: Database, rows: int, event_type: str = "order.placed", **columns: str) -> None:
    """Insert published rows, row n published n minutes ago."""
    fill(database, rows, event_type, **{"published_at": "now() - make_interval(mins => n)", **columns})


def count(database: Database, condition: str) -> int:
    return int(database.value(f"SELECT count(*) FROM {OUTBOX} WHERE {condition}"))
