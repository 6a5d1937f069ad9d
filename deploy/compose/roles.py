"""``python -m deploy.compose.roles DIRECTORY``: the demo's logins, each a member of roles of least privilege.

DIRECTORY has ``database_url`` of the owner and ``<login>_password`` of each login, as ``deploy.compose.passwords`` made
them. May be run as often as wanted; it also sets the passwords, so a database that is older than them is no trouble.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import psycopg
from psycopg import sql

from migrations.roles import apply_roles, role_name

LOGINS = {
    "relay": ["relay"],
    "drain": ["drain"],
    "observer": ["observer"],
    "shop": ["producer", "consumer"],
}


def make_logins(database_url: str, schema: str, passwords: dict[str, str]) -> None:
    """Create or alter each login; the server is sent a SCRAM verifier, not the password."""
    with psycopg.connect(database_url) as connection:
        for login, roles in LOGINS.items():
            name = sql.Identifier(login)
            verifier = connection.pgconn.encrypt_password(
                passwords[login].encode(), login.encode(), b"scram-sha-256"
            ).decode()
            exists = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (login,)).rowcount
            verb = sql.SQL("ALTER" if exists else "CREATE")
            connection.execute(
                sql.SQL("{} ROLE {} LOGIN PASSWORD {}").format(verb, name, sql.Literal(verifier))
            )
            for role in roles:
                group = sql.Identifier(role_name(schema, role))
                connection.execute(sql.SQL("GRANT {} TO {}").format(group, name))
        # The autoscaler asks every half minute; it must never be what slows the queue down.
        connection.execute("ALTER ROLE observer SET statement_timeout = '2s'")
        # The shop brings its own schema.
        connection.execute(
            sql.SQL("GRANT CREATE ON DATABASE {} TO shop").format(sql.Identifier(connection.info.dbname))
        )


def main(arguments: list[str] | None = None) -> int:
    """Read the folder, make roles and logins."""
    parser = argparse.ArgumentParser(prog="python -m deploy.compose.roles")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    schema = os.environ.get("DATABASE_SCHEMA") or "relay_drain"
    database_url = (directory / "database_url").read_text(encoding="utf-8").strip()
    passwords = {login: (directory / f"{login}_password").read_text("utf-8").strip() for login in LOGINS}
    apply_roles(database_url, schema)
    make_logins(database_url, schema, passwords)
    print("logins: " + ", ".join(LOGINS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
