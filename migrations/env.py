"""Alembic's environment: one schema, one transaction, one migration at a time."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from common.schema import quote_identifier

# Several migration jobs may start at once (a rollout, a retry): one at a time, the others find nothing to do.
ADVISORY_LOCK = 7_236_114_905

cfg = context.config
schema: str = cfg.attributes["schema"]
create_schema = f"CREATE SCHEMA IF NOT EXISTS {quote_identifier(schema)}"


def run_offline() -> None:
    """Print the SQL instead of running it."""
    context.configure(
        dialect_name="postgresql", literal_binds=True, version_table_schema=schema, transactional_ddl=True
    )
    with context.begin_transaction():
        context.execute(create_schema)
        context.run_migrations()


def run_online() -> None:
    """Connect and migrate in one transaction: all of it, or nothing."""
    url = make_url(cfg.attributes["database_url"]).set(drivername="postgresql+psycopg")
    engine = create_engine(url, poolclass=NullPool, connect_args={"application_name": "relay-drain-migrate"})
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
        connection.execute(text(create_schema))
        context.configure(connection=connection, version_table_schema=schema)
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
