"""Life of the daemons: what each probe answers and which exit code comes when something is wrong."""

from __future__ import annotations

import asyncio
import json

import pytest

BOTH = pytest.mark.parametrize("name", ["relay", "drain"])


def start(name: str, request, **settings):
    return request.getfixturevalue(name)(**settings)


def broken(name: str, fault: str, request, **settings):
    return start(name, request, argv=("-m", "tests.crash.broken_daemon", fault, name), **settings)


async def eventually(check, timeout: float = 20.0) -> None:
    async with asyncio.timeout(timeout):
        while not check():
            await asyncio.sleep(0.05)


@BOTH
async def test_a_healthy_daemon_is_live_ready_and_stops_with_0(name, request):
    daemon = start(name, request)
    await eventually(lambda: daemon.get("/readyz")[0] == 200)
    assert daemon.get("/livez")[0] == 200
    assert daemon.get("/startupz")[0] == 200
    assert daemon.stop() == 0
    assert daemon.lines[-1]["event"] == "stopped"


@BOTH
async def test_a_blocked_loop_fails_liveness_and_the_probe_still_answers(name, request):
    settings = {
        "relay": {"LIVE_AFTER": 10, "RELAY_BATCH_DEADLINE": 5, "RELAY_CONFIRM_TIMEOUT": 2},
        "drain": {"LIVE_AFTER": 6, "DATABASE_COMMAND_TIMEOUT": 3},
    }[name]
    daemon = broken(name, "blocked-loop", request, **settings)
    await eventually(lambda: daemon.get("/livez")[0] == 503, timeout=40)
    assert "has not turned" in daemon.get("/livez")[1]
    daemon.kill()


@BOTH
async def test_a_dead_inner_task_ends_the_process_with_1(name, request):
    daemon = broken(name, "dead-task", request)
    assert await daemon.ended(30) == 1
    assert daemon.events("inner_task_died")
    assert "broken on purpose" in json.dumps(daemon.events("inner_task_died"))


@BOTH
async def test_an_unreachable_database_is_not_ready_and_live(name, request, database, proxy):
    way = proxy(database.admin.port)
    settings = {
        "OBSERVE_INTERVAL": 1,
        "OBSERVE_TIMEOUT": 1,
        "DATABASE_COMMAND_TIMEOUT": 2,
        "DATABASE_CONNECT_TIMEOUT": 1,
    }
    daemon = start(name, request, DATABASE_URL=database.through(way.port), **settings)
    await eventually(lambda: daemon.get("/readyz")[0] == 200)
    way.stall()
    await eventually(lambda: daemon.get("/readyz")[0] == 503)
    assert "database" in daemon.get("/readyz")[1]
    assert daemon.get("/livez")[0] == 200
    gauge = {"relay": "outbox_quarantined", "drain": "notifications_dead"}[name]
    await eventually(lambda: not any(key[0] == gauge for key in daemon.metrics().samples))
    way.forward()
    way.cut()
    await eventually(lambda: daemon.get("/readyz")[0] == 200)
    assert daemon.stop() == 0


@BOTH
async def test_started_before_its_database_it_waits_and_then_works(name, request, own_postgres, own_database):
    own_postgres.stop()
    daemon = start(name, request, database=own_database, wait_for=None)
    await daemon.seen("waiting_for_database")
    await asyncio.sleep(1.0)
    assert daemon.alive
    assert len(daemon.lines) < 5, daemon.tail()
    await asyncio.to_thread(own_postgres.start)
    await daemon.seen("started")
    assert daemon.stop() == 0


@BOTH
async def test_term_before_the_start_is_done_ends_at_once_with_0(name, request, proxy, database):
    way = proxy(database.admin.port)
    way.stall()
    daemon = start(
        name, request, DATABASE_URL=database.through(way.port), DATABASE_CONNECT_TIMEOUT=2, wait_for=None
    )
    await daemon.seen("waiting_for_database")
    assert daemon.stop(timeout=15) == 0


@BOTH
@pytest.mark.parametrize(
    ("revision", "code"),
    [("0002", None), ("0003", 3), ("0000", 3), (None, 3)],
    ids=["next", "two ahead", "old", "none"],
)
async def test_the_schema_may_be_one_revision_ahead_and_no_more(name, request, database, revision, code):
    """Old and new side by side: the migration runs first, this program goes on until it is replaced."""
    if revision is None:
        await database.fetch("DROP TABLE {schema}.alembic_version")
    else:
        await database.fetch("UPDATE {schema}.alembic_version SET version_num = $1", revision)
    daemon = start(name, request, wait_for=None)
    if code is None:
        await daemon.seen("started")
        assert daemon.stop() == 0
    else:
        assert await daemon.ended(20) == code
        line = daemon.events("schema_refused")[0]["error"]
        assert "python -m migrations upgrade" in line or "install the release" in line


@BOTH
async def test_a_probe_port_in_use_is_a_refused_setting(name, request):
    first = start(name, request)
    second = start(name, request, PROBE_PORT=first.probe_port, wait_for=None)
    assert await second.ended(20) == 2
    assert str(first.probe_port) in second.events("configuration_refused")[0]["error"]
    assert first.stop() == 0


async def test_settings_of_relay_that_break_a_promise_are_refused_with_the_numbers(relay):
    for settings, words in (
        ({"RELAY_CONFIRM_TIMEOUT": 14}, ("RELAY_CONFIRM_TIMEOUT", "14", "RELAY_BATCH_DEADLINE", "15")),
        ({"RELAY_BATCH_DEADLINE": 25}, ("RELAY_STOP_DEADLINE", "20")),
        ({"RELAY_GRACE": 20}, ("RELAY_GRACE", "20")),
        ({"RELAY_BATCH_SIZE": 0}, ("RELAY_BATCH_SIZE", "0")),
        ({"RELAY_LANES": 9}, ("RELAY_LANES", "DATABASE_POOL_SIZE")),
        ({"RELAY_TICK": "soon"}, ("RELAY_TICK", "soon")),
        ({"RELAY_AMQP_URL": "http://x"}, ("RELAY_AMQP_URL", "amqp://")),
        ({"DATABASE_SCHEMA": 'x"; drop'}, ("DATABASE_SCHEMA",)),
    ):
        daemon = relay(wait_for=None, **settings)
        assert await daemon.ended(20) == 2, daemon.tail()
        line = json.dumps(daemon.events("configuration_refused"))
        assert all(word in line for word in words), line


async def test_a_misspelt_variable_is_said(relay):
    daemon = relay(RELAY_TICKS=3)
    assert daemon.events("unknown_variable", variable="RELAY_TICKS")
    assert daemon.stop() == 0


async def test_a_worker_whose_clock_is_ten_minutes_off_leases_and_works_as_any_other(
    request, database, simulator
):
    """Leases are by the database's clock, local deadlines by the monotonic one; nobody's wall clock decides."""
    simulator.control.script([{"do": "pass", "times": 5}, {"do": "hold"}], end="repeat_last")
    await database.enqueue_deliveries(10)
    daemon = broken("drain", "slow-clock", request)
    await simulator.control.until(held=5)
    assert await database.fetchval(
        """SELECT bool_and(next_attempt_at BETWEEN now() + interval '90 s' AND now() + interval '120 s')
           FROM {schema}.notification_deliveries WHERE status = 'claimed'"""
    )
    simulator.control.clear_scripts()
    simulator.control.release()
    await database.until("SELECT count(*) = 10 FROM {schema}.notification_deliveries WHERE status = 'sent'")
    assert await database.fetchval("SELECT max(finished_at) <= now() FROM {schema}.notification_deliveries")
    assert daemon.stop() == 0
