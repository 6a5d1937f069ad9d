"""The command line of drain: one subcommand, one function."""

from __future__ import annotations

import argparse

from common.entry import print_settings, refuse, run_daemon
from common.errors import ConfigurationError
from drain.settings import Settings, load_settings

PREFIX = "DRAIN_"


def parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand sets ``run``."""
    top = argparse.ArgumentParser(prog="drain", description="Pushes a delivery ledger to APNs.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the daemon")
    run.set_defaults(run=run_drain)
    shown = commands.add_parser("settings", help="print every setting with source, default, unit and bound")
    shown.add_argument("--json", action="store_true")
    shown.set_defaults(run=show_settings)
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
        settings = load_settings()
    except ConfigurationError as error:
        return refuse(error, PREFIX)
    code: int = arguments.run(settings, arguments)
    return code
