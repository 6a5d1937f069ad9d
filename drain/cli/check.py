"""``drain check``: connects to everything that the daemon needs and says what is wrong."""

from __future__ import annotations

import argparse
from typing import Any

from common.checks import report
from common.cli import Command
from drain.settings import Settings


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """Check everything; 1 when something is wrong."""
    from drain.cli.needs import checks  # APNs' libraries take their time to load

    return await report(command, checks(settings, arguments.app), arguments.json)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "connect to everything and say what is wrong"
    parser = commands.add_parser(
        "check",
        help=text,
        description=text
        + "; exit code 1 when a line says FAIL. Each app sends one push to a device token that can "
        "not exist: APNs refuses the token only after it has accepted the credentials and the topic.",
    )
    parser.add_argument("--app", action="append", metavar="NAME", help="only this app's; can be repeated")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command_main=run)
