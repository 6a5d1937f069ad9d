"""Roles of least privilege: each can do its work, and nothing else."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psycopg
import pytest

from common.schema import qualify
from deploy.compose.roles import LOGINS, make_logins
from migrations.__main__ import main as migrations_main
from migrations.roles import ROLES, apply_roles, role_name, roles_sql
from migrations.run import upgrade
from tests.support.database import Database, fresh_database

# Roles belong to the whole server: these tests share one worker, and so do their logins.
pytestmark = pytest.mark.xdist_group("roles")

SCHEMA = "relay_drain"
OTHER = "Other"
TOKEN = "ab" * 32
Run = Callable[[str | None, str], Awaitable[None]]


@pytest.fixture(scope="module")
def granted(postgres_and_template) -> Iterator[Database]:
    """A database with the roles, for the tests that change nothing."""
    with fresh_database(*postgres_and_template) as database:
        apply_roles(database.url, SCHEMA)
        yield database


@pytest.fixture
async def under(granted) -> AsyncIterator[Run]:
    """``await under("relay", statement)`` runs a statement as a member of a role, None as the owner; rolls it back."""
    connection = await granted.connect()

    async def run(role: str | None, statement: str) -> None:
        transaction = connection.transaction()
        await transaction.start()
        try:
            if role is not None:
                await connection.execute(f'SET LOCAL ROLE "{role_name(SCHEMA, role)}"')
            await connection.execute(qualify(statement, SCHEMA))
        finally:
            await transaction.rollback()

    yield run
    await connection.close()


def statements(module: str) -> list[tuple[str, str]]:
    """The statements of a module of SQL: its constants that touch tables or views."""
    constants = vars(importlib.import_module(module))
    return [
        (f"{module}.{name}", text)
        for name, text in constants.items()
        if name.isupper()
        and not name.startswith("_")
        and isinstance(text, str)
        and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", text)
    ]


OF_RELAY = statements("relay.sql") + statements("relay.admin_sql") + statements("common.sql")
OF_DRAIN = statements("drain.sql") + statements("drain.admin_sql") + statements("common.sql")
# The lag of the other daemon's queue is read by that daemon.
FOREIGN = {"relay": ("DELIVERIES",), "drain": ("OUTBOX",)}


@pytest.mark.parametrize(
    ("role", "name", "statement"),
    [
        pytest.param(role, name, statement, id=f"{role}-{name}")
        for role, found in (("relay", OF_RELAY), ("drain", OF_DRAIN), ("observer", statements("common.sql")))
        for name, statement in found
        if not name.rpartition(".")[2].startswith(FOREIGN.get(role, ("?",)))
    ],
)
async def test_a_role_may_run_each_statement_of_its_daemon(granted, role, name, statement) -> None:
    """EXPLAIN checks the privileges of every table and column of the plan, and changes nothing."""
    async with granted.session() as connection:
        await connection.execute(f"PREPARE asked AS {qualify(statement, SCHEMA)}")
        count = await connection.fetchval(
            "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'asked'"
        )
        await connection.execute(f'SET ROLE "{role_name(SCHEMA, role)}"')
        nulls = f"({', '.join(['NULL'] * count)})" if count else ""
        await connection.execute(f"EXPLAIN EXECUTE asked{nulls}")


INSERT_EVENT = (
    "INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, payload) "
    "VALUES ('a', '1', 'e', '{}')"
)
ENQUEUE_EVENT = "SELECT {schema}.enqueue_event('order', '1', 'order.placed', '{}'::jsonb)"
ENQUEUE_DELIVERY = f"SELECT {{schema}}.enqueue_delivery('shop', '{TOKEN}', '{{\"aps\": {{}}}}'::jsonb)"
REGISTER = f"SELECT {{schema}}.register_device('shop', '{TOKEN}')"
ACCEPT = "SELECT {schema}.accept_event('c', gen_random_uuid())"
SET_PUBLISHED = "UPDATE {schema}.outbox SET published_at = now()"
SET_STATUS = "UPDATE {schema}.notification_deliveries SET status = 'failed', finished_at = now()"
READ_EVENTS = "SELECT payload FROM {schema}.outbox"
READ_TOKENS = "SELECT device_token FROM {schema}.notification_deliveries"


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        ("relay", INSERT_EVENT),
        ("relay", ENQUEUE_EVENT),
        ("relay", "UPDATE {schema}.outbox SET payload = '{}'"),
        ("relay", "UPDATE {schema}.outbox SET event_id = gen_random_uuid()"),
        ("relay", "TRUNCATE {schema}.outbox"),
        ("relay", READ_TOKENS),
        ("relay", "SELECT FROM {schema}.device_tokens"),
        ("relay", SET_STATUS),
        ("relay", "INSERT INTO {schema}.inbox (consumer, event_id) VALUES ('c', gen_random_uuid())"),
        ("relay", "UPDATE {schema}.inbox SET event_id = gen_random_uuid()"),
        ("relay", ACCEPT),
        ("relay", "UPDATE {schema}.alembic_version SET version_num = '9999'"),
        ("relay", "CREATE TABLE {schema}.mine ()"),
        ("relay", "ALTER TABLE {schema}.outbox DISABLE TRIGGER ALL"),
        ("drain", READ_EVENTS),
        ("drain", SET_PUBLISHED),
        ("drain", "DELETE FROM {schema}.outbox"),
        (
            "drain",
            "INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, exchange, payload) "
            "VALUES ('a', '1', 'e', 'elsewhere', '{}')",
        ),
        ("drain", ENQUEUE_DELIVERY),
        ("drain", "UPDATE {schema}.notification_deliveries SET payload = '{}'"),
        ("drain", "UPDATE {schema}.notification_deliveries SET device_token = 'ab'"),
        ("drain", "SELECT FROM {schema}.inbox"),
        ("drain", "DELETE FROM {schema}.device_tokens"),
        ("drain", "CREATE TABLE {schema}.mine ()"),
        ("observer", READ_EVENTS),
        ("observer", READ_TOKENS),
        ("observer", "SELECT device_token FROM {schema}.device_tokens"),
        ("observer", "SELECT last_error FROM {schema}.outbox FOR UPDATE"),
        ("observer", SET_PUBLISHED),
        ("observer", "DELETE FROM {schema}.notification_deliveries"),
        ("observer", ENQUEUE_EVENT),
        ("producer", SET_PUBLISHED),
        ("producer", READ_EVENTS),
        ("producer", "DELETE FROM {schema}.outbox"),
        (
            "producer",
            "INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, payload, published_at) "
            "VALUES ('a', '1', 'e', '{}', now())",
        ),
        ("producer", SET_STATUS),
        ("producer", ACCEPT),
        ("consumer", ENQUEUE_EVENT),
        ("consumer", "DELETE FROM {schema}.inbox"),
        ("consumer", READ_EVENTS),
    ],
)
async def test_what_a_role_must_not_do_is_refused(under, role, statement) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await under(role, statement)
    await under(None, statement)  # the owner may: it was the role that was refused, not the statement


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        ("producer", INSERT_EVENT + " RETURNING id, event_id"),
        ("producer", ENQUEUE_EVENT),
        ("producer", ENQUEUE_DELIVERY),
        ("producer", REGISTER),
        ("consumer", ACCEPT),
        ("observer", "SELECT status, count(*) FROM {schema}.notification_deliveries GROUP BY status"),
    ],
)
async def test_a_role_may_do_what_it_is_for(under, role, statement) -> None:
    await under(role, statement)


async def test_the_functions_of_the_schema_are_nobody_elses(granted) -> None:
    """PostgreSQL lets everybody execute a new function; here USAGE of the schema alone must not be enough."""
    async with granted.session() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            await connection.execute(f"CREATE ROLE somebody; GRANT USAGE ON SCHEMA {SCHEMA} TO somebody")
            await connection.execute("SET LOCAL ROLE somebody")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(qualify(ENQUEUE_EVENT, SCHEMA))
        finally:
            await transaction.rollback()


async def test_granting_again_changes_nothing_and_takes_back_what_was_granted_by_hand(database) -> None:
    apply_roles(database.url, SCHEMA)
    before = await _grants(database)
    await database.fetch(f'GRANT INSERT ON {{schema}}.outbox TO "{role_name(SCHEMA, "observer")}"')
    assert await _grants(database) != before
    apply_roles(database.url, SCHEMA)
    assert await _grants(database) == before


async def _grants(database) -> set[tuple[str, ...]]:
    rows = await database.fetch(
        """SELECT grantee, table_name, column_name, privilege_type FROM information_schema.column_privileges
           WHERE table_schema = $1 UNION ALL
           SELECT grantee, table_name, '', privilege_type FROM information_schema.table_privileges
           WHERE table_schema = $1""",
        SCHEMA,
    )
    return {tuple(row) for row in rows}


async def test_every_table_and_function_of_the_schema_was_thought_of(granted) -> None:
    """A new table or function that no role may use is decided here, not found out in production."""
    objects = await granted.fetch(
        """SELECT relname AS name FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind IN ('r', 'p', 'v')
           UNION SELECT proname FROM pg_proc WHERE pronamespace = $1::regnamespace""",
        SCHEMA,
    )
    text = roles_sql(SCHEMA)
    unmentioned = {row["name"] for row in objects if f'"{SCHEMA}".{row["name"]}' not in text}
    assert unmentioned == {"outbox_wakeup"}, "the trigger function; nobody calls it"


def test_an_owner_who_is_no_superuser_can_migrate_and_make_the_roles(database) -> None:
    """All but the view of other roles' sessions, which only a superuser can give; the notice says so."""
    names = ", ".join(f'"{role_name(OTHER, role)}"' for role in ROLES)
    database.run("CREATE ROLE plain_owner LOGIN CREATEROLE PASSWORD 'secret'")
    database.run(f'GRANT CREATE ON DATABASE "{database.name}" TO plain_owner')
    try:
        url = _as(database.url, "plain_owner", "secret")
        upgrade(url, OTHER)
        apply_roles(url, OTHER)
        assert database.value(
            "SELECT has_column_privilege(%s, '\"Other\".outbox', 'published_at', 'UPDATE')",
            (role_name(OTHER, "relay"),),
        )
        assert not database.value(
            "SELECT pg_has_role(%s, 'pg_read_all_stats', 'USAGE')", (role_name(OTHER, "relay"),)
        )
        with psycopg.connect(url) as connection:
            notices: list[str] = []
            connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
            connection.execute(roles_sql(OTHER))
            assert "a superuser should run: GRANT pg_read_all_stats" in notices[0]
    finally:
        database.run(f'DROP SCHEMA IF EXISTS "{OTHER}" CASCADE')
        database.run(f"DROP ROLE IF EXISTS {names}")
        database.run("DROP OWNED BY plain_owner")
        database.run("DROP ROLE plain_owner")


def test_the_command_prints_what_it_would_run(capsys) -> None:
    assert migrations_main(["roles"]) == 0
    assert capsys.readouterr().out.strip() == roles_sql(SCHEMA).strip()


def test_names_of_roles_bear_the_name_of_the_schema(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DATABASE_SCHEMA", "Shop_2")
    assert migrations_main(["roles"]) == 0
    text = capsys.readouterr().out
    assert 'GRANT USAGE ON SCHEMA "Shop_2" TO "Shop_2_relay"' in text
    assert "relay_drain" not in text


def _as(url: str, login: str, password: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{login}:{password}@{parts.hostname}:{parts.port}"))


async def test_both_daemons_work_under_their_logins(database, broker, relay, drain, simulator) -> None:
    """The whole way, with a dead token's feedback: enqueue, push, publish, under the three logins of the demo."""
    apply_roles(database.url, SCHEMA)
    make_logins(database.url, SCHEMA, dict.fromkeys(LOGINS, "secret"))
    await broker.declare()
    simulator.control.unregister(TOKEN, since_ms=int(time.time() * 1000))
    with psycopg.connect(_as(database.url, "shop", "secret")) as shop:
        shop.execute(qualify(ENQUEUE_EVENT, SCHEMA))
        shop.execute(qualify(ENQUEUE_DELIVERY, SCHEMA))
    pusher = drain(DATABASE_URL=_as(database.url, "drain", "secret"))
    publisher = relay(DATABASE_URL=_as(database.url, "relay", "secret"))
    await database.until("SELECT count(*) = 2 FROM {schema}.outbox WHERE published_at IS NOT NULL")
    assert await database.fetchval("SELECT dead_since IS NOT NULL FROM {schema}.device_tokens")
    for daemon in (pusher, publisher):
        assert not daemon.events("observation_failed")
        assert not daemon.events("prune_failed")
        assert daemon.stop() == 0


def test_roles_of_the_demo_are_roles() -> None:
    assert {role for roles in LOGINS.values() for role in roles} == set(ROLES)
