"""Texts of the command lines, without I/O: tables, ages, counts, times given by an operator."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBER = re.compile(r"(?<![\w.])(?:\d{1,2}|\d{4,})(?![\w.])")  # three digits are a reply code of AMQP


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = (), width: int | None = None
) -> list[str]:
    """Align columns; those named in ``right`` to the right. The last column is cut so that lines fit ``width``."""
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if width is not None:
        room = max(20, width - sum(widths[:-1]) - 2 * (len(head) - 1))
        for line in lines:
            line[-1] = cut(line[-1], room)
    return [
        "  ".join(
            cell.rjust(size) if name in right else cell.ljust(size)
            for name, cell, size in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def printable(text: str) -> str:
    """Take out what would break a line of a terminal or command it: line ends, escapes, other controls."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def cut(text: str, room: int) -> str:
    """Shorten a text, and show that it was."""
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def number(value: int) -> str:
    """Write a whole number with thin groups: 12 345."""
    return f"{value:,}".replace(",", " ")


def capped(value: int, cap: int) -> str:
    """Write a count that stopped at ``cap``."""
    return f"{cap}+" if value >= cap else str(value)


def rows(count: int) -> str:
    """Write a number of rows."""
    return "1 row" if count == 1 else f"{number(count)} rows"


def age(seconds: float | None) -> str:
    """Write an age in its two largest units; ``-`` for none."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{whole} s"
    for name, size, below, unit in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // unit
            return f"{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def utc(at: datetime | None) -> str:
    """Write a time in UTC to the second; ``-`` for none."""
    return "-" if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def error_class(error: str | None) -> str:
    """Reduce an error to its kind: names and numbers of one row are taken out, reply codes stay."""
    return _NUMBER.sub("N", _QUOTED.sub("'…'", error or "no error given"))


def duration(text: str) -> timedelta:
    """Read ``90s``, ``30m``, ``2h``, ``7d``, ``2w`` (a type for argparse)."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 30m, 2h, 7d or 2w")
    try:
        return timedelta(seconds=float(match[1]) * _UNITS[match[2]])
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} is too long a duration") from None


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as an operator gives it: fixed, or so long before now by the database's clock."""

    at: datetime | None
    ago: timedelta | None

    def resolve(self, now: datetime) -> datetime:
        """Return the time; ``now`` is the database's."""
        if self.at is not None:
            return self.at
        try:
            return now - (self.ago or timedelta())
        except OverflowError:
            return datetime.min.replace(tzinfo=UTC)


def moment(text: str) -> Moment:
    """Read ISO 8601 (UTC unless it names an offset) or a duration before now (a type for argparse)."""
    if _DURATION.fullmatch(text.strip()):
        return Moment(None, duration(text))
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time such as 2026-01-31T12:00Z nor a duration such as 2h before now"
        ) from None
    return Moment(at if at.tzinfo is not None else at.replace(tzinfo=UTC), None)


def positive(text: str) -> int:
    """Read a whole number from 1 (a type for argparse)."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 0 < value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value


def seconds(text: str) -> float:
    """Read an interval in seconds, a twentieth at least (a type for argparse)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 86400")
    return value


def row_id(text: str) -> int:
    """Read a row's id (a type for argparse)."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a row id")
    return int(text)
