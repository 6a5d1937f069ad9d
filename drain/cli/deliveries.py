"""``drain list`` and ``drain show``, and the filters that requeue and cancel have as well."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from common.cli import Command
from common.logs import fingerprint
from common.schema import qualify
from common.text import age, moment, number, positive, printable, row_id, rows, utc
from drain import admin_sql
from drain.settings import Settings

OPEN = ("pending", "claimed")
TERMINAL = ("sent", "failed", "expired", "superseded")
LIST_LIMIT = 50
SHOW_LIMIT = 10


async def run_list(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Print one line for each row, the newest first."""
    records, now = await read(command, admin_sql.LIST, arguments)
    if arguments.json:
        command.show_json([without_token(record, arguments.tokens) for record in records])
        return 0
    command.show(
        ("ID", "APP", "DEVICE", "TYPE", "STATUS", "ATTEMPTS", "WHEN", "HTTP", "REASON"),
        (
            (
                str(row["id"]),
                row["app"],
                row["device_token"] if arguments.tokens else fingerprint(row["device_token"]),
                row["push_type"],
                row["status"],
                str(row["attempts"]),
                when(row, now),
                str(row["last_status"] or "-"),
                row["last_reason"] or "",
            )
            for row in records
        ),
        right=("ID", "ATTEMPTS", "HTTP"),
    )
    if len(records) == arguments.limit:
        command.note(f"the newest {rows(len(records))}; more with --limit")
    return 0


def when(row: asyncpg.Record, now: datetime) -> str:
    """The time of a row that matters in its status."""
    if row["finished_at"] is not None:
        return f"{age((now - row['finished_at']).total_seconds())} ago"
    left = (row["next_attempt_at"] - now).total_seconds()
    if row["status"] == "claimed":
        return f"lease {age(left)}" if left > 0 else f"lease over for {age(-left)}"
    return f"due in {age(left)}" if left > 0 else f"due for {age(-left)}"


async def run_show(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Print rows whole, payload and headers too."""
    records, _now = await read(command, admin_sql.SHOW, arguments)
    shown = [without_token(record, arguments.tokens) for record in records]
    if arguments.json:
        command.show_json(shown)
        return 0
    for position, row in enumerate(shown):
        command.say(*([""] if position else []), f"row {row['id']}")
        for name, value in row.items():
            if value is not None and name != "id":
                command.say(
                    f"  {name:<15} {utc(value) if isinstance(value, datetime) else printable(str(value))}"
                )
    if not shown:
        command.note("no such row")
    return 0


def without_token(record: asyncpg.Record, tokens: bool) -> dict[str, Any]:
    """A row with its device token only when it was asked for; else the hash that the logs have."""
    row = dict(record)
    if not tokens:
        return {
            ("token_hash" if name == "device_token" else name): (
                fingerprint(value) if name == "device_token" else value
            )
            for name, value in row.items()
        }
    return row


async def read(
    command: Command, statement: str, arguments: argparse.Namespace
) -> tuple[list[asyncpg.Record], datetime]:
    """Return the rows of a statement, and the database's time."""
    async with command.database() as connection:
        values = await filter_values(connection, arguments, arguments.status or [*OPEN, *TERMINAL])
        records = await connection.fetch(qualify(statement, command.schema), *values)
        return records, await connection.fetchval("SELECT clock_timestamp()")


async def filter_values(
    connection: asyncpg.Connection, arguments: argparse.Namespace, statuses: Sequence[str]
) -> list[Any]:
    """Parameters of drain's selections; times before now are by the database's clock."""
    now = await connection.fetchval("SELECT clock_timestamp()")
    since, before = (None if at is None else at.resolve(now) for at in (arguments.since, arguments.before))
    devices = None if arguments.device is None else [device.lower() for device in arguments.device]
    return [
        arguments.id,
        arguments.notification_id,
        arguments.app,
        arguments.reason,
        devices,
        list(statuses),
        since,
        before,
        arguments.limit,
    ]


def has_filter(arguments: argparse.Namespace) -> bool:
    """Whether any filter was given."""
    names = ("id", "notification_id", "app", "status", "reason", "device", "since", "before")
    return any(getattr(arguments, name) for name in names)


def say_what(command: Command, groups: dict[tuple[str, str, str], int], verb: str) -> None:
    """State how many rows of which app, status and reason will be touched."""
    command.say(f"{verb} {rows(sum(groups.values()))}:")
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    command.show(
        ("ROWS", "APP", "STATUS", "REASON"),
        ((number(count), app, status, reason) for (app, status, reason), count in ordered[:20]),
        right=("ROWS",),
    )
    if len(ordered) > 20:
        command.say(f"… and {rows(sum(count for _, count in ordered[20:]))} of other kinds")


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    for name, run, text in (
        ("list", run_list, "one line for each delivery, the newest first"),
        ("show", run_show, "deliveries whole, payload and headers too"),
    ):
        parser = commands.add_parser(name, help=text, description=text)
        add_filters(parser, (*OPEN, *TERMINAL))
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--tokens", action="store_true", help="device tokens instead of their hashes")
        parser.set_defaults(command_main=run, limit=LIST_LIMIT if name == "list" else SHOW_LIMIT)


def add_filters(parser: argparse.ArgumentParser, statuses: Sequence[str]) -> None:
    """Add the filters; all that are given must fit."""
    parser.add_argument("--id", type=row_id, action="append", metavar="ID", help="row id; can be repeated")
    parser.add_argument(
        "--notification-id", type=UUID, action="append", metavar="UUID", help="the apns-id; can be repeated"
    )
    parser.add_argument("--app", action="append", metavar="NAME", help="can be repeated")
    parser.add_argument("--status", action="append", choices=statuses, help="can be repeated")
    parser.add_argument("--reason", metavar="TEXT", help="part of the last reason, in any case")
    parser.add_argument(
        "--device",
        action="append",
        metavar="TOKEN",
        help="device token, or its hash as logs have it; can be repeated",
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="TIME",
        help="finished (open rows: created) at or after; ISO 8601, or 2h ago",
    )
    parser.add_argument("--before", type=moment, metavar="TIME", help="the same, before")
    parser.add_argument("--limit", type=positive, metavar="ROWS", help="so many rows")
