"""``relay check`` against sound and unsound setups, and the commands behind a pooler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deploy.local.pgbouncer import PrivatePgbouncer
from deploy.local.processes import wait_until
from tests.support.broker import Broker
from tests.support.commands import PATIENCE, CommandLine
from tests.support.database import Database
from tests.support.outbox import count, fill, park, publish
from tests.support.processes import RelayFactory


@pytest.fixture
def command(database: Database, tmp_path: Path) -> CommandLine:
    return CommandLine("relay", tmp_path, {"DATABASE_URL": database.url, "SECRETS_DIR": "/dev/null"})


def test_check_is_content_with_a_sound_setup_and_names_what_is_not(
    database: Database, broker: Broker, command: CommandLine
) -> None:
    sound = command("check", RELAY_AMQP_URL=broker.url)
    assert sound.code == 0, sound
    assert "is not there yet: relay declares it" in sound.out
    missing = command(
        "check", "--json", RELAY_AMQP_URL=broker.url, RELAY_DECLARE_EXCHANGE="false", RELAY_WAKEUP="true"
    )
    states = {check["name"]: check for check in missing.json["checks"]}
    assert missing.code == 1
    assert states["exchange"]["state"] == states["wake-up"]["state"] == "FAIL"
    assert "wakeup enable" in states["wake-up"]["hint"]
    assert states["publishing"]["state"] == "ok"
    wrong = broker.url.replace("guest:guest", "guest:wrong")
    refused = command("check", RELAY_AMQP_URL=wrong, RELAY_MISSPELT="1")
    assert "no such setting: RELAY_MISSPELT" in refused.out
    assert "check user and password in RELAY_AMQP_URL" in refused.out
    assert "wrong" not in refused.out + refused.err


def test_check_compares_the_exchange_with_what_the_daemon_would_declare(
    broker: Broker, command: CommandLine
) -> None:
    asyncio.run(broker.declare_exchange("events", "fanout"))
    result = command("check", RELAY_AMQP_URL=broker.url)
    assert result.code == 1
    assert "it is no durable topic exchange" in result.out
    assert command("check", RELAY_AMQP_URL=broker.url, RELAY_DECLARE_EXCHANGE="false").code == 0


def test_check_names_the_grants_that_the_role_lacks_and_they_are_enough_for_the_daemon(
    database: Database, broker: Broker, relay: RelayFactory, command: CommandLine
) -> None:
    role = f"poor_{database.name}"
    database.run(f"CREATE ROLE {role} LOGIN")
    try:
        database.run(f"GRANT USAGE ON SCHEMA relay_drain TO {role}")
        database.run(f"GRANT SELECT ON relay_drain.alembic_version TO {role}")
        url = database.url.replace("postgres@", f"{role}@")
        result = command("check", "--json", DATABASE_URL=url, RELAY_AMQP_URL=broker.url)
        assert result.code == 1
        lacking = next(check for check in result.json["checks"] if check["name"] == "privileges")
        assert "UPDATE (published_at)" in lacking["hint"]
        for statement in lacking["hint"].split("; "):
            database.run(statement)
        asyncio.run(broker.declare())
        publish(database, 3, published_at="now() - interval '8 days'")
        fill(database, 2)
        fill(database, 1, routing_key="repeat('x', 300)")
        database.run(
            "INSERT INTO relay_drain.inbox SELECT 'c', gen_random_uuid(), now() - interval '40 days'"
        )
        daemon = relay(DATABASE_URL=url, RELAY_PRUNE_INTERVAL=0.2)
        assert wait_until(lambda: count(database, "published_at IS NOT NULL") == 2, PATIENCE)
        assert wait_until(lambda: database.value("SELECT count(*) FROM relay_drain.inbox") == 0, PATIENCE)
        assert wait_until(lambda: count(database, "quarantined_at IS NOT NULL") == 1, PATIENCE)
        daemon.close()
    finally:
        database.run(f"DROP OWNED BY {role}")
        database.run(f"DROP ROLE {role}")


def test_check_and_status_see_a_read_only_database(database: Database, command: CommandLine) -> None:
    database.admin.set_read_only(database.name, True)
    assert "FAIL  writable" in command("check").out
    assert "READ-ONLY" in command.ok("status").out
    database.admin.set_read_only(database.name, False)


def test_behind_pgbouncer_in_transaction_mode_commands_work_and_check_says_what_to_set(
    database: Database, pgbouncer: PrivatePgbouncer, command: CommandLine
) -> None:
    """MagicStack/asyncpg#121: a prepared statement that stays behind in the pool's session meets the next client."""
    park(database, 900)
    publish(database, 20)
    pooled = {"DATABASE_URL": pgbouncer.url_of(database.name), "DATABASE_STATEMENT_CACHE": "0"}
    for error in ("N1", "N2", "N3"):
        database.run(f"UPDATE relay_drain.outbox SET last_error = '{error}' WHERE id % 3 = {error[1]} - 1")
        released = command.ok("quarantine", "release", "--error", error, "--batch", "100", "--yes", **pooled)
        assert "released 300 rows" in released.out
    assert "put back 20 rows" in command.ok("replay", "--from", "1d", "--yes", **pooled).out
    assert "0 with an ordering key" in command.ok("status", **pooled).out
    assert "ok    pooler" in command("check", **pooled).out
    assert "warn  pooler" in command("check", DATABASE_URL=pooled["DATABASE_URL"]).out
