"""What ``relay check`` and ``drain check`` have in common: one line for each check, and the checks of the database."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import asyncpg

from common import sql
from common.cli import Command
from common.database import connect_arguments
from common.errors import DATABASE_ERRORS, SchemaMismatch
from common.explain import address, explain
from common.schema import check_revision, quote_identifier, read_revision
from common.settings import SharedSettings

OLDEST_VERSION = 13
SKEW_SECONDS = 5.0
SNAPSHOT_SECONDS = 60.0
LOCAL = ("", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Check:
    """One line. ``warn`` is worth a look and fails nothing."""

    name: str
    state: Literal["ok", "warn", "FAIL"]
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Privilege:
    """What a daemon does to one table; ``columns`` that are enough for it (none: the whole table)."""

    table: str
    privilege: Literal["SELECT", "INSERT", "UPDATE", "DELETE"]
    columns: tuple[str, ...] = ()


async def report(command: Command, checks: AsyncIterator[Check], as_json: bool) -> int:
    """Print each check as soon as it is known; 1 when one failed."""
    found: list[Check] = []
    async for check in checks:
        found.append(check)
        if not as_json:
            command.say(line(check))
    failed = any(check.state == "FAIL" for check in found)
    if as_json:
        command.show_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    return int(failed)


def line(check: Check) -> str:
    """One check as a line."""
    hint = f"; {check.hint}" if check.hint else ""
    return f"{check.state:<4}  {check.name:<12}  {check.text}{hint}"


def report_settings(error: Exception, as_json: bool) -> int:
    """Settings that are refused end the checks."""
    check = Check("settings", "FAIL", str(error))
    text = json.dumps({"ok": False, "checks": [dataclasses.asdict(check)]}) if as_json else line(check)
    sys.stdout.write(text + "\n")
    return 1


def settings_check(unknown: Sequence[str]) -> Check:
    """Settings were accepted; variables that mean nothing are most often misspelt."""
    if unknown:
        return Check("settings", "warn", f"no such setting: {', '.join(unknown)}", "misspelt?")
    return Check("settings", "ok", "accepted")


async def database_checks(
    shared: SharedSettings, name: str, privileges: Sequence[Privilege]
) -> AsyncIterator[Check]:
    """Connect as the daemon does and look at what it needs; ends early when nothing more can be known."""
    where = address(shared.database_url.get_secret_value())
    began = time.monotonic()
    try:
        connection = await asyncpg.connect(**connect_arguments(shared, name))
    except (*DATABASE_ERRORS, ValueError) as error:
        text, hint = explain(error)
        yield Check("database", "FAIL", f"{where}: {text}", hint)
        return
    try:
        before = time.time()
        session = await connection.fetchrow(sql.SESSION)
        after = time.time()
        took = 1000 * (time.monotonic() - began)
        yield version_check(session, f"{where}, PostgreSQL {session['version_text']}, {took:.0f} ms")
        pooled = connection.get_server_pid() != session["pid"]
        yield tls_check(shared, session["tls"], pooled)
        yield pooler_check(shared, pooled)
        yield await writable_check(connection)
        yield clock_check(session["now"].timestamp() - (before + after) / 2, (after - before) / 2)
        yield await snapshot_check(connection)
        yield await schema_check(connection, shared.database_schema, session["role"])
        yield await privileges_check(connection, shared.database_schema, session["role"], privileges)
    except DATABASE_ERRORS as error:
        text, hint = explain(error)
        yield Check("database", "FAIL", text, hint)
    finally:
        connection.terminate()


def version_check(session: asyncpg.Record, text: str) -> Check:
    """The server is there, and new enough."""
    if session["version"] // 10000 < OLDEST_VERSION:
        return Check("database", "FAIL", text, f"PostgreSQL {OLDEST_VERSION} or newer is needed")
    return Check("database", "ok", text)


def tls_check(shared: SharedSettings, tls: str | None, pooled: bool) -> Check:
    """Whether others could listen, or pretend to be the server."""
    parts = urlsplit(shared.database_url.get_secret_value())
    options = parse_qs(parts.query)
    mode = options.get("sslmode", ["prefer"])[0]
    hosts = options.get("host", [parts.hostname or ""])
    local = all(host in LOCAL or host.startswith("/") for host in hosts)
    if mode == "verify-full":
        return Check("tls", "ok", f"sslmode=verify-full{', ' + tls if tls and not pooled else ''}")
    text = f"sslmode={mode}, " + ("as the pooler has it" if pooled else tls or "not encrypted")
    if local:
        return Check("tls", "ok", text + ", this host")
    return Check("tls", "warn", text, "sslmode=verify-full in DATABASE_URL proves the server and encrypts")


def pooler_check(shared: SharedSettings, pooled: bool) -> Check:
    """A pooler such as pgbouncer gives out process ids of its own."""
    if not pooled:
        return Check("pooler", "ok", "none: the session is the server's own")
    if shared.database_statement_cache:
        return Check(
            "pooler",
            "warn",
            f"something like pgbouncer is in between; DATABASE_STATEMENT_CACHE is {shared.database_statement_cache}",
            "in transaction mode set it to 0, unless pgbouncer has max_prepared_statements (1.21 and newer)",
        )
    return Check("pooler", "ok", "something like pgbouncer is in between; DATABASE_STATEMENT_CACHE is 0")


async def writable_check(connection: asyncpg.Connection) -> Check:
    """The daemons write; a standby or a demoted primary does not."""
    if await connection.fetchval(sql.READ_ONLY):
        return Check(
            "writable", "FAIL", "the database is read-only", "a standby? name the primary in DATABASE_URL"
        )
    return Check("writable", "ok", "not a standby, writes are allowed")


def clock_check(skew: float, doubt: float) -> Check:
    """Nothing is decided by this host's clock, but logs and tokens carry its time."""
    text = f"{skew:+.3f} s between the database and this host (± {doubt:.3f} s)"
    if abs(skew) - doubt > SKEW_SECONDS:
        return Check("clock", "warn", text, "synchronise both clocks (NTP)")
    return Check("clock", "ok", text)


async def snapshot_check(connection: asyncpg.Connection) -> Check:
    """A transaction that stays open keeps dead rows alive."""
    oldest = await connection.fetchval(sql.OLDEST_TRANSACTION)
    if oldest is None:
        return Check("snapshots", "ok", "no other transaction is open")
    seconds = await connection.fetchval(
        "SELECT extract(epoch FROM clock_timestamp() - $1::timestamptz)", oldest
    )
    text = f"the oldest transaction is open for {seconds:.0f} s"
    if seconds > SNAPSHOT_SECONDS:
        return Check("snapshots", "warn", text, "it keeps dead rows alive; see pg_stat_activity")
    return Check("snapshots", "ok", text)


async def schema_check(connection: asyncpg.Connection, schema: str, role: str) -> Check:
    """The tables are those that this program knows."""
    try:
        revision = await read_revision(connection, schema)
        check_revision(revision, schema)
    except SchemaMismatch as error:
        return Check("schema", "FAIL", str(error))
    except asyncpg.InsufficientPrivilegeError as error:
        quoted = quote_identifier(schema)
        return Check(
            "schema",
            "FAIL",
            f"the revision can not be read: {error}",
            f'GRANT USAGE ON SCHEMA {quoted} TO "{role}"; GRANT SELECT ON {quoted}.alembic_version TO "{role}"',
        )
    return Check("schema", "ok", f"{schema} is at revision {revision}")


async def privileges_check(
    connection: asyncpg.Connection, schema: str, role: str, privileges: Sequence[Privilege]
) -> Check:
    """The role may do what the daemon does; the hint is what its owner has to run."""
    wanted = [(p.table, p.privilege, column) for p in privileges for column in (p.columns or (None,))]
    lacking = await connection.fetch(
        sql.LACKING_PRIVILEGES, schema, *(list(column) for column in zip(*wanted, strict=True))
    )
    usage = await connection.fetchval(sql.SCHEMA_USAGE, schema)
    if not lacking and usage:
        return Check("privileges", "ok", f"role {role} has all that are needed")
    quoted = quote_identifier(schema)
    grants: dict[str, list[str]] = {}
    for table, privilege, column in lacking:
        grant = privilege if column is None else f"{privilege} ({column})"
        grants.setdefault(table, []).append(grant)
    statements = [] if usage else [f'GRANT USAGE ON SCHEMA {quoted} TO "{role}"']
    statements += [
        f'GRANT {", ".join(what)} ON {quoted}.{table} TO "{role}"' for table, what in grants.items()
    ]
    missing = "; ".join(f"{', '.join(what)} on {table}" for table, what in grants.items())
    return Check(
        "privileges", "FAIL", f"role {role} lacks {missing or 'USAGE of the schema'}", "; ".join(statements)
    )
