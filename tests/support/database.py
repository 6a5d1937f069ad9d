"""A migrated database of one test."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
from psycopg.rows import dict_row

from deploy.local.databases import ADMIN_NAME, PostgresAdmin

SCHEMA = "relay_drain"
TEST_NAME = "test"
"""application_name of a test's own connections."""


@dataclass(frozen=True, slots=True)
class Database:
    """``await database.connect()`` for asyncpg, ``database.run(…)`` for a synchronous statement."""

    name: str
    admin: PostgresAdmin
    schema: str = SCHEMA

    @property
    def url(self) -> str:
        """URL over TCP, as the superuser."""
        return self.admin.url_of(self.name)

    def through(self, port: int) -> str:
        """The same by way of a proxy on this port."""
        return self.admin.url_of(self.name, port)

    async def connect(self, **settings: str) -> asyncpg.Connection:
        """Open a connection; the caller closes it. ``settings`` are set in the session (search_path, …)."""
        return await asyncpg.connect(
            self.url, server_settings={"application_name": TEST_NAME, **settings}, timeout=10
        )

    @contextlib.asynccontextmanager
    async def session(self, **settings: str) -> AsyncIterator[asyncpg.Connection]:
        """:meth:`connect` as a context manager that closes."""
        connection = await self.connect(**settings)
        try:
            yield connection
        finally:
            await connection.close(timeout=10)

    def pool(self, size: int = 4, **settings: str) -> asyncpg.Pool:
        """``async with database.pool() as pool`` (or ``await``, then close)."""
        return asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=size,
            server_settings={"application_name": TEST_NAME, **settings},
        )

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Run and commit one statement (parameters: ``%s``), blocking; return its rows."""
        with psycopg.connect(
            self.url, autocommit=True, row_factory=dict_row, application_name=TEST_NAME
        ) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description is not None else []

    def value(self, statement: str, parameters: Sequence[Any] | None = None) -> Any:
        """The first column of the first row of :meth:`run`."""
        return next(iter(self.run(statement, parameters)[0].values()))

    def sessions(self, application_name: str | None = None) -> list[dict[str, Any]]:
        """Backends in this database other than the administration's: pid, application_name, state, query."""
        found = [row for row in self.admin.sessions(self.name) if row["application_name"] != ADMIN_NAME]
        return [row for row in found if application_name in (None, row["application_name"])]

    def terminate_sessions(self) -> int:
        """End every session in this database, as a failover does; return how many."""
        return self.admin.terminate(self.name)


@contextlib.contextmanager
def fresh_database(admin: PostgresAdmin, template: str) -> Iterator[Database]:
    """Clone the template, drop the clone in the end."""
    database = Database(f"test_{secrets.token_hex(6)}", admin)
    admin.clone(template, database.name)
    try:
        yield database
    finally:
        admin.drop(database.name)


def assert_no_session_left(database: Database, patience: float = 3.0) -> None:
    """Fail when a connection outlives its owner. A backend notices the end of its client a moment later."""
    deadline = time.monotonic() + patience
    while left := database.sessions():
        if time.monotonic() >= deadline:
            raise AssertionError(f"sessions left in the test's database: {left}")
        time.sleep(0.02)
