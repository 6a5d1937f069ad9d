"""Marks: what a batch's verdicts write on its rows, in the claim's transaction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import asyncpg

from common.schema import qualify
from relay import sql
from relay.model import Failed, Left, Nacked, OutboxRow, Published, Rejected, Unroutable, Verdict

MAX_ERROR = 500
"""Characters of ``last_error``; a broker's text can be long."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delays in seconds and the number of attempts of a row that fails by its own fault."""

    max_attempts: int
    base: float
    cap: float
    nack_delay: float
    uniform: Callable[[float, float], float] = random.uniform

    def delay(self, attempts: int) -> float:
        """Return the wait after the ``attempts``-th failure: exponential, jittered by half, capped."""
        step = min(self.cap, self.base * 2.0 ** min(attempts - 1, 30))
        return self.uniform(step / 2, step)


@dataclass(frozen=True, slots=True)
class Failure:
    """What is written on one row that was not published."""

    row: OutboxRow
    burnt: int
    delay: float
    error: str
    quarantine: bool


@dataclass(slots=True)
class Marks:
    """The writes of one batch, and how often each verdict came."""

    published: list[OutboxRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    left: list[tuple[OutboxRow, str]] = field(default_factory=list)
    deferred: list[Failure] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)

    def defer(self, policy: RetryPolicy) -> None:
        """Put off the rows that a silent queue left, at different lengths; no attempt is burnt.

        For retried rows only: they are claimed by time, and the same ones would come first for ever.
        """
        self.deferred = [
            Failure(row, 0, policy.uniform(0.5, 1.5) * policy.nack_delay, why, quarantine=False)
            for row, why in self.left
        ]


def decide(rows: Sequence[OutboxRow], verdicts: Sequence[Verdict], policy: RetryPolicy) -> Marks:
    """Turn verdicts into writes. Pure: no I/O, no clock."""
    marks = Marks()
    for row, verdict in zip(rows, verdicts, strict=True):
        marks.verdicts[type(verdict).__name__.lower()] += 1
        match verdict:
            case Published():
                marks.published.append(row)
            case Left(why):
                marks.left.append((row, why))
            case Nacked(error):
                marks.failures.append(Failure(row, 0, policy.nack_delay, error, quarantine=False))
            case Rejected(error):
                marks.failures.append(Failure(row, 1, 0.0, error, quarantine=True))
            case Unroutable(error) | Failed(error):
                attempts = row.attempts + 1
                last = attempts >= policy.max_attempts
                marks.failures.append(Failure(row, 1, policy.delay(attempts), error, quarantine=last))
            case _:
                assert_never(verdict)
    return marks


class Marker:
    """Writes the marks of one lane."""

    def __init__(self, schema: str) -> None:
        self._published = qualify(sql.MARK_PUBLISHED, schema)
        self._failed = qualify(sql.MARK_FAILED, schema)

    async def write(self, connection: asyncpg.Connection, marks: Marks) -> None:
        """Write within the transaction that holds the rows' locks."""
        if marks.published:
            await connection.execute(self._published, [row.id for row in marks.published])
        if marks.failures or marks.deferred:
            failures = sorted([*marks.failures, *marks.deferred], key=lambda failure: failure.row.id)
            await connection.execute(
                self._failed,
                [failure.row.id for failure in failures],
                [failure.burnt for failure in failures],
                [failure.delay for failure in failures],
                [storable(failure.error) for failure in failures],
                [failure.quarantine for failure in failures],
            )


def storable(text: str) -> str:
    """Shorten a text and take out what PostgreSQL's text type refuses (NUL, lone surrogates)."""
    return text.replace("\x00", "\\0").encode("utf-8", "replace").decode()[:MAX_ERROR]
