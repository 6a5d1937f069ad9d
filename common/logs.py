"""Logs: one line for each event worth knowing, as JSON or for a terminal, without secrets.

An event's name, level and meaning are declared once, as a constant, with :func:`define`; ``docs/logs.md`` is made
from these declarations. Device tokens never appear, a short hash does (:func:`fingerprint`).
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A declared event: constant name, level, and what it tells an operator."""

    name: str
    level: int
    meaning: str


DECLARED: dict[str, LogEvent] = {}


def define(name: str, level: int, meaning: str) -> LogEvent:
    """Declare an event once; a second declaration of a name is a programming error."""
    if name in DECLARED:
        raise ValueError(f"log event {name!r} is declared twice")
    DECLARED[name] = LogEvent(name, level, meaning)
    return DECLARED[name]


class Logger:
    """Writes declared events with fields."""

    __slots__ = ("_logger",)

    def __init__(self, **bound: Any) -> None:
        self._logger = structlog.get_logger().bind(**bound)

    def emit(self, event: LogEvent, error: BaseException | None = None, **fields: Any) -> None:
        """Write one line; ``error`` adds its type and text, and its traceback at debug level."""
        if error is not None:
            fields["error"] = str(error) or repr(error)
            fields["error_type"] = type(error).__name__
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                fields["exc_info"] = error
        self._logger.log(event.level, event.name, **fields)


def fingerprint(token: str) -> str:
    """Return ten hex digits that tell two device tokens apart and give neither away."""
    return hashlib.sha256(token.encode()).hexdigest()[:10]


class Scrubber:
    """Replaces every secret value in a log line: the last line of defence, for texts of libraries."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if isinstance(value, str):
                for secret in self._secrets:
                    if secret in value:
                        value = value.replace(secret, "****")
                        event[key] = value
        return event


# Libraries say each step of an outage; ours says the outage once (common/outage.py).
QUIET = {
    "aio_pika": logging.CRITICAL,
    "aiormq": logging.CRITICAL,
    "aioapns": logging.CRITICAL,
    "hpack": logging.ERROR,
}


def configure(level: str, form: str, secrets: Iterable[str] = ()) -> None:
    """Send structlog and the standard library's logging to standard error in one form.

    Args:
        level: debug, info, warning or error.
        form: json, console, or auto (console on a terminal).
        secrets: values that must never be printed.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    scrub = Scrubber(secrets)
    finish: list[Any] = (
        [scrub, structlog.dev.ConsoleRenderer()]
        if console
        else [structlog.processors.format_exc_info, scrub, structlog.processors.JSONRenderer(sort_keys=False)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(getattr(logging, level.upper()))
    for name, quiet in QUIET.items():
        logging.getLogger(name).setLevel(quiet)
