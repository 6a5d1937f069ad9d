"""Roles of least privilege: their names, and ``migrations/sql/roles.sql`` for one schema."""

from __future__ import annotations

from pathlib import Path

from common.schema import check_identifier, quote_identifier, quote_literal

ROLES = ("relay", "drain", "observer", "producer", "consumer")
SQL = Path(__file__).parent / "sql" / "roles.sql"


def role_name(schema: str, role: str) -> str:
    """Name of a role: roles belong to the whole server, so it bears the schema's name."""
    return f"{check_identifier(schema)}_{role}"


def roles_sql(schema: str) -> str:
    """Return the statements that make the roles of one schema and grant exactly what each needs."""
    names = {role: role_name(schema, role) for role in ROLES}
    return SQL.read_text(encoding="utf-8").format(
        schema=quote_identifier(schema),
        **{role: '"' + name + '"' for role, name in names.items()},
        **{f"{role}_name": quote_literal(name) for role, name in names.items()},
    )


def apply_roles(database_url: str, schema: str) -> None:
    """Make the roles and grant, all in one transaction.

    Raises:
        psycopg.Error: no privilege, or the schema is not there.
    """
    import psycopg

    with psycopg.connect(database_url) as connection:
        connection.execute(roles_sql(schema))
