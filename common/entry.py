"""What both command lines begin with: reading settings, printing them, running the daemon."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from common import events
from common.errors import ConfigurationError
from common.exits import EXIT_SETTINGS
from common.logs import Logger, configure
from common.settings import SharedSettings, Source, show, unknown_variables


def run_daemon(
    prefix: str, shared: SharedSettings, own: Source, main: Callable[[], Coroutine[Any, Any, int]]
) -> int:
    """Configure logs, warn of variables that mean nothing, and run the event loop until the daemon ends."""
    configure(shared.log_level, shared.log_format, secrets(shared, own))
    logger = Logger(daemon=prefix.rstrip("_").lower())
    for name in unknown_variables(prefix, type(own)):
        logger.emit(events.UNKNOWN_VARIABLE, variable=name)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(main())
    except ConfigurationError as error:  # found when the parts were put together: a port, a certificate
        logger.emit(events.CONFIGURATION_REFUSED, error)
        return EXIT_SETTINGS


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def secrets(*settings: BaseModel) -> list[str]:
    """Every secret value, those of nested settings too, and the password within it when it is a URL."""
    found: list[str] = []
    for source in settings:
        for name in type(source).model_fields:
            value = getattr(source, name)
            if isinstance(value, SecretStr):
                text = value.get_secret_value()
                found.append(text)
                credentials = text.partition("://")[2].rpartition("@")[0]
                if ":" in credentials:
                    found.append(credentials.partition(":")[2])
            elif isinstance(value, Mapping):
                found += secrets(*(item for item in value.values() if isinstance(item, BaseModel)))
    return found


def refuse(error: Exception, prefix: str) -> int:
    """Say why the settings are refused, as a log line (the daemon's output is read by machines)."""
    configure("info", "auto")
    Logger(daemon=prefix.rstrip("_").lower()).emit(events.CONFIGURATION_REFUSED, error)
    return EXIT_SETTINGS


def print_settings(groups: Iterable[Source], as_json: bool) -> None:
    """Print every setting with its value, source, default, unit and bound; secrets masked."""
    lines = [line for group in groups for line in show(group)]
    if as_json:
        rows = [{slot: getattr(line, slot) for slot in line.__slots__} for line in lines]
        json.dump(rows, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    table = [("VARIABLE", "VALUE", "SOURCE", "DEFAULT", "UNIT", "BOUND")]
    table += [(x.variable, x.value, x.source, x.default, x.unit, x.bound) for x in lines]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        sys.stdout.write(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        )
