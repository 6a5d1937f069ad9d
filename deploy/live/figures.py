"""The figures of one moment, from where each is known: database, broker, tap, simulator, daemons."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from common.schema import qualify
from deploy.live import sql
from deploy.live.role import Role
from deploy.live.stack import CONSUMER, SCHEMA, Stack
from deploy.local.supervise import Daemon

SCRAPE_TIMEOUT = 1.0
STATEMENT_TIMEOUT = "10s"
SHARE = 20
"""The look at the tables takes at most this part of the time, however many rows there are."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What stands in the database; ages in seconds, None: nothing waits."""

    written: int
    published: int
    quarantined: int
    outbox_age: float | None
    pending: int
    claimed: int
    sent: int
    failed: int
    expired: int
    superseded: int
    due_age: float | None
    orders: int
    notified: int
    accepted: int
    dead_tokens: int
    dead_home: int

    @property
    def unpublished(self) -> int:
        """Rows of the outbox that wait for relay."""
        return self.written - self.published - self.quarantined

    @property
    def open(self) -> int:
        """Deliveries that are not finished."""
        return self.pending + self.claimed


@dataclass(frozen=True, slots=True)
class Process:
    """One of our processes; ``pid`` None: it does not run. ``state`` is a word, or why it is not ready."""

    name: str
    pid: int | None
    port: int | None
    state: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One moment; ``at`` is monotonic time. ``problem`` says what could not be asked: then its figures are old."""

    at: float
    tables: Tables
    queue: int
    received: int
    received_again: int
    pushes: int
    delivered: int
    delivered_again: int
    stale: int
    processes: tuple[Process, ...]
    problem: str = ""


class Sampler:
    """Takes figures; keeps the last good ones of each source. One thread at a time."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._statement = qualify(sql.FIGURES, SCHEMA)
        self._connection: psycopg.Connection[Any] | None = None
        self._tables: Tables | None = None
        self._look_again = 0.0
        self._queue = 0
        self._stats: dict[str, Any] = {}
        self._stale: dict[int, float] = {}
        """Fenced writes by process id: those of a process that ended still count."""

    def take(self, *, fresh: bool = False) -> Figures:
        """Ask everybody. ``fresh``: the tables too, whatever it costs.

        Raises:
            psycopg.Error: the database never answered yet.
        """
        problems: list[str] = []
        try:
            tables = self._look(fresh)
        except psycopg.Error as error:
            self.close()
            if self._tables is None:
                raise
            tables = self._tables
            problems.append(f"the database does not answer: {str(error).splitlines()[0]}")
        try:
            self._queue = self._stack.queue_depth()
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(f"the broker does not answer: {error}")
        try:
            self._stats = self._stack.control.stats()
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(f"the simulator does not answer: {error}")
        processes = tuple(self._processes())
        return Figures(
            at=time.monotonic(),
            tables=tables,
            queue=self._queue,
            received=self._stack.tap.messages,
            received_again=self._stack.tap.repeated,
            pushes=self._stats.get("requests", 0),
            delivered=self._stats.get("delivered", 0),
            delivered_again=self._stats.get("repeated_deliveries", 0),
            stale=int(sum(self._stale.values())),
            processes=processes,
            problem="; ".join(problems),
        )

    def ids(self, statement: str, *arguments: object) -> list[str]:
        """The first column of a statement's rows."""
        return [row[0] for row in self.rows(statement, *arguments)]

    def rows(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Run one statement (parameters ``$1`` …) in a transaction that is rolled back; return its rows."""
        connection = self._open()
        with connection.transaction(force_rollback=True):
            cursor = psycopg.RawCursor(connection)
            return cursor.execute(qualify(statement, SCHEMA), list(arguments) or None).fetchall()

    def records(self, statement: str, *arguments: object) -> list[dict[str, Any]]:
        """:meth:`rows` by name of the column."""
        connection = self._open()
        with connection.transaction(force_rollback=True):
            cursor = psycopg.RawCursor(connection, row_factory=dict_row)
            return cursor.execute(qualify(statement, SCHEMA), list(arguments) or None).fetchall()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _open(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._stack.database_url,
                autocommit=True,
                connect_timeout=5,
                application_name="up",
                options=f"-c statement_timeout={STATEMENT_TIMEOUT}",
            )
        return self._connection

    def _look(self, fresh: bool) -> Tables:
        began = time.monotonic()
        if self._tables is None or fresh or began >= self._look_again:
            self._tables = Tables(**self.records(self._statement, CONSUMER)[0])
            ended = time.monotonic()
            self._look_again = ended + SHARE * (ended - began) - 0.5
        return self._tables

    def _processes(self) -> Iterator[Process]:
        stack = self._stack
        for role in stack.roles():
            if role in stack.relays or role in stack.drains:
                yield self._daemon(role)
            else:
                port = None
                if role is stack.simulator and role.started and role.daemon is not None:
                    port = int(role.daemon.wait_for("ready", 1.0)["port"])
                yield Process(role.name, _pid(role), port, _state(role), role.restarts)
        for name, server in (("postgresql", stack.postgres), ("rabbitmq", stack.rabbit)):
            yield Process(name, server.pid, server.port, "runs" if server.pid else "ENDED", 0)

    def _daemon(self, role: Role) -> Process:
        daemon = role.daemon
        if daemon is None or not role.started:
            return Process(role.name, _pid(role), role.port, _state(role), role.restarts)
        try:
            self.count_stale(daemon)
            status, body = daemon.get("/readyz", SCRAPE_TIMEOUT)
            state = "ready" if status == 200 else ", ".join(json.loads(body)["problems"].values())
        except (OSError, ValueError):
            state = "does not answer"
        return Process(role.name, daemon.pid, role.port, state, role.restarts)

    def count_stale(self, daemon: Daemon) -> None:
        """Remember a drain's fenced writes. Raises OSError when it does not answer."""
        if "drain" in daemon.name:
            self._stale[daemon.pid] = daemon.metrics().sum("drain_stale_outcomes_total")


def _pid(role: Role) -> int | None:
    return role.daemon.pid if role.alive and role.daemon is not None else None


def _state(role: Role) -> str:
    if role.daemon is None:
        return "not started"
    if role.alive:
        return "runs" if role.started else "starts"
    return f"ended (exit code {role.daemon.returncode})"
