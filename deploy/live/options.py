"""The command line of ``./deploy/up``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DRILLS = ("relay-crash", "drain-crash", "zombie")


@dataclass(frozen=True, slots=True)
class Options:
    """What one run is told. ``seconds`` is None until Ctrl-C, ``rate`` in orders per second."""

    seconds: float | None
    rate: float
    relays: int
    drains: int
    drills: tuple[str, ...]
    keep: bool
    fresh: bool
    postgres_bin: Path | None


def parser() -> argparse.ArgumentParser:
    """The options; the head of the script ``deploy/up`` lists the same."""
    top = argparse.ArgumentParser(
        prog="./deploy/up",
        description="Run the whole chain on this machine: a shop, relay, drain, and servers of its own.",
    )
    top.add_argument(
        "--seconds", type=_number(1, 86_400, "seconds"), help="stop after so long; else at Ctrl-C"
    )
    top.add_argument(
        "--rate", type=_number(0.1, 1000, "orders per second"), default=20.0, help="orders per second (20)"
    )
    top.add_argument("--relays", type=_count(1, 8, "relays"), default=1, help="relay processes (1)")
    top.add_argument("--drains", type=_count(1, 8, "drains"), default=1, help="drain processes (1)")
    top.add_argument(
        "--drill",
        action="append",
        choices=[*DRILLS, "all"],
        default=[],
        help="play a trace on the running chain and check its figures; may be repeated",
    )
    top.add_argument("--keep", action="store_true", help="keep the data for the next --keep")
    top.add_argument("--fresh", action="store_true", help="with --keep: throw away what was kept")
    top.add_argument("--postgres-bin", metavar="DIR", type=Path, help="folder bin of a PostgreSQL 13 to 18")
    return top


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a bad value ends the program with code 2, naming the value and its bound."""
    top = parser()
    given = top.parse_args(arguments)
    if given.drill and given.seconds is not None:
        top.error("--seconds and --drill exclude each other: a drill ends when it has been played")
    drills = DRILLS if "all" in given.drill else tuple(dict.fromkeys(given.drill))
    folder = given.postgres_bin
    if folder is not None:
        folder = folder.expanduser().absolute()
        for program in ("postgres", "initdb"):
            if not (folder / program).is_file():
                top.error(f"argument --postgres-bin: {folder} holds no program {program}")
    return Options(
        given.seconds, given.rate, given.relays, given.drains, drills, given.keep, given.fresh, folder
    )


def _number(low: float, high: float, unit: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {unit}") from None
        if not low <= value <= high:  # false for nan too
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g} {unit}")
        return value

    return read


def _count(low: int, high: int, unit: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of {unit}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high} {unit}")
        return value

    return read
