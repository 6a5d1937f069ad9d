"""Relay's commands as processes against a real database: what they write, what they leave, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.local.processes import wait_until
from tests.support.broker import Broker
from tests.support.commands import PATIENCE, CommandLine
from tests.support.database import Database
from tests.support.outbox import OUTBOX, count, fill, park, publish
from tests.support.processes import RelayFactory


@pytest.fixture
def command(database: Database, tmp_path: Path) -> CommandLine:
    return CommandLine("relay", tmp_path, {"DATABASE_URL": database.url, "SECRETS_DIR": "/dev/null"})


def test_status_counts_what_waits_what_is_parked_and_which_keys_stand_still(
    database: Database, command: CommandLine
) -> None:
    publish(database, 30, published_at="now() - make_interval(secs => n)")
    fill(database, 7, created_at="now() - interval '5 minutes'")
    fill(database, 3, exchange="'bills'", next_attempt_at="now() + interval '1 h'", attempts="1")
    park(database, 4, "order.lost")
    park(
        database,
        1,
        "bill.lost",
        ordering_key="'parked'",
        last_error="'body has 99999 bytes, the bound is 1000'",
    )
    fill(database, 6, ordering_key="'parked'")
    fill(database, 1, ordering_key="'slow'", next_attempt_at="now() + interval '90 s'", attempts="2")
    fill(database, 2, ordering_key="'quick'")
    status = command.ok("status", "--json").json
    assert (status["fresh"], status["retrying"], status["keyed"], status["quarantined"]) == (7, 3, 10, 5)
    assert 299 < status["oldest_age_seconds"] < 330
    assert 0.3 <= status["published_per_second"] <= 0.5
    assert [(e["exchange"], e["waiting"], e["quarantined"]) for e in status["exchanges"]] == [
        ("bills", 3, 0),
        ("events", 16, 5),
    ]
    assert [(kind["error"], kind["rows"]) for kind in status["quarantine"]] == [
        ("unroutable: 312 NO_ROUTE: exchange '…', routing key '…'N", 4),
        ("body has N bytes, the bound is N", 1),
    ]
    keys = {key["ordering_key"]: (key["why"], key["behind"]) for key in status["blocked_keys"]}
    assert keys == {"parked": ("quarantine", 6), "slow": ("backing off", 0)}
    text = command.ok("status").out
    assert "7 fresh, 3 retrying, 10 with an ordering key" in text
    assert "blocked keys: 1 by quarantine, 1 backing off" in text
    assert "10000" not in text


def test_status_counts_stop_at_the_cap(database: Database, command: CommandLine) -> None:
    fill(database, 10_050)
    text = command.ok("status").out
    assert "10000+ fresh, 0 retrying" in text
    assert "5000+" in text


def test_status_watch_prints_one_json_object_for_each_look_until_it_is_interrupted(
    command: CommandLine,
) -> None:
    with command.started("status", "--json", "--watch", "0.05") as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert looks[0]["observed_at"] < looks[1]["observed_at"] < looks[2]["observed_at"]


def test_a_thousand_parked_rows_are_released_by_one_command_that_says_first_and_needs_yes(
    database: Database, command: CommandLine
) -> None:
    """gruelbox/transaction-outbox#337: blocked rows cannot be listed, bulk-released or purged."""
    park(database, 1000)
    park(database, 20, "other.event")
    refused = command("quarantine", "release", "--event-type", "order.placed")
    assert refused.code == 2
    assert "release 1 000 rows" in refused.out
    assert "--yes" in refused.err
    assert count(database, "quarantined_at IS NOT NULL") == 1020
    done = command.ok("quarantine", "release", "--event-type", "order.placed", "--batch", "300", "--yes")
    assert "released 1 000 rows" in done.out
    fresh = "quarantined_at IS NULL AND attempts = 0 AND next_attempt_at IS NULL AND last_error IS NOT NULL"
    assert count(database, f"event_type = 'order.placed' AND {fresh}") == 1000
    assert count(database, "event_type = 'other.event' AND quarantined_at IS NOT NULL AND attempts = 5") == 20
    assert command.ok("quarantine", "release", "--event-type", "order.placed").out == (
        "no row in quarantine fits: nothing to do\n"
    )


def test_a_write_to_the_quarantine_without_a_filter_needs_all(
    database: Database, command: CommandLine
) -> None:
    park(database, 3)
    refused = command("quarantine", "purge", "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert "--all" in refused.err
    assert count(database, "quarantined_at IS NOT NULL") == 3
    command.ok("quarantine", "purge", "--all", "--yes")
    assert count(database, "true") == 0


def test_quarantine_filters_by_error_time_and_id(database: Database, command: CommandLine) -> None:
    park(database, 10)  # row n: n minutes in quarantine
    park(database, 2, last_error="'ACCESS_REFUSED'")
    fill(database, 1)  # fresh: never listed
    rows = command.ok(
        "quarantine", "list", "--json", "--error", "no_route", "--since", "5m", "--before", "150s"
    ).json
    assert sorted(int(row["aggregate_id"]) for row in rows) == [3, 4]
    ids = [row["id"] for row in rows]
    shown = command.ok("quarantine", "show", "--id", ids[0], "--id", ids[1]).out
    assert shown.count("payload") == 2
    assert '{"n": 3}' in shown
    command.ok("quarantine", "purge", "--id", ids[0], "--yes")
    assert count(database, f"id = {ids[0]}") == 0
    assert count(database, "quarantined_at IS NOT NULL") == 11


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 5), ("yes", 0, 0)])
def test_on_a_terminal_it_asks_and_does_as_it_is_told(
    database: Database, command: CommandLine, answer: str, code: int, left: int
) -> None:
    park(database, 5)
    result = command.on_terminal("quarantine", "release", "--all", answer=answer)
    assert result.code == code, result
    assert "release 5 rows?" in result.out
    assert count(database, "quarantined_at IS NOT NULL") == left


def test_ctrl_c_at_the_question_changes_nothing(database: Database, command: CommandLine) -> None:
    park(database, 5)
    result = command.on_terminal("quarantine", "purge", "--all", answer="", interrupt=True)
    assert result.code == 130
    assert count(database, "quarantined_at IS NOT NULL") == 5


def test_a_released_row_of_a_key_is_published_before_the_rows_behind_it(
    database: Database, broker: Broker, relay: RelayFactory, command: CommandLine
) -> None:
    """Quarantine blocks its key until it is released."""
    asyncio.run(broker.declare())
    park(database, 1, ordering_key="'k'")
    fill(database, 3, ordering_key="'k'")
    relay()
    time.sleep(1.0)
    assert count(database, "published_at IS NULL") == 4
    command.ok("quarantine", "release", "--all", "--yes")
    assert wait_until(lambda: count(database, "published_at IS NULL") == 0, PATIENCE)
    arrived = [message.message_id for message in asyncio.run(broker.peek())]
    assert arrived == [
        str(row["event_id"]) for row in database.run(f"SELECT event_id FROM {OUTBOX} ORDER BY id")
    ]


def test_replay_says_first_and_puts_back_only_what_fits(database: Database, command: CommandLine) -> None:
    publish(database, 10, "order.placed")
    publish(database, 10, "order.paid")
    fill(database, 2, "order.placed")
    before = database.run(f"SELECT id, event_id FROM {OUTBOX} ORDER BY id")
    window = ("replay", "--event-type", "order.placed", "--from", "330s", "--to", "90s")
    dry = command.ok(*window, "--dry-run")
    assert "publish 4 rows again" in dry.out
    assert "event_id" in dry.out
    assert "ordering key" not in dry.out
    refused = command(*window)
    assert refused.code == 2
    assert count(database, "published_at IS NOT NULL") == 20
    assert "put back 4 rows" in command.ok(*window, "--yes").out
    again = database.run(f"SELECT aggregate_id, event_type FROM {OUTBOX} WHERE published_at IS NULL")
    assert sorted((row["event_type"], row["aggregate_id"]) for row in again) == sorted(
        [("order.placed", n) for n in ("1", "2")] + [("order.placed", n) for n in ("2", "3", "4", "5")]
    )
    assert database.run(f"SELECT id, event_id FROM {OUTBOX} ORDER BY id") == before


def test_replay_by_event_id_and_by_aggregate(database: Database, command: CommandLine) -> None:
    publish(database, 5, ordering_key="'k' || n")
    fill(database, 5, "order.new")
    event_id = database.value(f"SELECT event_id FROM {OUTBOX} WHERE aggregate_id = '2'")
    unknown = "00000000-0000-0000-0000-000000000000"
    one = command.ok("replay", "--event-id", event_id, "--event-id", unknown, "--yes")
    assert "1 of 2 named rows do not fit" in one.err
    assert "1 row with an ordering key" in one.out
    assert count(database, "published_at IS NULL AND aggregate_id = '2' AND event_type = 'order.placed'") == 1
    assert "publish 1 row again" in command.ok("replay", "--aggregate", "order:4", "--yes").out
    assert count(database, "published_at IS NULL AND event_type = 'order.placed'") == 2
    assert command("replay", "--yes").code == 2


def test_a_replay_that_is_interrupted_leaves_whole_batches(database: Database, command: CommandLine) -> None:
    publish(database, 1000)
    with command.started("replay", "--from", "100d", "--batch", "50", "--rate", "100", "--yes") as process:
        assert wait_until(lambda: count(database, "published_at IS NULL") >= 100, PATIENCE)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    done = count(database, "published_at IS NULL")
    assert done % 50 == 0
    assert 100 <= done < 1000
    assert f"interrupted: {done} of 1 000 rows put back" in errors


def test_prune_deletes_published_rows_and_the_rest_only_when_told(
    database: Database, command: CommandLine
) -> None:
    publish(database, 250, published_at="now() - make_interval(days => n)")
    park(database, 10, quarantined_at="now() - interval '200 days'")
    fill(database, 5, created_at="now() - interval '200 days'")
    database.run("INSERT INTO relay_drain.inbox SELECT 'c', gen_random_uuid(), now() - interval '40 days'")
    assert "delete 244 rows: published" in command("prune").out
    assert count(database, "true") == 265
    command.ok("prune", "--older-than", "100d", "--batch", "20", "--yes")
    assert count(database, "published_at IS NOT NULL") == 99
    assert count(database, "published_at IS NULL") == 15
    assert database.value("SELECT count(*) FROM relay_drain.inbox") == 1
    command.ok("prune", "--yes")  # as the settings say: 7 days, the inbox 30
    assert count(database, "published_at IS NOT NULL") == 6
    assert database.value("SELECT count(*) FROM relay_drain.inbox") == 0
    command.ok("prune", "--quarantined", "--older-than", "90d", "--yes")
    assert (count(database, "quarantined_at IS NOT NULL"), count(database, "true")) == (0, 11)


def test_expected_errors_are_one_line_with_their_exit_code(database: Database, command: CommandLine) -> None:
    away = command("status", DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert (away.code, away.err.count("\n")) == (1, 1)
    assert "nothing listens" in away.err
    bad = command("quarantine", "list", RELAY_TICK="soon")
    assert (bad.code, bad.err.count("\n")) == (2, 1)
    assert "RELAY_TICK" in bad.err
    empty = command("status", DATABASE_SCHEMA="elsewhere")
    assert (empty.code, empty.err.count("\n")) == (3, 1)
    assert "migrations upgrade" in empty.err
    assert "exit codes" in command.ok("--help").out


def test_a_reader_that_goes_away_is_no_error(database: Database, command: CommandLine) -> None:
    park(database, 3000)
    with command.started("quarantine", "list", "--limit", "3000") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE) == 1


def test_a_database_that_goes_away_amid_a_write_is_one_line_that_says_how_far_it_came(
    database: Database, command: CommandLine
) -> None:
    park(database, 500)
    arguments = ("quarantine", "release", "--all", "--batch", "10", "--yes")
    with row_locked(database, 200), command.started(*arguments) as process:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
        assert wait_until(lambda: database.value(waits, [database.name]) == 1, PATIENCE)
        database.terminate_sessions()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "200 rows released before that" in errors
    assert count(database, "quarantined_at IS NULL") == 200


@contextlib.contextmanager
def row_locked(database: Database, offset: int) -> Iterator[None]:
    """Hold the lock of one row, so that a command stands at it."""
    with psycopg.connect(database.url) as connection:
        row = connection.execute(f"SELECT id FROM {OUTBOX} ORDER BY id OFFSET {offset} LIMIT 1").fetchone()
        connection.execute(f"SELECT FROM {OUTBOX} WHERE id = %s FOR UPDATE", row)
        yield
        connection.close()
