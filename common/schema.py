"""The database schema as both daemons see it: its name in statements, and whether its version fits.

The version is Alembic's: one row in ``<schema>.alembic_version`` with a four-digit revision such as ``0001``.
A daemon needs its own revision or the next one, so that a migration can run before the rollout that needs it;
two steps ahead it refuses, since it can not know what changed.
"""

from __future__ import annotations

import re

import asyncpg

from common.errors import SchemaMismatch

REQUIRED_REVISION = "0001"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")


def check_identifier(name: str) -> str:
    """Return ``name`` when it can be a schema's name.

    Raises:
        ValueError: naming the value and the rule; 48 characters leave room for the channel's suffix
            within PostgreSQL's 63 bytes.
    """
    if _IDENTIFIER.fullmatch(name) is None:
        raise ValueError(
            f"schema name {name!r} must be 1 to 48 letters, digits and underscores, no digit first"
        )
    return name


def quote_identifier(name: str) -> str:
    """Quote an identifier for SQL text."""
    return '"' + check_identifier(name) + '"'


def quote_literal(text: str) -> str:
    """Quote a string literal for SQL text (only for names that went through :func:`check_identifier`)."""
    return "'" + text.replace("'", "''") + "'"


def qualify(statement: str, schema: str) -> str:
    """Put the schema's quoted name in place of every ``{schema}`` of a statement."""
    return statement.replace("{schema}", quote_identifier(schema))


def wakeup_channel(schema: str) -> str:
    """Name of the one NOTIFY channel of a schema's outbox."""
    return check_identifier(schema) + "_outbox"


def check_revision(found: str | None, schema: str, required: str = REQUIRED_REVISION) -> None:
    """Accept the required revision and the one after it.

    Raises:
        SchemaMismatch: missing, too old, or more than one step newer; the message has the command that mends it.
    """
    if found is None:
        raise SchemaMismatch(
            f"schema {schema!r} has no Relay & Drain tables; create them with: "
            f"DATABASE_SCHEMA={schema} python -m migrations upgrade"
        )
    if int(found) < int(required):
        raise SchemaMismatch(
            f"schema {schema!r} is at revision {found}, this program needs {required}; bring it up with: "
            f"DATABASE_SCHEMA={schema} python -m migrations upgrade"
        )
    if int(found) > int(required) + 1:
        raise SchemaMismatch(
            f"schema {schema!r} is at revision {found}, this program knows {required} and accepts one step more; "
            f"install the release that belongs to {found}"
        )


async def read_revision(connection: asyncpg.Connection, schema: str) -> str | None:
    """Return the revision of the schema, or None when there is none."""
    try:
        revision: str | None = await connection.fetchval(
            qualify("SELECT version_num FROM {schema}.alembic_version", schema)
        )
    except asyncpg.UndefinedTableError:
        return None
    except asyncpg.InvalidSchemaNameError:
        return None
    return revision
