"""``relay replay``: publish again what was published: the same rows, the same event ids."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import Any
from uuid import UUID

from common.cli import Command, CommandRefused, add_write_options
from common.schema import qualify
from common.selection import Selection, select
from common.text import moment, number, positive, row_id, rows
from relay import admin_sql
from relay.settings import Settings


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """State, ask, and make the rows unpublished again, in batches; a running relay does the rest."""
    filters = ("id", "event_id", "event_type", "aggregate", "since", "before")
    if not any(getattr(arguments, name) for name in filters):
        raise CommandRefused(
            "which rows? give at least one of --id, --event-id, --event-type, --aggregate, --from, --to"
        )
    selection = await chosen(command, arguments)
    report_missing(command, arguments, len(selection))
    if not len(selection):
        command.say("no published row fits: nothing to do")
        return 0
    state(command, selection, settings.relay.exchange)
    if arguments.dry_run:
        command.say("dry run: nothing was changed")
        return 0
    await command.confirm(f"publish {rows(len(selection))} again?", arguments.yes)
    step = selection.steps(qualify(admin_sql.REPLAY, command.schema), arguments.batch)
    written = await command.write("put back", len(selection), step, arguments.rate)
    changed = len(selection) - written
    command.say(
        f"put back {rows(written)}: relay publishes them again"
        + (f"; {rows(changed)} were pruned or put back by somebody else meanwhile" if changed else "")
    )
    return 0


async def chosen(command: Command, arguments: argparse.Namespace) -> Selection:
    """Read which rows will be published again."""
    kind, _, identity = (arguments.aggregate or "").partition(":")
    async with command.database() as connection:
        now = await connection.fetchval("SELECT clock_timestamp()")
        times: list[datetime | None] = [
            None if at is None else at.resolve(now) for at in (arguments.since, arguments.before)
        ]
        return await select(
            connection,
            qualify(admin_sql.SELECT_PUBLISHED, command.schema),
            [
                arguments.id,
                arguments.event_id,
                arguments.event_type,
                kind or None,
                identity or None,
                *times,
                arguments.limit,
            ],
            lambda event_type, exchange, keyed: (event_type, exchange, keyed),
        )


def report_missing(command: Command, arguments: argparse.Namespace, found: int) -> None:
    """Ids that were named and are not there are worth a word: pruned, or not published yet."""
    named = arguments.id or arguments.event_id
    asked = len(set(named or ()))
    if named and found < asked and arguments.limit is None:
        command.note(
            f"{asked - found} of {asked} named rows do not fit: pruned, never there, not published yet, "
            "or left out by another filter"
        )


def state(command: Command, selection: Selection, default_exchange: str) -> None:
    """Say what will be published again and what consumers will see."""
    command.say(f"publish {rows(len(selection))} again:")
    ordered = selection.groups.most_common()
    command.show(
        ("ROWS", "EVENT TYPE", "EXCHANGE", "ORDER"),
        (
            (number(count), event_type, exchange or default_exchange, "by key" if keyed else "-")
            for (event_type, exchange, keyed), count in ordered[:20]
        ),
        right=("ROWS",),
    )
    if len(ordered) > 20:
        command.say(f"… and {rows(sum(count for _, count in ordered[20:]))} of other kinds")
    command.say(
        "Every message keeps its event_id (message_id): a consumer that deduplicates drops what it has applied, one",
        "that does not applies it twice. Replayed rows have lower ids and go before newer rows that wait.",
    )
    keyed_rows = sum(count for (_, _, keyed), count in ordered if keyed)
    if keyed_rows:
        command.say(
            f"{rows(keyed_rows)} with an ordering key go again in id order with the open rows of their key:",
            "newer ones wait behind them. Consumers see them after newer events of the key that were published before.",
        )


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "publish published rows again (pruned ones are gone)"
    parser = commands.add_parser(
        "replay", help=text, description=text + "; all filters that are given must fit"
    )
    parser.add_argument("--id", type=row_id, action="append", metavar="ID", help="row id; can be repeated")
    parser.add_argument("--event-id", type=UUID, action="append", metavar="UUID", help="can be repeated")
    parser.add_argument("--event-type", action="append", metavar="TYPE", help="can be repeated")
    parser.add_argument("--aggregate", metavar="TYPE[:ID]", help="aggregate type, or one aggregate")
    parser.add_argument(
        "--from", dest="since", type=moment, metavar="TIME", help="published at or after; ISO 8601, or 2h ago"
    )
    parser.add_argument(
        "--to", dest="before", type=moment, metavar="TIME", help="published before; ISO 8601, or 2h ago"
    )
    parser.add_argument("--limit", type=positive, metavar="ROWS", help="so many rows, published first")
    parser.add_argument("--dry-run", action="store_true", help="say what would be published again, and stop")
    parser.add_argument("--rate", type=positive, metavar="ROWS", help="rows in a second at most")
    add_write_options(parser)
    parser.set_defaults(command_main=run)
