"""Drain's commands as processes against a real database and the APNs simulator: what they write, leave and refuse."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from common.logs import fingerprint
from common.schema import qualify
from deploy.local.ports import free_port
from deploy.local.processes import wait_until
from drain import sql
from tests.support.commands import PATIENCE, CommandLine
from tests.support.database import Database
from tests.support.processes import APP, DrainFactory, Simulator

LEDGER = "relay_drain.notification_deliveries"
NOBODY = "00" * 32


@pytest.fixture
def command(database: Database, tmp_path: Path) -> CommandLine:
    environment = {"DATABASE_URL": database.url, "SECRETS_DIR": "/dev/null", "PROBE_PORT": str(free_port())}
    return CommandLine("drain", tmp_path, environment)


@pytest.fixture
def to_simulator(command: CommandLine, simulator: Simulator) -> CommandLine:
    """The commands with one app, shop, that the simulator serves."""
    command.environment["DRAIN_APPS"] = json.dumps({APP: simulator.app()})
    return command


def fill(database: Database, rows: int, status: str = "pending", app: str = APP, **columns: str) -> list[int]:
    """Insert rows, row n for device n; ``columns`` are SQL expressions over n, which counts from 1. Returns ids."""
    if status not in ("pending", "claimed"):
        columns = {"finished_at": "now() - make_interval(mins => n)", "attempts": "3", **columns}
    names, values = ", ".join(["", *columns]), ", ".join(["", *columns.values()])
    found = database.run(
        f"INSERT INTO {LEDGER} (app, device_token, payload, status{names}) "
        f"SELECT '{app}', md5(n::text) || md5(n::text), '{{\"aps\": {{}}}}', '{status}'{values} "
        f"FROM generate_series(1, {rows}) AS n RETURNING id"
    )
    return [row["id"] for row in found]


def count(database: Database, condition: str) -> int:
    return int(database.value(f"SELECT count(*) FROM {LEDGER} WHERE {condition}"))


def row(database: Database, row_id: int) -> dict[str, Any]:
    return database.run(f"SELECT * FROM {LEDGER} WHERE id = {row_id}")[0]


def test_status_tells_by_app_what_is_due_leased_waiting_and_why_rows_failed(
    database: Database, command: CommandLine
) -> None:
    """graphile/worker#380: no queue depth to look at."""
    fill(database, 5, next_attempt_at="now() - interval '3 minutes'")
    fill(database, 2, "claimed", next_attempt_at="now() + interval '1 minute'")
    fill(database, 4, next_attempt_at="now() + interval '1 minute'", last_reason="'InvalidProviderToken'")
    fill(database, 30, "sent", finished_at="now() - make_interval(secs => n)")
    fill(database, 3, "failed", last_reason="'Unregistered'", last_status="410")
    fill(database, 2, "failed", last_reason="'payload is ' || 5000 + n || ' bytes, limit 4096'")
    fill(database, 1, "superseded", "bank")
    status = command.ok("status", "--json").json
    shop = next(app for app in status["apps"] if app["app"] == APP)
    assert (shop["due"], shop["leased"], shop["waiting"]) == (5, 2, 4)
    assert 179 < shop["oldest_due_age_seconds"] < 210
    assert 0.3 <= shop["sent_per_second"] <= 0.5
    assert shop["last_day"] == {"sent": 30, "failed": 5, "expired": 0, "superseded": 0}
    assert {(r["status"], r["reason"], r["rows"]) for r in status["reasons"]} == {
        ("waiting", "InvalidProviderToken", 4),
        ("failed", "Unregistered", 3),
        ("failed", "payload is N bytes, limit N", 2),
    }
    assert status["here"]["answers"] is False
    text = command.ok("status").out
    assert "bank" in text
    assert "not in DRAIN_APPS here" in text


def test_a_device_token_is_shown_only_when_it_is_asked_for_and_found_by_its_hash(
    database: Database, command: CommandLine
) -> None:
    fill(database, 3, "failed", last_reason="'Unregistered'")
    fill(database, 1)
    token = database.value(f"SELECT device_token FROM {LEDGER} WHERE status = 'pending'")
    listed = command.ok("list").out
    assert token not in listed
    assert listed.count(fingerprint(token)) == 2  # row 1 of both kinds is for one device
    shown = command.ok("show", "--device", fingerprint(token), "--json")
    assert token not in shown.out
    assert [delivery["status"] for delivery in shown.json] == ["pending", "failed"]
    asked = command.ok("list", "--device", token.upper(), "--status", "failed", "--tokens").out
    assert asked.count(token) == 1


def test_list_filters_by_status_reason_app_and_time(database: Database, command: CommandLine) -> None:
    ids = fill(database, 10, "failed", last_reason="'BadDeviceToken'")  # row n: n minutes ago
    fill(database, 2, "failed", last_reason="'PayloadTooLarge'")
    fill(database, 2, "failed", "bank", last_reason="'BadDeviceToken'")
    fill(database, 2)
    filters = (
        "--app",
        APP,
        "--status",
        "failed",
        "--reason",
        "baddevice",
        "--since",
        "330s",
        "--before",
        "150s",
    )
    assert [delivery["id"] for delivery in command.ok("list", "--json", *filters).json] == ids[2:5]
    assert len(command.ok("list", "--json", "--limit", "3").json) == 3


def test_requeue_opens_failed_and_expired_rows_and_never_lowers_the_fence(
    database: Database, command: CommandLine
) -> None:
    failed = fill(database, 250, "failed", claim_version="7", last_reason="'InternalServerError'")
    expired = fill(database, 2, "expired", expires_at="now() - interval '1 hour'")
    others = fill(database, 2, "sent") + fill(database, 2, "superseded")
    refused = command("requeue", "--status", "failed")
    assert refused.code == 2
    assert "requeue 250 rows" in refused.out
    assert count(database, "status = 'pending'") == 0
    command.ok("requeue", "--reason", "internal", "--batch", "100", "--yes")
    opened = "status = 'pending' AND attempts = 0 AND finished_at IS NULL AND next_attempt_at <= now()"
    assert count(database, f"{opened} AND claim_version = 7") == len(failed)
    late = command.ok("requeue", "--status", "expired", "--expires-in", "2h", "--yes").out
    assert "requeued 2 rows" in late
    assert count(database, f"id = ANY ('{{{','.join(map(str, expired))}}}') AND expires_at > now()") == 2
    assert command("requeue", "--status", "sent", "--yes").code == 2
    assert command("requeue", "--yes").code == 2
    assert count(database, "status IN ('sent', 'superseded')") == len(others)
    command.ok("requeue", "--status", "sent", "--force", "--yes")
    assert (count(database, "status = 'sent'"), count(database, "status = 'superseded'")) == (0, 2)


def test_requeue_warns_of_rows_that_will_end_again(database: Database, command: CommandLine) -> None:
    fill(database, 3, "failed", expires_at="CASE WHEN n = 1 THEN now() - interval '1 hour' END")
    database.run(
        f"INSERT INTO relay_drain.device_tokens (app, device_token, dead_since) "
        f"SELECT app, device_token, now() FROM {LEDGER} ORDER BY id LIMIT 2"
    )
    said = command("requeue", "--all").out
    assert "1 row past expires_at" in said
    assert "2 rows for device tokens that are dead" in said


def test_cancel_leaves_live_leases_and_a_zombie_writes_nothing_afterwards(
    database: Database, command: CommandLine
) -> None:
    waiting = fill(database, 3)
    live = fill(database, 2, "claimed", next_attempt_at="now() + interval '1 hour'", claim_version="1")
    over = fill(database, 1, "claimed", next_attempt_at="now() - interval '1 s'", claim_version="5")[0]
    result = command.ok("cancel", "--app", APP, "--yes").out
    assert "2 rows under a live lease" in result
    assert "cancelled 4 rows" in result
    cancelled = "status = 'failed' AND last_reason = 'Cancelled' AND finished_at IS NOT NULL"
    assert count(database, cancelled) == len(waiting) + 1
    assert count(database, "status = 'claimed'") == len(live)
    # The drain whose lease was over wakes up and writes its outcome under its own fence.
    settle = qualify(sql.SETTLE, database.schema)
    values = ([over], [5], ["sent"], [None], [0], [200], [None], [False], [None])
    for position in range(9, 0, -1):
        settle = settle.replace(f"${position}", "%s")
    assert database.run(settle, values) == []
    assert row(database, over)["last_reason"] == "Cancelled"


def test_a_row_that_is_claimed_while_cancel_waits_for_its_lock_is_left_to_its_claimer(
    database: Database, command: CommandLine
) -> None:
    ids = fill(database, 3)
    with psycopg.connect(database.url) as claimer, command.started("cancel", "--all", "--yes") as process:
        claimer.execute(
            f"UPDATE {LEDGER} SET status = 'claimed', claim_version = 1, attempts = 1, "
            f"next_attempt_at = now() + interval '2 minutes' WHERE id = {ids[0]}"
        )
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
        assert wait_until(lambda: database.value(waits, [database.name]) == 1, PATIENCE)
        claimer.commit()
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "cancelled 2 rows; 1 row had changed meanwhile" in out
    assert row(database, ids[0])["status"] == "claimed"


def test_a_requeue_that_is_interrupted_leaves_whole_batches(database: Database, command: CommandLine) -> None:
    fill(database, 1000, "failed")
    with command.started("requeue", "--all", "--batch", "50", "--rate", "100", "--yes") as process:
        assert wait_until(lambda: count(database, "status = 'pending'") >= 100, PATIENCE)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    done = count(database, "status = 'pending'")
    assert done % 50 == 0
    assert f"interrupted: {done} of 1 000 rows requeued" in errors


def test_prune_deletes_finished_rows_only(database: Database, command: CommandLine) -> None:
    for status in ("sent", "failed", "expired", "superseded"):
        fill(database, 50, status, finished_at="now() - make_interval(days => n)")
    fill(database, 2, created_at="now() - interval '300 days'")
    fill(database, 2, "claimed", created_at="now() - interval '300 days'")
    assert "delete 168 rows" in command("prune", "--older-than", "9d").out
    command.ok("prune", "--older-than", "40d", "--batch", "7", "--yes")
    assert (count(database, "finished_at IS NOT NULL"), count(database, "finished_at IS NULL")) == (156, 4)
    command.ok("prune", "--yes")  # as the settings say: 30 days
    assert count(database, "finished_at IS NOT NULL") == 116


def test_send_shows_the_exchange_and_keeps_the_secret(
    to_simulator: CommandLine, simulator: Simulator, database: Database
) -> None:
    device = "ab" * 32
    refused = to_simulator("send", device)
    assert refused.code == 2
    sent = to_simulator("send", device, "--title", "Hello", "--expires-in", "0s", "--yes")
    assert sent.code == 0
    assert "> apns-expiration: 0" in sent.out
    assert '"title":"Hello"' in sent.out
    assert "signature not shown" in sent.out
    assert "bearer ey" not in sent.out
    assert simulator.control.device(device)["delivered"] == 1
    simulator.control.rule(device, reason="DeviceTokenNotForTopic")
    failed = to_simulator("send", device, "--payload", '{"aps": {"badge": 1}}', "--yes")
    assert failed.code == 1
    assert "< 400 DeviceTokenNotForTopic" in failed.out
    assert "drain would: the token is dead" in failed.out
    assert to_simulator("send", "xyz", "--yes").code == 2
    assert count(database, "true") == 0


def test_check_tells_good_credentials_from_bad_ones(
    to_simulator: CommandLine, simulator: Simulator, tmp_path: Path
) -> None:
    simulator.control.rule(NOBODY, reason="BadDeviceToken")
    sound = to_simulator("check")
    assert sound.code == 0, sound
    assert "credentials and topic are accepted (a probe was answered 400 BadDeviceToken" in sound.out
    junk = tmp_path / "junk.p8"
    junk.write_text("no key")
    apps = {
        "topic": simulator.app(topic="com.other.app"),
        "key": simulator.app(key_id="UNKNOWN000"),
        "file": simulator.app(key_file=str(junk)),
        "away": simulator.app(port=free_port()),
    }
    bad = to_simulator("check", "--json", DRAIN_APPS=json.dumps(apps))
    assert bad.code == 1
    failed = {check["name"]: check["text"] for check in bad.json["checks"] if check["state"] == "FAIL"}
    assert set(failed) == set(apps)
    assert "403 InvalidProviderToken" in failed["key"]
    assert "TopicDisallowed" in failed["topic"]
    assert "not a PEM private key" in failed["file"]
    assert "cannot connect" in failed["away"]


def test_check_names_the_grants_that_the_role_lacks_and_they_are_enough_for_the_daemon(
    database: Database, to_simulator: CommandLine, drain: DrainFactory, simulator: Simulator
) -> None:
    role = f"poor_{database.name}"
    database.run(f"CREATE ROLE {role} LOGIN")
    try:
        database.run(f"GRANT USAGE ON SCHEMA relay_drain TO {role}")
        database.run(f"GRANT SELECT ON relay_drain.alembic_version TO {role}")
        url = database.url.replace("postgres@", f"{role}@")
        checks = to_simulator("check", "--json", DATABASE_URL=url).json["checks"]
        lacking = next(check for check in checks if check["name"] == "privileges")
        assert lacking["state"] == "FAIL"
        for statement in lacking["hint"].split("; "):
            database.run(statement)
        [gone, alive] = fill(database, 2)
        simulator.control.unregister(row(database, gone)["device_token"], since_ms=1_700_000_000_000)
        daemon = drain(DATABASE_URL=url)
        assert wait_until(lambda: count(database, "finished_at IS NOT NULL") == 2, PATIENCE)
        daemon.close()
        assert (row(database, gone)["last_reason"], row(database, alive)["status"]) == (
            "Unregistered",
            "sent",
        )
        assert database.value("SELECT event_type FROM relay_drain.outbox") == "device_token.dead"
    finally:
        database.run(f"DROP OWNED BY {role}")
        database.run(f"DROP ROLE {role}")


def test_status_shows_a_paused_app_and_a_requeued_row_is_pushed(
    database: Database, to_simulator: CommandLine, drain: DrainFactory, simulator: Simulator
) -> None:
    port = int(to_simulator.environment["PROBE_PORT"])
    [first] = fill(database, 1)
    device = row(database, first)["device_token"]
    simulator.control.rule(device, reason="PayloadTooLarge")
    drain(PROBE_PORT=port, DRAIN_PAUSE_BASE=0.2, DRAIN_PAUSE_CAP=0.5)
    assert wait_until(lambda: row(database, first)["status"] == "failed", PATIENCE)
    simulator.control.rule(device, reason="InvalidProviderToken")
    to_simulator.ok("requeue", "--id", first, "--yes")
    assert wait_until(lambda: to_simulator.ok("status", "--json").json["here"]["paused"] == [APP], PATIENCE)
    assert "PAUSED here: InvalidProviderToken" in to_simulator.ok("status").out
    simulator.control.register(device)
    assert wait_until(lambda: row(database, first)["status"] == "sent", PATIENCE)


def test_commands_of_the_ledger_need_no_apps_and_a_bad_setting_is_one_line(command: CommandLine) -> None:
    command.ok("list")
    refused = command("check")
    assert refused.code == 1
    assert "FAIL  settings" in refused.out
    bad = command("status", DRAIN_LEASE="soon")
    assert (bad.code, bad.err.count("\n")) == (2, 1)
