"""``relay status``: what waits, for how long, how fast it goes, what stands still. Reads only, at a bounded cost."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import datetime
from typing import Any

from common.cli import Command, watch
from common.explain import address
from common.sql import CAP
from common.text import age, capped, seconds, utc
from relay import admin_sql
from relay.cli.backlog import Status, read
from relay.settings import Settings


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Look once, or again and again."""

    async def look() -> None:
        async with command.database(slow=False) as connection:
            status = await read(connection, command.schema, settings.relay.exchange)
        if arguments.json:
            indent = 2 if arguments.watch is None else None
            command.show_json(dataclasses.asdict(status), indent)
        else:
            show(command, status, address(settings.shared.database_url.get_secret_value()))

    if arguments.watch is not None:
        return await watch(command, arguments.watch, look)
    await look()
    return 0


def show(command: Command, status: Status, where: str) -> None:
    """Print for people."""
    now = status.observed_at

    def ago(at: datetime | None) -> str:
        return age(None if at is None else (now - at).total_seconds())

    last = "never" if status.last_published_at is None else f"last {ago(status.last_published_at)} ago"
    lines: list[tuple[str, str]] = [
        ("schema", f"{status.schema} at {where}, {utc(now)}"),
        (
            "waiting",
            f"{capped(status.fresh, CAP)} fresh, {capped(status.retrying, CAP)} retrying, "
            f"{capped(status.keyed, CAP)} with an ordering key",
        ),
        ("oldest", ago(status.oldest_created_at)),
        ("published", f"{status.published_per_second:g} per second in the last minute, {last}"),
        ("quarantined", capped(status.quarantined, CAP)),
        ("snapshot", f"the oldest transaction holds one for {ago(status.oldest_transaction_at)}"),
    ]
    if status.oldest_transaction_at is None:
        lines.pop()
    if status.read_only:
        lines.append(("READ-ONLY", "the database takes no writes: nothing is published"))
    command.say(*(f"{name:<12} {text}" for name, text in lines))
    show_exchanges(command, status, now)
    show_quarantine(command, status, now)
    show_keys(command, status, now)


def show_exchanges(command: Command, status: Status, now: datetime) -> None:
    """Print the table of exchanges."""
    if not status.exchanges:
        return
    command.say("")
    command.show(
        ("EXCHANGE", "WAITING", "OLDEST", "PER SECOND", "QUARANTINED"),
        (
            (
                exchange.exchange,
                str(exchange.waiting) + ("" if exchange.waiting_complete else "+"),
                age(since(exchange.oldest_created_at, now)),
                f"{exchange.published_per_second:g}",
                str(exchange.quarantined) + ("" if exchange.quarantined_complete else "+"),
            )
            for exchange in status.exchanges
        ),
        right=("WAITING", "OLDEST", "PER SECOND", "QUARANTINED"),
    )


def show_quarantine(command: Command, status: Status, now: datetime) -> None:
    """Print the table of errors."""
    if not status.quarantine:
        return
    seen = sum(kind.rows for kind in status.quarantine)
    command.say("", *([f"of the newest {seen} rows in quarantine:"] if seen >= admin_sql.PARKED else []))
    command.show(
        ("QUARANTINED", "FIRST", "LAST", "EVENT TYPES", "ERROR"),
        (
            (
                str(kind.rows),
                age(since(kind.first_at, now)),
                age(since(kind.last_at, now)),
                ", ".join(list(kind.event_types)[:3]) + (", …" if len(kind.event_types) > 3 else ""),
                kind.error,
            )
            for kind in status.quarantine[:20]
        ),
        right=("QUARANTINED", "FIRST", "LAST"),
    )


def show_keys(command: Command, status: Status, now: datetime) -> None:
    """Print the blocked ordering keys."""
    if not status.keys_in_quarantine and not status.keys_backing_off:
        return
    least = "" if status.keys_visited < admin_sql.KEYS else "at least "  # more keys than were looked at
    command.say(
        "",
        f"blocked keys: {least}{status.keys_in_quarantine} by quarantine, {least}{status.keys_backing_off} backing off",
    )
    command.show(
        ("KEY", "ROW", "BLOCKED BY", "AGAIN IN", "BEHIND", "ERROR"),
        (
            (
                key.ordering_key,
                str(key.row_id),
                key.why,
                "when released" if key.until is None else age(since(now, key.until)),
                capped(key.behind, admin_sql.BEHIND),
                key.error or "",
            )
            for key in status.blocked_keys
        ),
        right=("ROW", "BEHIND"),
    )


def since(at: datetime | None, now: datetime) -> float | None:
    """Seconds from ``at`` to ``now``."""
    return None if at is None else (now - at).total_seconds()


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("status", help="depth, age, rate, quarantine, blocked keys")
    parser.add_argument("--json", action="store_true", help="one JSON object; with --watch one for each look")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=2.0,
        metavar="SECONDS",
        help="look again until Ctrl-C (2 seconds)",
    )
    parser.set_defaults(command_main=run)
