"""``drain requeue`` and ``drain cancel``: finished rows open again, open rows ended. Never a row under a live lease."""

from __future__ import annotations

import argparse
from typing import Any

from common.cli import Command, CommandRefused, add_write_options
from common.schema import qualify
from common.selection import Selection, select
from common.text import duration, error_class, positive, rows
from drain import admin_sql
from drain.cli.deliveries import OPEN, add_filters, filter_values, has_filter, say_what
from drain.settings import Settings

REQUEUED = ("failed", "expired")


async def run_requeue(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Make finished rows pending again, with all their attempts, due now."""
    statuses = arguments.status or list(REQUEUED)
    need_filter(arguments, "failed and expired row")
    if "sent" in statuses and not arguments.force:
        raise CommandRefused(
            "APNs took the rows that are sent: their devices get them again; --force does it"
        )
    selection = await chosen(
        command,
        arguments,
        admin_sql.SELECT_FINISHED,
        statuses,
        lambda app, status, reason, late, dead: (app, status, kind(reason), late, dead),
    )
    if not len(selection):
        command.say("no such row is finished: nothing to do")
        return 0
    say_what(command, merged(selection), "requeue")
    warn(command, selection, arguments, statuses)
    await command.confirm(f"requeue {rows(len(selection))}?", arguments.yes)
    seconds = None if arguments.expires_in is None else arguments.expires_in.total_seconds()
    step = selection.steps(qualify(admin_sql.REQUEUE, command.schema), arguments.batch, statuses, seconds)
    written = await command.write("requeued", len(selection), step, arguments.rate)
    return done(command, "requeued", selection, written)


def warn(command: Command, selection: Selection, arguments: argparse.Namespace, statuses: list[str]) -> None:
    """Say what will become of rows that can not be pushed, and what devices will see."""
    late = sum(count for group, count in selection.groups.items() if group[3])
    dead = sum(count for group, count in selection.groups.items() if group[4])
    command.say(
        "Requeued rows start afresh: attempts 0, due now; one that has a newer sibling ends as superseded."
    )
    if late and arguments.expires_in is None:
        command.say(
            f"{rows(late)} past expires_at: they end as expired again, unless --expires-in gives them time."
        )
    if dead:
        command.say(
            f"{rows(dead)} for device tokens that are dead: they end again without a push, "
            "unless the application registers the device first."
        )
    if "sent" in statuses:
        command.say(
            "Rows that were sent: their devices show the notification again, unless collapse_id replaces it."
        )


async def run_cancel(_: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """End open rows without a push."""
    need_filter(arguments, "open row")
    statuses = arguments.status or list(OPEN)
    selection = await chosen(
        command,
        arguments,
        admin_sql.SELECT_OPEN,
        statuses,
        lambda app, status, reason: (app, status, kind(reason)),
    )
    if selection.left:
        command.say(f"{rows(selection.left)} under a live lease, being pushed now: left alone")
    if not len(selection):
        command.say("no such row is open: nothing to do")
        return 0
    say_what(command, merged(selection), "cancel")
    command.say("Cancelled rows end as failed with the reason Cancelled; requeue opens them again.")
    await command.confirm(f"cancel {rows(len(selection))}?", arguments.yes)
    step = selection.steps(qualify(admin_sql.CANCEL, command.schema), arguments.batch)
    return done(command, "cancelled", selection, await command.write("cancelled", len(selection), step))


def kind(reason: str | None) -> str:
    """The kind of a reason; rows of one kind are counted together."""
    return "-" if reason is None else error_class(reason)


def need_filter(arguments: argparse.Namespace, everything: str) -> None:
    """Refuse to write to everything by an omission.

    Raises:
        CommandRefused: no filter and no --all.
    """
    if not has_filter(arguments) and not arguments.all:
        raise CommandRefused(f"which rows? give a filter, or --all for every {everything}")


async def chosen(
    command: Command, arguments: argparse.Namespace, statement: str, statuses: list[str], group: Any
) -> Selection:
    """Read which rows a write will touch."""
    async with command.database() as connection:
        values = await filter_values(connection, arguments, statuses)
        return await select(connection, qualify(statement, command.schema), values, group)


def merged(selection: Selection) -> dict[tuple[str, str, str], int]:
    """Counts by app, status and reason alone."""
    groups: dict[tuple[str, str, str], int] = {}
    for (app, status, reason, *_), count in selection.groups.items():
        groups[app, status, reason] = groups.get((app, status, reason), 0) + count
    return groups


def done(command: Command, participle: str, selection: Selection, written: int) -> int:
    """Say what was done."""
    changed = len(selection) - written
    command.say(
        f"{participle} {rows(written)}" + (f"; {rows(changed)} had changed meanwhile" if changed else "")
    )
    return 0


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    text = "push finished rows again: failed and expired ones, sent ones with --force"
    requeue = commands.add_parser("requeue", help=text, description=text)
    add_filters(requeue, (*REQUEUED, "sent"))
    requeue.add_argument("--force", action="store_true", help="with --status sent: push again what APNs took")
    requeue.add_argument(
        "--expires-in",
        type=duration,
        metavar="AGE",
        help="new expires_at of rows that are past theirs: 2h from now",
    )
    requeue.add_argument("--rate", type=positive, metavar="ROWS", help="rows in a second at most")
    requeue.set_defaults(command_main=run_requeue)
    text = "end open rows without a push: pending ones, and claimed ones whose lease is over"
    cancel = commands.add_parser("cancel", help=text, description=text)
    add_filters(cancel, OPEN)
    cancel.set_defaults(command_main=run_cancel)
    for parser in (requeue, cancel):
        parser.add_argument("--all", action="store_true", help="every row that fits the command")
        add_write_options(parser)
