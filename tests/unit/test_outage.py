"""Few lines for an outage: one when it begins, one a minute, one when it ends, and no more when it comes and goes."""

from __future__ import annotations

import logging

from structlog.testing import capture_logs

from common.logs import LogEvent, Logger
from common.outage import Outage

LOST, BACK = LogEvent("lost", logging.WARNING, "gone"), LogEvent("back", logging.INFO, "here again")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def outage() -> tuple[Outage, Clock]:
    clock = Clock()
    return Outage(Logger(), LOST, BACK, clock), clock


def test_an_outage_is_said_when_it_begins_once_a_minute_and_when_it_ends():
    it, clock = outage()
    with capture_logs() as logs:
        for _ in range(1440):
            it.failed(OSError("refused"))
            clock.now += 0.125
        it.worked()
        it.worked()
    assert [line["event"] for line in logs] == ["lost", "lost", "lost", "back"]
    assert [line["failures"] for line in logs] == [1, 481, 961, 1440]
    assert logs[-1]["seconds"] == 180.0


def test_a_new_kind_of_failure_is_said_at_most_every_five_seconds():
    it, clock = outage()
    with capture_logs() as logs:
        for n in range(100):
            it.failed(OSError("refused") if n % 2 else TimeoutError("silent"))
            clock.now += 0.125
    assert [line["failures"] for line in logs] == [1, 42, 83]


def test_a_dependency_that_comes_and_goes_ten_times_a_second_is_a_pair_of_lines_every_five_seconds():
    """Fifty terminated backends are not a hundred lines for each task that noticed."""
    it, clock = outage()
    with capture_logs() as logs:
        for _ in range(100):
            it.failed(OSError("reset"))
            it.worked()
            clock.now += 0.125
    assert [line["event"] for line in logs] == ["lost", "back"] * 3
    assert [line.get("unsaid") for line in logs if line["event"] == "lost"] == [None, 39, 39]


def test_an_outage_that_follows_another_one_at_once_and_lasts_is_said_all_the_same():
    it, clock = outage()
    with capture_logs() as logs:
        it.failed(OSError("reset"))
        it.worked()
        for _ in range(100):
            clock.now += 0.1
            it.failed(OSError("refused"))
        it.worked()
    assert [line["event"] for line in logs] == ["lost", "back", "lost", "back"]
