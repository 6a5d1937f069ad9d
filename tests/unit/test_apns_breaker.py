"""When a session may connect again: patiently after failures, at once after a good life, never in a burst."""

from __future__ import annotations

import pytest

from drain.apns.breaker import IDLE_LIFE, SHORT_LIFE, Breaker


def made() -> Breaker:
    """The longest waits that chance may bring."""
    return Breaker(base=1.0, cap=60.0, calm=60.0, uniform=lambda low, high: high)


def test_failures_wait_longer_and_longer_up_to_the_cap() -> None:
    breaker = made()
    waits = []
    for _ in range(9):
        breaker.failed(0.0)
        waits.append(breaker.ready_at)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert breaker.failures == 9


def test_chance_spreads_the_waits() -> None:
    breaker = Breaker(1.0, 60.0, 60.0, lambda low, high: low)
    breaker.failed(100.0)
    assert 100.0 < breaker.ready_at < 101.0


def test_a_good_answer_ends_the_waiting_for_the_next_connection() -> None:
    breaker = made()
    for _ in range(5):
        breaker.failed(0.0)
    breaker.proven()
    breaker.failed(100.0)
    assert breaker.ready_at == 101.0


@pytest.mark.parametrize(
    ("proven", "age", "abruptly", "wait"),
    [
        (True, 3600, False, 0),
        (True, 3600, True, 1),
        (True, SHORT_LIFE - 1, False, 1),
        (False, 1, False, 1),
        (False, IDLE_LIFE - 1, True, 1),
        (False, IDLE_LIFE + 1, False, 0),
        (False, IDLE_LIFE + 1, True, 1),
    ],
    ids=["gone for a reason", "lost", "short", "useless", "useless for long", "idle", "idle and lost"],
)
def test_the_wait_after_a_connection_depends_on_what_it_was_good_for(
    proven: bool, age: float, abruptly: bool, wait: float
) -> None:
    breaker = made()
    breaker.ended(100.0, proven=proven, age=age, abruptly=abruptly)
    assert breaker.ready_at == (100.0 + wait if wait else 0.0)


def test_connections_that_answer_and_die_at_once_do_not_slow_recovery_down_for_minutes() -> None:
    """aioapns#55: throughput is back within seconds after connections were dropped again and again."""
    breaker = made()
    for _ in range(20):
        breaker.proven()
        breaker.ended(0.0, proven=True, age=0.1, abruptly=True)
    assert breaker.ready_at == 8.0


def test_calm_is_kept_whatever_else_happens() -> None:
    breaker = made()
    breaker.calm(100.0)
    breaker.proven()
    breaker.failed(100.0)
    assert breaker.ready_at == 220.0
