"""Runs the migrations with Alembic; needs the ``migrate`` extra, which the daemons do without.

The revisions are plain SQL files in ``migrations/sql``; ``{schema}`` in them is the quoted schema name and
``{channel}`` the quoted name of the wake-up's channel.
"""

from __future__ import annotations

import io
from pathlib import Path

from alembic import command, context, op
from alembic.config import Config

from common.schema import quote_identifier, quote_literal, wakeup_channel

HERE = Path(__file__).parent


def config(database_url: str, schema: str, output: io.StringIO | None = None) -> Config:
    """Build Alembic's configuration without an ini file."""
    cfg = Config(output_buffer=output) if output is not None else Config()
    cfg.set_main_option("script_location", str(HERE).replace("%", "%%"))
    cfg.attributes["database_url"] = database_url
    cfg.attributes["schema"] = schema
    return cfg


def render(name: str, schema: str) -> str:
    """Return the SQL of one file of ``migrations/sql`` for one schema."""
    text = (HERE / "sql" / name).read_text(encoding="utf-8")
    return text.format(schema=quote_identifier(schema), channel=quote_literal(wakeup_channel(schema)))


def execute_sql(name: str) -> None:
    """Execute (or, offline, print) one file of ``migrations/sql`` in the schema of the run."""
    script = render(name, context.config.attributes["schema"])
    if context.is_offline_mode():
        op.execute(script.replace(":", "\\:"))
        return
    # Straight to the driver, without parameters: only then does the server take many statements at once.
    cursor = op.get_bind().connection.cursor()
    cursor.execute(script)
    cursor.close()


def upgrade(database_url: str, schema: str, revision: str = "head") -> None:
    """Bring the schema to ``revision``; does nothing when it is there already."""
    command.upgrade(config(database_url, schema), revision)


def downgrade(database_url: str, schema: str, revision: str) -> None:
    """Take the schema back to ``revision``; rows of dropped tables are gone."""
    command.downgrade(config(database_url, schema), revision)


def upgrade_sql(schema: str, revisions: str = "head") -> str:
    """Return the SQL that an upgrade runs (``from:to`` or ``to``), for a DBA to read and to run."""
    buffer = io.StringIO()
    command.upgrade(config("", schema, buffer), revisions, sql=True)
    return buffer.getvalue()
