"""``relay prune``: what the daemon's pruner does, once, by hand; and old quarantined rows, when told."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from common.cli import Command, CommandRefused, add_write_options
from common.prune import DAY, lock_key
from common.pruning import Pruning, prune
from common.text import duration
from relay import admin_sql, sql
from relay.settings import Settings


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Delete published rows and inbox rows past their retention, or only what is asked for."""
    return await prune(command, chosen(settings, arguments), arguments.yes, arguments.batch)


def chosen(settings: Settings, arguments: argparse.Namespace) -> list[Pruning]:
    """What the arguments ask for.

    Raises:
        CommandRefused: an age is needed and not given.
    """
    older: timedelta | None = arguments.older_than
    # The daemon's lock, of the same name: one process prunes the outbox and the inbox at a time.
    key = lock_key("outbox", settings.shared.database_schema)
    published = ("published outbox rows", admin_sql.COUNT_PUBLISHED, sql.PRUNE_PUBLISHED, key)
    inbox = ("inbox rows", admin_sql.COUNT_INBOX, sql.PRUNE_INBOX, key)
    quarantined = (
        "QUARANTINED outbox rows, never published",
        admin_sql.COUNT_QUARANTINED,
        admin_sql.PRUNE_QUARANTINED,
        key,
    )
    if arguments.quarantined:
        if older is None:
            raise CommandRefused("--quarantined needs --older-than: these rows were never published")
        return [Pruning(*quarantined, older.total_seconds())]
    if arguments.inbox:
        return [Pruning(*inbox, retention(older, settings.relay.inbox_retention_days))]
    if older is not None:
        return [Pruning(*published, older.total_seconds())]
    found = [
        Pruning(*what, days * DAY)
        for what, days in (
            (published, settings.relay.retention_days),
            (inbox, settings.relay.inbox_retention_days),
        )
        if days >= 0
    ]
    if not found:
        raise CommandRefused("the settings keep all rows for ever: give --older-than")
    return found


def retention(older: timedelta | None, days: float) -> float:
    """The age that was given, else that of the settings, in seconds."""
    if older is not None:
        return older.total_seconds()
    if days < 0:
        raise CommandRefused("the settings keep these rows for ever: give --older-than")
    return days * DAY


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "prune",
        help="delete rows past their retention, now",
        description="Deletes published outbox rows and inbox rows past RELAY_RETENTION_DAYS and "
        "RELAY_INBOX_RETENTION_DAYS, as the daemon does. With --older-than: published rows of that age, whatever the "
        "settings say; with --inbox or --quarantined only those.",
    )
    parser.add_argument("--older-than", type=duration, metavar="AGE", help="90s, 30m, 2h, 7d or 2w")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--inbox", action="store_true", help="the inbox only, by the time of receipt")
    what.add_argument(
        "--quarantined",
        action="store_true",
        help="rows in quarantine for so long, never published: needs --older-than",
    )
    add_write_options(parser)
    parser.set_defaults(command_main=run)
