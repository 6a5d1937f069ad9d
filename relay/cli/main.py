"""The command line of relay: one subcommand, one function."""

from __future__ import annotations

import argparse

from common.entry import print_settings, refuse, run_daemon
from common.errors import ConfigurationError
from relay.settings import Settings, load_settings

PREFIX = "RELAY_"


def parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand sets ``run``."""
    top = argparse.ArgumentParser(prog="relay", description="Publishes a transactional outbox to RabbitMQ.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the daemon")
    run.set_defaults(run=run_relay)
    shown = commands.add_parser("settings", help="print every setting with source, default, unit and bound")
    shown.add_argument("--json", action="store_true")
    shown.set_defaults(run=show_settings)
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
        return refuse(error, PREFIX)
    code: int = arguments.run(settings, arguments)
    return code
