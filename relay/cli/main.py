"""The command line of relay: one subcommand, one module."""

from __future__ import annotations

import argparse

from common.checks import report_settings
from common.cli import EXIT_CODES, run_command, settings_refused
from common.entry import print_settings, refuse, run_daemon
from common.errors import ConfigurationError
from relay.cli import check, prune, quarantine, replay, status
from relay.settings import Settings, load_settings

PREFIX = "RELAY_"
APPLICATION_NAME = "relay-cli"


def parser() -> argparse.ArgumentParser:
    """Build the parser. A subcommand sets ``run``, or ``command_main``: a coroutine that gets a Command too."""
    top = argparse.ArgumentParser(
        prog="relay",
        description="Publishes a transactional outbox to RabbitMQ. Settings come from the environment: relay settings.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the daemon").set_defaults(run=run_relay)
    shown = commands.add_parser("settings", help="print every setting with source, default, unit and bound")
    shown.add_argument("--json", action="store_true")
    shown.set_defaults(run=show_settings)
    for module in (status, quarantine, replay, prune, check):
        module.add(commands)
    return top


def run_relay(settings: Settings, _: argparse.Namespace) -> int:
    """Run the daemon."""
    from relay.daemon import Daemon

    return run_daemon(PREFIX, settings.shared, settings.relay, lambda: Daemon(settings).run())


def show_settings(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the settings."""
    print_settings((settings.shared, settings.relay), arguments.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parse, read the settings, run."""
    arguments = parser().parse_args(argv)
    try:
        settings = load_settings()
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
            settings.relay,
            lambda command: arguments.command_main(settings, arguments, command),
        )
    code: int = arguments.run(settings, arguments)
    return code
