"""``relay quarantine``: list, show, release and purge the rows that relay gave up on."""

from __future__ import annotations

import argparse
from typing import Any

import asyncpg

from common.cli import Command, CommandRefused, add_write_options
from common.schema import qualify
from common.selection import Selection, select
from common.text import age, error_class, moment, number, positive, printable, row_id, rows, utc
from relay import admin_sql
from relay.settings import Settings

LIST_LIMIT = 50
SHOW_LIMIT = 10
SHOW_CHARACTERS = 4000


async def run_list(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Print one line for each row, the oldest in quarantine first."""
    records, now = await read(command, admin_sql.LIST_QUARANTINED, arguments)
    if arguments.json:
        command.show_json([dict(record) for record in records])
        return 0
    command.show(
        ("ID", "QUARANTINED", "ATTEMPTS", "EVENT TYPE", "AGGREGATE", "KEY", "EXCHANGE", "ERROR"),
        (
            (
                str(row["id"]),
                age((now - row["quarantined_at"]).total_seconds()) + " ago",
                str(row["attempts"]),
                row["event_type"],
                f"{row['aggregate_type']}:{row['aggregate_id']}",
                row["ordering_key"] or "-",
                row["exchange"] or settings.relay.exchange,
                row["last_error"] or "",
            )
            for row in records
        ),
        right=("ID", "ATTEMPTS"),
    )
    if len(records) == arguments.limit:
        command.note(f"the first {rows(len(records))}; more with --limit")
    return 0


async def run_show(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Print rows whole, payload and headers too."""
    records, _ = await read(command, admin_sql.SHOW_QUARANTINED, arguments)
    if arguments.json:
        command.show_json([dict(record) for record in records])
        return 0
    for position, row in enumerate(records):
        command.say(*([""] if position else []), f"row {row['id']}")
        for name, value in list(row.items())[1:]:
            if value is not None and name not in ("payload", "payload_bytes"):
                command.say(f"  {name:<15} {utc(value) if name.endswith('_at') else printable(str(value))}")
        command.say(f"  {'payload':<15} {printable(body(row, arguments.full))}")
    if not records:
        command.note("no such row in quarantine")
    return 0


def body(row: asyncpg.Record, full: bool) -> str:
    """The payload as text, cut unless it is asked for whole; bytes that are no text as hex."""
    raw = row["payload_bytes"]
    if raw is None:
        text, size = row["payload"], len(row["payload"].encode())
    else:
        size = len(raw)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = raw.hex()
    if full or len(text) <= SHOW_CHARACTERS:
        return str(text)
    return f"{text[:SHOW_CHARACTERS]}… ({number(size)} bytes; whole with --full)"


async def run_release(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Give rows all their attempts back and let relay try them at once."""
    need_filter(arguments)
    selection = await chosen(command, arguments)
    if not say_what(command, selection, "release"):
        return 0
    keyed = sum(count for group, count in selection.groups.items() if group[2])
    command.say(
        "Released rows start afresh: attempts 0, due now; the fault must be mended, or they come back here."
    )
    if keyed:
        command.say(
            f"{rows(keyed)} with an ordering key: each frees its key, the rows behind follow in id order."
        )
    return await write(command, arguments, selection, admin_sql.RELEASE_QUARANTINED, "release", "released")


async def run_purge(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Delete rows that nobody will publish."""
    need_filter(arguments)
    selection = await chosen(command, arguments)
    if not say_what(command, selection, "delete"):
        return 0
    command.say("These events were never published, and nothing will bring them back.")
    if any(group[2] for group in selection.groups):
        command.say(
            "A row with an ordering key frees its key: consumers see that key's next event without it."
        )
    return await write(command, arguments, selection, admin_sql.PURGE_QUARANTINED, "delete", "deleted")


def need_filter(arguments: argparse.Namespace) -> None:
    """Refuse to write to everything by an omission.

    Raises:
        CommandRefused: no filter and no --all.
    """
    filters = (arguments.id, arguments.event_type, arguments.error, arguments.since, arguments.before)
    if not any(filters) and not arguments.all:
        raise CommandRefused("which rows? give a filter, or --all for every row in quarantine")


async def filter_values(connection: asyncpg.Connection, arguments: argparse.Namespace) -> list[Any]:
    """Parameters of the quarantine's statements; times before now are by the database's clock."""
    now = await connection.fetchval("SELECT clock_timestamp()")
    since, before = (None if at is None else at.resolve(now) for at in (arguments.since, arguments.before))
    return [arguments.id, arguments.event_type, arguments.error, since, before, arguments.limit]


async def read(
    command: Command, statement: str, arguments: argparse.Namespace
) -> tuple[list[asyncpg.Record], Any]:
    """Return the rows of a statement, and the database's time."""
    async with command.database() as connection:
        values = await filter_values(connection, arguments)
        return (
            await connection.fetch(qualify(statement, command.schema), *values),
            await connection.fetchval("SELECT clock_timestamp()"),
        )


async def chosen(command: Command, arguments: argparse.Namespace) -> Selection:
    """Read which rows a write will touch."""
    async with command.database() as connection:
        return await select(
            connection,
            qualify(admin_sql.SELECT_QUARANTINED, command.schema),
            await filter_values(connection, arguments),
            lambda event_type, error, keyed: (event_type, error_class(error), keyed),
        )


def say_what(command: Command, selection: Selection, verb: str) -> bool:
    """State how many rows of which kind will be touched; False when there are none."""
    if not len(selection):
        command.say("no row in quarantine fits: nothing to do")
        return False
    command.say(f"{verb} {rows(len(selection))} of the quarantine:")
    groups: dict[tuple[str, str], int] = {}
    for (event_type, error, _), count in selection.groups.items():
        groups[event_type, error] = groups.get((event_type, error), 0) + count
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    command.show(
        ("ROWS", "EVENT TYPE", "ERROR"),
        ((number(count), event_type, error) for (event_type, error), count in ordered[:20]),
        right=("ROWS",),
    )
    if len(ordered) > 20:
        command.say(f"… and {rows(sum(count for _, count in ordered[20:]))} of other kinds")
    return True


async def write(
    command: Command,
    arguments: argparse.Namespace,
    selection: Selection,
    statement: str,
    verb: str,
    participle: str,
) -> int:
    """Ask, write, and say what was done."""
    await command.confirm(f"{verb} {rows(len(selection))}?", arguments.yes)
    step = selection.steps(qualify(statement, command.schema), arguments.batch)
    written = await command.write(participle, len(selection), step)
    changed = len(selection) - written
    command.say(
        f"{participle} {rows(written)}"
        + (f"; {rows(changed)} had left the quarantine meanwhile" if changed else "")
    )
    return 0


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser("quarantine", help="the rows that relay gave up on")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, run, text in (
        ("list", run_list, "one line for each row"),
        ("show", run_show, "rows whole, payload and headers too"),
        ("release", run_release, "try rows again, with all their attempts"),
        ("purge", run_purge, "delete rows for good"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        add_filters(verb)
        if name in ("list", "show"):
            verb.add_argument("--json", action="store_true")
            verb.set_defaults(limit=LIST_LIMIT if name == "list" else SHOW_LIMIT)
        else:
            verb.add_argument("--all", action="store_true", help="every row in quarantine")
            add_write_options(verb)
        if name == "show":
            verb.add_argument("--full", action="store_true", help="payloads whole")
        verb.set_defaults(command_main=run)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the filters; all that are given must fit."""
    parser.add_argument("--id", type=row_id, action="append", metavar="ID", help="row id; can be repeated")
    parser.add_argument("--event-type", action="append", metavar="TYPE", help="event type; can be repeated")
    parser.add_argument("--error", metavar="TEXT", help="part of the last error, in any case")
    parser.add_argument(
        "--since", type=moment, metavar="TIME", help="quarantined at or after; ISO 8601, or 2h ago"
    )
    parser.add_argument(
        "--before", type=moment, metavar="TIME", help="quarantined before; ISO 8601, or 2h ago"
    )
    parser.add_argument(
        "--limit", type=positive, metavar="ROWS", help="so many rows, longest in quarantine first"
    )
