"""``python -m migrations``: the schema's versions, from the command line.

Environment: ``DATABASE_URL`` (a role that may create the schema; ``DATABASE_URL_FILE`` and a file ``database_url``
in ``SECRETS_DIR`` work too) and ``DATABASE_SCHEMA`` (default relay_drain).
Exit codes: 0 done, 1 the database refused, 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys

from common.errors import ConfigurationError
from common.schema import check_identifier, quote_identifier
from common.settings import SharedSettings, load
from migrations.roles import ROLES, apply_roles, role_name, roles_sql


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="relay-drain-migrate", description=(__doc__ or "").split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("upgrade", help="bring the schema to a revision")
    up.add_argument("revision", nargs="?", default="head")
    down = commands.add_parser("downgrade", help="take the schema back; rows of dropped tables are gone")
    down.add_argument("revision", help="a revision, -1, or base")
    down.add_argument("--yes", action="store_true", help="do not ask")
    script = commands.add_parser("sql", help="print the SQL of an upgrade for a DBA, touching nothing")
    script.add_argument("revisions", nargs="?", default="head", help="TO or FROM:TO")
    commands.add_parser("current", help="print the schema's revision and what this program needs")
    roles = commands.add_parser("roles", help="print the SQL that makes the roles of least privilege")
    roles.add_argument("--apply", action="store_true", help="run it; again after every migration")
    wakeup = commands.add_parser("wakeup", help="make or drop the trigger that wakes idle relays")
    wakeup.add_argument("state", choices=["enable", "disable"])
    return top


def set_wakeup(database_url: str, schema: str, enable: bool) -> None:
    """Create or drop the statement-level trigger on the outbox."""
    import psycopg

    quoted = quote_identifier(schema)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"DROP TRIGGER IF EXISTS outbox_wakeup ON {quoted}.outbox")
        if enable:
            connection.execute(
                f"CREATE TRIGGER outbox_wakeup AFTER INSERT ON {quoted}.outbox "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {quoted}.outbox_wakeup()"
            )


def current(database_url: str, schema: str) -> str | None:
    """Return the schema's revision, or None."""
    import psycopg

    with psycopg.connect(database_url) as connection:
        found = connection.execute(
            "SELECT to_regclass(%s)", (f"{quote_identifier(schema)}.alembic_version",)
        ).fetchone()
        if found is None or found[0] is None:
            return None
        row = connection.execute(
            f"SELECT version_num FROM {quote_identifier(schema)}.alembic_version"
        ).fetchone()
        return None if row is None else str(row[0])


def main(argv: list[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    schema = os.environ.get("DATABASE_SCHEMA") or "relay_drain"
    try:
        check_identifier(schema)
    except ValueError as error:
        print(f"DATABASE_SCHEMA: {error}", file=sys.stderr)
        return 2
    try:
        from migrations import run
    except ImportError as error:
        hint = "install the migration tool with: pip install 'relay-drain[migrate]'"
        print(f"{error}; {hint}", file=sys.stderr)
        return 2
    if arguments.command == "sql":
        print(run.upgrade_sql(schema, arguments.revisions))
        return 0
    if arguments.command == "roles" and not arguments.apply:
        print(roles_sql(schema))
        return 0
    try:
        database_url = owner_url()
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return execute(arguments, database_url, schema)


def owner_url() -> str:
    """The database, from the same sources as the daemons' (a secret file too), but never by default.

    Raises:
        ConfigurationError: none is given, or it can not be read.
    """
    settings = load(SharedSettings)
    if "database_url" not in SharedSettings._sources:
        raise ConfigurationError("DATABASE_URL is not set; e.g. postgresql://owner:secret@localhost/app")
    return settings.database_url.get_secret_value()


def execute(arguments: argparse.Namespace, database_url: str, schema: str) -> int:
    """Run one command that needs the database."""
    import psycopg
    import sqlalchemy.exc

    from common.schema import REQUIRED_REVISION
    from migrations import run

    try:
        match arguments.command:
            case "upgrade":
                run.upgrade(database_url, schema, arguments.revision)
                print(f"schema {schema} is at revision {current(database_url, schema)}")
            case "downgrade":
                print(f"takes schema {schema} back to {arguments.revision}: rows of dropped tables are gone")
                if not arguments.yes and input("go on? [y/N] ").strip().lower() not in ("y", "yes"):
                    print("nothing was changed")
                    return 1
                run.downgrade(database_url, schema, arguments.revision)
                print(f"schema {schema} is at revision {current(database_url, schema)}")
            case "current":
                found = current(database_url, schema) or "none"
                print(f"schema {schema}: {found} (needed: {REQUIRED_REVISION})")
            case "roles":
                apply_roles(database_url, schema)
                print("roles: " + ", ".join(role_name(schema, role) for role in ROLES))
            case "wakeup":
                set_wakeup(database_url, schema, arguments.state == "enable")
                print(f"wake-up trigger of schema {schema}: {arguments.state}d")
    except (sqlalchemy.exc.SQLAlchemyError, psycopg.Error) as error:
        print(f"the database refused: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
