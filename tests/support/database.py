"""A migrated database of one test."""

from __future__ import annotations

import asyncio
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

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run one statement on a connection of its own; ``{schema}`` is the schema, arguments are ``$1`` …"""
        async with self.session() as connection:
            records: list[asyncpg.Record] = await connection.fetch(
                statement.replace("{schema}", self.schema), *arguments
            )
            return records

    async def fetchval(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row of :meth:`fetch`."""
        return (await self.fetch(statement, *arguments))[0][0]

    async def until(self, statement: str, *arguments: Any, timeout: float = 30.0) -> None:
        """Wait until a statement's first column is true.

        Raises:
            AssertionError: it was not in time; with the statement.
        """
        deadline = time.monotonic() + timeout
        async with self.session() as connection:
            while not await connection.fetchval(statement.replace("{schema}", self.schema), *arguments):
                assert time.monotonic() < deadline, f"not true within {timeout:g} s: {statement}"
                await asyncio.sleep(0.03)

    async def enqueue_events(self, count: int, *, key: str = "NULL", body: str = "'{}'") -> None:
        """Write events in one transaction; ``key`` and ``body`` are SQL over ``n`` from 1 to ``count``."""
        await self.fetch(
            f"""SELECT count({{schema}}.enqueue_event('order', n::text, 'order.placed', ({body})::jsonb,
                    ordering_key => {key})) FROM generate_series(1, $1::int) AS n""",
            count,
        )

    async def enqueue_deliveries(self, count: int, *, app: str = "shop", more: str = "") -> None:
        """Write deliveries to as many devices; ``more`` are further named arguments, SQL over ``n``."""
        await self.fetch(
            f"""SELECT count({{schema}}.enqueue_delivery('{app}', lpad(to_hex(n), 64, '0'),
                    '{{"aps": {{"alert": "hello"}}}}'::jsonb{", " + more if more else ""}))
                FROM generate_series(1, $1::int) AS n""",
            count,
        )

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
