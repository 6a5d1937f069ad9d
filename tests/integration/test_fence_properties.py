"""Whatever two drains do in whatever order: one terminal outcome for a row, a fencing token that never falls.

A state machine plays claim, push, settle, release, expire and crash with the real statements against the real
database, beside a model of a few lines. Times are moved in the database; nothing sleeps.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.schema import qualify
from drain import sql
from drain.claim import BEGINNING
from drain.decide import before_push, ended, released
from drain.model import Delivery, Settlement
from drain.settle import columns

SCHEMA = "relay_drain"
CLAIM, SETTLE = qualify(sql.CLAIM, SCHEMA), qualify(sql.SETTLE, SCHEMA)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "claim", "settle", "settle", "expire", "crash"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 11),
    ),
    min_size=25,
    max_size=50,
)
MAX_ATTEMPTS = 4
TERMINAL = {"sent", "failed", "expired", "superseded"}


@dataclass
class Row:
    """The model of one row."""

    status: str = "pending"
    version: int = 0
    attempts: int = 0
    pushes: int = 0
    due: bool = True


@dataclass
class Worker:
    """What one drain believes to hold: every claim that it has not settled, outlived ones too."""

    held: list[Delivery] = field(default_factory=list)


class Ledger:
    """The state machine: a worker, a step, and a number that chooses among what the step can be done to."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.connection: asyncpg.Connection = self.run(
            asyncpg.connect(url, server_settings={"application_name": "test"})
        )
        self.run(self.connection.execute(f"TRUNCATE {SCHEMA}.notification_deliveries RESTART IDENTITY"))
        self.rows: dict[int, Row] = {}
        self.workers = {"a": Worker(), "b": Worker()}
        self.versions: dict[int, int] = {}
        self.stale = 0

    def run(self, work):
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.connection.close())
        self.loop.close()

    def play(self, steps) -> None:
        self.enqueue("a", 1)
        for step, worker, number in steps:
            getattr(self, step)(worker, number)
            self.the_database_is_as_the_model()

    def enqueue(self, _: str, number: int) -> None:
        if all(row.status in TERMINAL for row in self.rows.values()):
            for _ in range(number % 3 + 1):
                row_id = self.run(
                    self.connection.fetchval(
                        f"SELECT {SCHEMA}.enqueue_delivery('shop', 'abcd', '{{}}'::jsonb)"
                    )
                )
                self.rows[row_id] = Row()

    def claim(self, worker: str, number: int) -> None:
        limit = number % 3 + 1
        records = self.run(self.connection.fetch(CLAIM, ["shop"], [limit], [BEGINNING], 120.0, worker))
        expected = {row_id for row_id, row in self.rows.items() if row.due and row.status not in TERMINAL}
        deliveries = [Delivery(*record) for record in records]
        assert len(deliveries) == min(limit, len(expected))
        for delivery in deliveries:
            assert delivery.id in expected
            row = self.rows[delivery.id]
            assert delivery.reclaimed == (row.status == "claimed")
            row.status, row.due = "claimed", False
            row.version += 1
            row.attempts += 1
            assert (delivery.claim_version, delivery.attempts) == (row.version, row.attempts)
            self.workers[worker].held.append(delivery)
            dead = before_push(delivery, max_attempts=MAX_ATTEMPTS, superseded=False, sibling_in_flight=False)
            if dead is not None:
                assert row.attempts > MAX_ATTEMPTS
                self.settle_as(worker, dead)

    def settle(self, worker: str, number: int) -> None:
        """Push the oldest held row and write one of the outcomes; or give it back."""
        held = self.workers[worker].held
        if not held:
            return
        delivery = held[0]
        outcomes = [
            Settlement(delivery, "sent", "sent", "none"),
            ended(delivery, "failed", "BadPath"),
            Settlement(delivery, "pending", "retry", "server", delay=0.0),
            released(delivery, "test"),
        ]
        self.settle_as(worker, outcomes[number % 4])

    def expire(self, _: str, number: int) -> None:
        """The lease of a row runs out."""
        leased = sorted(
            row_id for row_id, row in self.rows.items() if row.status == "claimed" and not row.due
        )
        if leased:
            row_id = leased[number % len(leased)]
            self.run(
                self.connection.execute(
                    f"UPDATE {SCHEMA}.notification_deliveries SET next_attempt_at = now() WHERE id = $1",
                    row_id,
                )
            )
            self.rows[row_id].due = True

    def crash(self, worker: str, number: int) -> None:
        if number == 0:
            self.workers[worker].held.clear()

    def settle_as(self, worker: str, settlement: Settlement) -> None:
        delivery = settlement.delivery
        written = self.run(self.connection.fetch(SETTLE, *columns([settlement])))
        self.workers[worker].held.remove(delivery)
        row = self.rows[delivery.id]
        mine = row.status == "claimed" and row.version == delivery.claim_version
        assert bool(written) == mine, "a write matched without its fencing token, or failed with it"
        if not mine:
            self.stale += 1
            return
        row.status = settlement.status
        row.due = settlement.status == "pending"
        row.attempts -= settlement.give_back

    def the_database_is_as_the_model(self) -> None:
        records = self.run(
            self.connection.fetch(
                f"""SELECT id, status, claim_version, attempts, finished_at IS NOT NULL AS finished
                    FROM {SCHEMA}.notification_deliveries"""
            )
        )
        assert len(records) == len(self.rows), "a row was lost"
        for record in records:
            row = self.rows[record["id"]]
            assert (record["status"], record["claim_version"], record["attempts"]) == (
                row.status,
                row.version,
                row.attempts,
            )
            assert record["finished"] == (row.status in TERMINAL)
            assert record["claim_version"] >= self.versions.get(record["id"], 0), "the fencing token fell"
            assert 0 <= record["attempts"] <= MAX_ATTEMPTS + 1
            self.versions[record["id"]] = record["claim_version"]


def play_many(url: str, examples: int = 40) -> int:
    """Play random sequences; return how many writes came too late."""
    stale = 0

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # shrinking a failure against a database takes minutes
        report_multiple_bugs=False,
    )
    @given(STEPS)
    def play(steps) -> None:
        nonlocal stale
        ledger = Ledger(url)
        try:
            ledger.play(steps)
        finally:
            stale += ledger.stale
            ledger.close()

    play()
    return stale


def test_every_write_about_a_claimed_row_is_fenced(database):
    assert play_many(database.url) > 20, "the sequences hardly ever meet a fence: they prove nothing"


def test_the_machine_sees_a_settle_without_its_fence(database, monkeypatch):
    """The property test itself is tested: without claim_version in the WHERE it must fail."""
    unfenced = SETTLE.replace("AND o.claim_version = d.claim_version", "").replace(
        "AND d.claim_version = o.claim_version", ""
    )
    monkeypatch.setitem(globals(), "SETTLE", unfenced)
    with pytest.raises(AssertionError, match=r"fencing token"):
        play_many(database.url)
