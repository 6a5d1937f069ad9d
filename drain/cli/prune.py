"""``drain prune``: what the daemon's pruner does, once, by hand."""

from __future__ import annotations

import argparse
from typing import Any

from common.cli import Command, CommandRefused, add_write_options
from common.prune import DAY, lock_key
from common.pruning import Pruning, prune
from common.text import duration
from drain import admin_sql, sql
from drain.settings import Settings


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Delete finished rows past their retention."""
    days = settings.drain.retention_days
    if arguments.older_than is None and days < 0:
        raise CommandRefused("the settings keep finished rows for ever: give --older-than")
    pruning = Pruning(
        "finished deliveries",
        admin_sql.COUNT_FINISHED,
        sql.PRUNE,
        lock_key("notification_deliveries", settings.shared.database_schema),
        days * DAY if arguments.older_than is None else arguments.older_than.total_seconds(),
    )
    return await prune(command, [pruning], arguments.yes, arguments.batch)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "prune",
        help="delete finished rows past their retention, now",
        description="Deletes sent, failed, expired and superseded rows that finished longer ago than "
        "DRAIN_RETENTION_DAYS, as the daemon does. An event that comes again later can then notify again.",
    )
    parser.add_argument("--older-than", type=duration, metavar="AGE", help="90s, 30m, 2h, 7d or 2w")
    add_write_options(parser)
    parser.set_defaults(command_main=run)
