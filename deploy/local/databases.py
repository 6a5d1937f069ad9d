"""Administration of a private PostgreSQL: databases made from a template, settings changed while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal

SUPERUSER = "postgres"
ADMIN_NAME = "deploy.local"
"""application_name of the connections made here."""


@dataclass(frozen=True, slots=True)
class PostgresAdmin:
    """The address of a private server; each method opens a connection of its own and raises psycopg.Error."""

    port: int
    version: int
    host: str = "127.0.0.1"

    def url_of(self, database: str, port: int | None = None) -> str:
        """URL of a database, over TCP, as the superuser; ``port`` of a proxy in between."""
        return f"postgresql://{SUPERUSER}@{self.host}:{port or self.port}/{quote(database, safe='')}"

    def run(
        self, statement: str, parameters: Sequence[Any] | None = None, database: str = "postgres"
    ) -> list[Any]:
        """Run one statement (parameters: ``%s``) outside a transaction; return its rows, empty when it has none."""
        with self._connect(database) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description is not None else []

    def create(self, database: str) -> str:
        """Create an empty database, return its URL."""
        self._execute(SQL("CREATE DATABASE {}").format(Identifier(database)))
        return self.url_of(database)

    def clone(self, template: str, database: str) -> str:
        """Create a database as a copy of another one that nobody is connected to; return its URL."""
        statement = SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(database), Identifier(template))
        if self.version >= 15:
            statement += SQL(
                " STRATEGY file_copy"
            )  # as before 15: half the time of wal_log when fsync is off
        self._execute(statement)
        return self.url_of(database)

    def drop(self, database: str) -> None:
        """Drop a database, ending the sessions in it."""
        self._execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(database)))

    def exists(self, database: str) -> bool:
        """Whether there is such a database."""
        return bool(self.run("SELECT 1 FROM pg_database WHERE datname = %s", [database]))

    def sessions(self, database: str) -> list[dict[str, Any]]:
        """Backends of clients in a database: pid, application_name, state, query."""
        rows = self.run(
            "SELECT pid, application_name, state, left(query, 100) FROM pg_stat_activity "
            "WHERE datname = %s AND backend_type = 'client backend' ORDER BY pid",
            [database],
        )
        return [dict(zip(("pid", "application_name", "state", "query"), row, strict=True)) for row in rows]

    def terminate(self, database: str) -> int:
        """End every session in a database, as a failover does; return how many."""
        return len(
            self.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database])
        )

    def configure(self, **settings: str) -> None:
        """ALTER SYSTEM and reload, for settings that need no restart; holds for the whole server."""
        with self._connect("postgres") as connection:
            for name, value in settings.items():
                connection.execute(SQL("ALTER SYSTEM SET {} = {}").format(Identifier(name), Literal(value)))
            connection.execute("SELECT pg_reload_conf()")

    def set_read_only(self, database: str, read_only: bool) -> None:
        """Refuse writes in new sessions of a database (SQLSTATE 25006), as a standby does."""
        value = "on" if read_only else "off"
        self._execute(
            SQL("ALTER DATABASE {} SET default_transaction_read_only = {}").format(
                Identifier(database), Literal(value)
            )
        )

    def _execute(self, statement: Composed) -> None:
        with self._connect("postgres") as connection:
            connection.execute(statement)

    def _connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self.url_of(database), autocommit=True, connect_timeout=10, application_name=ADMIN_NAME
        )
