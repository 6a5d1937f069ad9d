"""The command line of drain: one subcommand, one module."""

from __future__ import annotations

import argparse

from common.checks import report_settings
from common.cli import EXIT_CODES, run_command, settings_refused
from common.entry import print_settings, refuse, run_daemon
from common.errors import ConfigurationError
from drain.cli import check, deliveries, prune, requeue, send, status
from drain.settings import Settings, load_settings, read_settings

PREFIX = "DRAIN_"
APPLICATION_NAME = "drain-cli"
WITH_APPS = ("run", "settings", "send", "check")
"""Commands that need apps, or show whether all settings fit together; the others only need the database."""


def parser() -> argparse.ArgumentParser:
    """Build the parser. A subcommand sets ``run``, or ``command_main``: a coroutine that gets a Command too."""
    top = argparse.ArgumentParser(
        prog="drain",
        description="Pushes a delivery ledger to APNs. Settings come from the environment: drain settings.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the daemon").set_defaults(run=run_drain)
    shown = commands.add_parser("settings", help="print every setting with source, default, unit and bound")
    shown.add_argument("--json", action="store_true")
    shown.set_defaults(run=show_settings)
    for module in (status, deliveries, requeue, prune, send, check):
        module.add(commands)
    return top


def run_drain(settings: Settings, _: argparse.Namespace) -> int:
    """Run the daemon."""
    from drain.daemon import Daemon

    return run_daemon(PREFIX, settings.shared, settings.drain, lambda: Daemon(settings).run())


def show_settings(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the settings."""
    print_settings((settings.shared, settings.drain), arguments.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parse, read the settings, run."""
    arguments = parser().parse_args(argv)
    try:
        settings = load_settings() if arguments.command in WITH_APPS else read_settings()
    except ConfigurationError as error:
        if arguments.command == "run":
            return refuse(error, PREFIX)  # a log line: the daemon's output is read by machines
        if arguments.command == "check":
            return report_settings(error, arguments.json)
        return settings_refused(error)
    if "command_main" in arguments:
        return run_command(
            APPLICATION_NAME,
            settings.shared,
            settings.drain,
            lambda command: arguments.command_main(settings, arguments, command),
        )
    code: int = arguments.run(settings, arguments)
    return code
