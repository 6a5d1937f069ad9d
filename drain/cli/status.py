"""``drain status``: what is due, in flight and waiting, how fast it goes, what failed and why. Reads only."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from common.cli import Command, watch
from common.explain import address
from common.settings import SharedSettings
from common.sql import CAP
from common.text import age, capped, seconds, utc
from drain.cli.ledger import TERMINAL, ReasonStatus, Status, read
from drain.settings import Settings

PROBE_SECONDS = 1.0
SHOWN_REASONS = 20
_PAUSED = re.compile(r'^drain_app_paused\{app="((?:[^"\\]|\\.)*)"\} 1(?:\.0)?$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Here:
    """What the drain at this host's PROBE_PORT says of itself; pauses are in its memory, not in the ledger."""

    probe: str
    answers: bool
    problems: dict[str, str]
    paused: list[str]


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Look once, or again and again."""

    async def look() -> None:
        here = await asyncio.to_thread(ask_daemon, settings.shared)
        async with command.database(slow=False) as connection:
            status = await read(connection, command.schema, list(settings.drain.apps))
        if arguments.json:
            everything = {**dataclasses.asdict(status), "here": dataclasses.asdict(here)}
            command.show_json(everything, 2 if arguments.watch is None else None)
        else:
            show(command, status, here, address(settings.shared.database_url.get_secret_value()))

    if arguments.watch is not None:
        return await watch(command, arguments.watch, look)
    await look()
    return 0


def ask_daemon(shared: SharedSettings) -> Here:
    """Ask the daemon of this host, if there is one, what keeps it from being ready and which apps it has paused."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(shared.probe_host, shared.probe_host)  # noqa: S104
    base = f"http://{host}:{shared.probe_port}"
    try:
        ready = json.loads(_get(f"{base}/readyz"))
        paused = _PAUSED.findall(_get(f"{base}/metrics").decode())
        return Here(base, True, dict(ready["problems"]), sorted(paused))
    except (OSError, ValueError, KeyError, TypeError):
        return Here(base, False, {}, [])


def _get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:  # 503: not ready, and the body says why
        with error:
            return error.read()


def show(command: Command, status: Status, here: Here, where: str) -> None:
    """Print for people."""
    now = status.observed_at
    lines = [("schema", f"{status.schema} at {where}, {utc(now)}"), ("drain here", daemon_text(here))]
    if status.oldest_transaction_at is not None:
        held = (now - status.oldest_transaction_at).total_seconds()
        lines.append(("snapshot", f"the oldest transaction holds one for {age(held)}"))
    if status.read_only:
        lines.append(("READ-ONLY", "the database takes no writes: nothing is pushed"))
    command.say(*(f"{name:<12} {text}" for name, text in lines))
    show_apps(command, status, here)
    show_reasons(command, "waiting, by the reason of the last attempt", "FIRST IN", status, ("waiting",), now)
    show_reasons(command, "failed and expired in the last day", "LAST", status, ("failed", "expired"), now)


def daemon_text(here: Here) -> str:
    """The daemon of this host in a few words."""
    if not here.answers:
        return f"none answers at {here.probe}"
    if here.problems:
        return "not ready: " + "; ".join(f"{name}: {problem}" for name, problem in here.problems.items())
    return "ready"


def show_apps(command: Command, status: Status, here: Here) -> None:
    """Print the table of apps."""
    if not status.apps:
        command.say("", "no app is configured, none has rows")
        return
    command.say("")
    head = (
        "APP",
        "DUE",
        "OLDEST",
        "LEASED",
        "WAITING",
        "PER SECOND",
        *(name.upper() for name in TERMINAL),
        "NOTE",
    )
    command.show(
        head,
        (
            (
                app.app,
                capped(app.due, CAP),
                age(app.oldest_due_age_seconds),
                capped(app.leased, CAP),
                capped(app.waiting, CAP),
                f"{app.sent_per_second:g}",
                *(
                    str(app.last_day[name]) + ("" if status.last_day_complete[name] else "+")
                    for name in TERMINAL
                ),
                note(app.app, app.configured, here, status.reasons),
            )
            for app in status.apps
        ),
        right=head[1:-1],
    )
    command.say("sent to superseded: in the last day; + the newest rows only")


def note(app: str, configured: bool, here: Here, reasons: list[ReasonStatus]) -> str:
    """What an operator must know of an app: paused, and why; or not known here."""
    if app in here.paused:
        why = next(
            (r.reason for r in reasons if r.app == app and r.status == "waiting"), "see the log: app_paused"
        )
        return f"PAUSED here: {why}"
    return "" if configured else "not in DRAIN_APPS here"


def show_reasons(
    command: Command, title: str, when: str, status: Status, statuses: tuple[str, ...], now: datetime
) -> None:
    """Print one table of reasons."""
    reasons = [reason for reason in status.reasons if reason.status in statuses]
    if not reasons:
        return
    command.say("", f"{title}:")
    command.show(
        ("APP", "STATUS", "ROWS", when, "REASON"),
        (
            (
                reason.app,
                reason.status,
                str(reason.rows),
                age(abs((reason.at - now).total_seconds()))
                if reason.status != "waiting" or reason.at > now
                else "now",
                reason.reason,
            )
            for reason in reasons[:SHOWN_REASONS]
        ),
        right=("ROWS", when),
    )


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "status", help="by app: due, leased, waiting, rate, outcomes, reasons, pauses"
    )
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
