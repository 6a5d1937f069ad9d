"""Faults around drain: APNs wrong, away or silent; the database away; apps that must not harm each other.

Requests are counted: requests minus rows is what was counted as maybe delivered, never more.
"""

from __future__ import annotations

import asyncio
import json

import pytest

FAST = {
    "DRAIN_RETRY_BASE": 0.05,
    "DRAIN_RETRY_CAP": 0.2,
    "DRAIN_PAUSE_BASE": 0.3,
    "DRAIN_PAUSE_CAP": 0.6,
}
OPEN = "SELECT count(*) = 0 FROM {schema}.notification_deliveries WHERE status IN ('pending', 'claimed')"
SENT = "SELECT count(*) = $1 FROM {schema}.notification_deliveries WHERE status = 'sent'"


def token(n: int) -> str:
    return f"{n:064x}"


@pytest.mark.parametrize("reason", ["InvalidProviderToken", "BadTopic"])
async def test_a_wrong_key_or_topic_pauses_its_app_burns_nothing_and_heals(
    reason, database, simulator_factory, drain
):
    """Two apps, one with a bad key: its rows stay, the other goes on at full rate; then the key is good again."""
    good, bad = simulator_factory(), simulator_factory()
    bad.control.always("answer", reason=reason)
    await database.enqueue_deliveries(200, app="bad")
    await database.enqueue_deliveries(200, app="good")
    daemon = drain(DRAIN_APPS={"good": good.app(), "bad": bad.app()}, **FAST)
    await daemon.seen("app_paused", app="bad")
    await database.until(
        "SELECT count(*) = 200 FROM {schema}.notification_deliveries WHERE status = 'sent' AND app = 'good'"
    )
    await daemon.seen("app_still_paused", app="bad")
    assert daemon.metrics().value("drain_app_paused", app="bad") == 1
    assert daemon.metrics().value("drain_app_paused", app="good") == 0
    await database.until(
        "SELECT max(attempts) <= 1 AND sum(attempts) <= 1 FROM {schema}.notification_deliveries WHERE app = 'bad'"
    )
    requests = bad.control.stats()["requests"]
    await asyncio.sleep(1.5)
    assert bad.control.stats()["requests"] - requests <= 8, "a paused app keeps asking"
    bad.control.clear_scripts()
    await daemon.seen("app_resumed", app="bad")
    await database.until(OPEN)
    counts = await database.fetch("SELECT DISTINCT status, attempts FROM {schema}.notification_deliveries")
    assert [tuple(row) for row in counts] == [("sent", 1)]
    assert daemon.stop() == 0


async def test_many_bad_tokens_at_once_pause_the_app_before_thousands_die(database, simulator, drain):
    simulator.control.always("answer", reason="BadDeviceToken")
    await database.enqueue_deliveries(300)
    daemon = drain(DRAIN_MASS_FAILURE=10, **FAST)
    await daemon.seen("app_paused")
    await daemon.seen("app_still_paused")
    assert (
        await database.fetchval("SELECT count(*) FROM {schema}.device_tokens WHERE dead_since IS NOT NULL")
        <= 9
    )
    simulator.control.clear_scripts()
    await database.until(OPEN)
    assert (
        await database.fetchval("SELECT count(*) FROM {schema}.notification_deliveries WHERE status = 'sent'")
        >= 291
    )
    assert daemon.stop() == 0


async def test_a_topic_that_one_push_type_may_not_use_does_not_stop_the_app(database, simulator, drain):
    control = simulator.control
    control.always("answer", device=token(999), reason="TopicDisallowed")
    await database.enqueue_deliveries(50)
    daemon = drain(DRAIN_MAX_ATTEMPTS=3, **FAST)
    await database.until(SENT, 50)
    await database.fetch(
        "SELECT {schema}.enqueue_delivery('shop', $1, '{\"aps\":{}}'::jsonb, push_type => 'voip')", token(999)
    )
    await database.enqueue_deliveries(50)
    await database.until(OPEN)
    row = (
        await database.fetch(
            "SELECT * FROM {schema}.notification_deliveries WHERE device_token = $1", token(999)
        )
    )[0]
    assert (row["status"], row["attempts"], row["last_reason"]) == ("failed", 3, "TopicDisallowed")
    assert not daemon.events("app_paused")
    assert daemon.stop() == 0


async def test_apns_refusing_connections_burns_no_attempt(database, simulator, drain, proxy):
    way = proxy(simulator.port)
    way.refuse()
    await database.enqueue_deliveries(30)
    daemon = drain(DRAIN_APPS={"shop": simulator.app(port=way.port)}, **FAST)
    await daemon.seen("apns_unreachable")
    await asyncio.sleep(1.5)
    assert await database.fetchval(
        "SELECT max(attempts) FROM {schema}.notification_deliveries WHERE status = 'pending'"
    ) in (0, None)
    assert len(daemon.lines) < 15, daemon.tail()
    way.accept()
    await database.until(SENT, 30)
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.notification_deliveries") == 1
    assert simulator.control.stats()["requests"] == 30
    assert daemon.stop() == 0


async def test_connections_dropped_in_flight_are_maybe_delivered_and_counted(database, simulator, drain):
    control = simulator.control
    control.script([{"do": "hold", "times": 40}])
    await database.enqueue_deliveries(40)
    daemon = drain(**FAST)
    await control.until(held=40)
    control.act("drop")
    await database.until(SENT, 40)
    stats = control.stats()
    maybe = daemon.metrics().value("drain_maybe_delivered_total", app="shop")
    assert maybe == 40
    assert stats["requests"] - 40 == maybe
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.notification_deliveries") == 2
    assert daemon.stop() == 0


async def test_goaway_doubles_nothing(database, simulator, drain):
    """Streams above the last id are provably unsent and go again with their attempt; those below are answered."""
    control = simulator.control
    control.script(
        [{"do": "pass", "times": 10}, {"do": "goaway", "last_stream_id": "before", "reason": "Shutdown"}]
    )
    await database.enqueue_deliveries(100)
    daemon = drain(**FAST)
    await database.until(SENT, 100)
    assert control.stats()["repeated_deliveries"] == 0
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.notification_deliveries") == 1
    assert daemon.stop() == 0


async def test_unanswered_pushes_hold_up_nobody_and_stop_comes_in_time(database, simulator, drain):
    control = simulator.control
    for n in (1, 2, 3):
        control.always("silence", device=token(n))
    await database.enqueue_deliveries(50)
    daemon = drain(DRAIN_PUSH_TIMEOUT=2, **FAST)
    await database.until(SENT, 47)
    await database.enqueue_deliveries(20, more="event_id => gen_random_uuid(), coalesce_key => NULL")
    await database.until(
        "SELECT count(*) >= 3 FROM {schema}.notification_deliveries WHERE last_reason LIKE 'maybe delivered%'"
    )
    assert daemon.stop(timeout=60) == 0
    assert (
        await database.fetchval(
            "SELECT count(*) FROM {schema}.notification_deliveries WHERE status = 'claimed'"
        )
        == 0
    )


async def test_an_app_with_many_rows_does_not_starve_one_with_few(database, simulator_factory, drain):
    simulator = simulator_factory(
        "--topic", "com.example.big", "--topic", "com.example.small", "--latency", "0.03"
    )
    await database.enqueue_deliveries(20_000, app="big")
    await database.enqueue_deliveries(10, app="small")
    daemon = drain(
        DRAIN_APPS={
            "big": simulator.app(topic="com.example.big"),
            "small": simulator.app(topic="com.example.small"),
        },
        DRAIN_WINDOW=100,
    )
    await database.until(
        "SELECT count(*) = 10 FROM {schema}.notification_deliveries WHERE app = 'small' AND status = 'sent'"
    )
    assert await database.fetchval(
        "SELECT count(*) > 5000 FROM {schema}.notification_deliveries WHERE app = 'big' AND status = 'pending'"
    )
    assert daemon.stop() == 0


async def test_a_black_holed_app_does_not_slow_another(database, simulator_factory, drain, proxy):
    good, hole = simulator_factory(), simulator_factory()
    way = proxy(hole.port)
    way.stall()
    await database.enqueue_deliveries(500, app="hole")
    await database.enqueue_deliveries(500, app="good")
    daemon = drain(DRAIN_APPS={"hole": hole.app(port=way.port), "good": good.app()}, DRAIN_WINDOW=100, **FAST)
    await database.until(
        "SELECT count(*) = 500 FROM {schema}.notification_deliveries WHERE app = 'good' AND status = 'sent'"
    )
    assert hole.control.stats()["requests"] == 0
    way.forward()
    await database.until(OPEN, timeout=60)
    assert daemon.stop() == 0


async def test_outcomes_survive_the_database_being_away_while_settling(
    own_database, own_postgres, simulator, drain
):
    control = simulator.control
    control.always("hold")
    await own_database.enqueue_deliveries(40)
    daemon = drain(database=own_database, **FAST)
    await control.until(held=40)
    await asyncio.to_thread(own_postgres.stop)
    control.clear_scripts()
    control.release()
    await daemon.seen("settle_failed")
    await asyncio.to_thread(own_postgres.start)
    await own_database.until(SENT, 40)
    assert control.stats()["requests"] == 40
    assert await own_database.fetchval("SELECT max(attempts) FROM {schema}.notification_deliveries") == 1
    assert len(daemon.lines) < 25, daemon.tail(40)
    assert daemon.stop() == 0


async def test_sessions_terminated_all_the_time_lose_and_double_nothing(database, simulator, drain):
    await database.enqueue_deliveries(3000)
    daemon = drain(**FAST)
    for _ in range(25):
        await asyncio.to_thread(database.terminate_sessions)
        await asyncio.sleep(0.05)
    await database.until(
        "SELECT count(*) = 0 FROM {schema}.notification_deliveries WHERE status = 'pending'", timeout=90
    )
    async with asyncio.timeout(30):
        while daemon.metrics().value("drain_in_flight", app="shop"):
            await asyncio.sleep(0.1)
    # A claim that committed and whose answer was lost with its session leaves its rows leased, and unpushed.
    await database.fetch(
        "UPDATE {schema}.notification_deliveries SET next_attempt_at = now() WHERE status = 'claimed'"
    )
    await database.until(OPEN, timeout=60)
    assert simulator.control.stats()["repeated_deliveries"] == 0
    assert simulator.control.stats()["requests"] == 3000
    assert daemon.stop() == 0


async def test_two_drains_with_one_name_share_the_work_without_doubles(database, simulator, drain):
    await database.enqueue_deliveries(1000)
    daemons = [drain(INSTANCE="same") for _ in range(2)]
    await database.until(SENT, 1000)
    assert simulator.control.stats()["requests"] == 1000
    assert [daemon.stop() for daemon in daemons] == [0, 0]


async def test_rows_of_an_app_nobody_is_configured_for_are_seen(database, simulator, drain):
    await database.enqueue_deliveries(3, app="forgotten")
    daemon = drain(OBSERVE_INTERVAL=1)
    async with asyncio.timeout(20):
        while daemon.metrics().value("notifications_due", app="unconfigured") != 3:
            await asyncio.sleep(0.1)
    assert (
        daemon.metrics().value("notifications_oldest_due_timestamp_seconds", app="unconfigured") is not None
    )
    assert daemon.stop() == 0


async def test_a_second_signal_leaves_at_once(database, simulator, drain):
    simulator.control.always("silence")
    await database.enqueue_deliveries(5)
    daemon = drain()
    await simulator.control.until(requests=5)
    daemon.terminate()
    await daemon.seen("stopping")
    daemon.terminate()
    await daemon.seen("aborting")
    await daemon.ended(15)
    statuses = await database.fetch("SELECT DISTINCT status FROM {schema}.notification_deliveries")
    assert {row["status"] for row in statuses} <= {"pending", "claimed"}


async def test_settings_that_break_a_promise_are_refused_with_the_numbers(database, simulator, drain):
    for settings, words in (
        ({"DRAIN_PUSH_TIMEOUT": 110}, ("DRAIN_PUSH_TIMEOUT", "110", "DRAIN_LEASE", "120")),
        ({"DRAIN_GRACE": 130}, ("DRAIN_GRACE", "130", "DRAIN_LEASE", "120")),
        ({"DRAIN_GRACE": 30}, ("DRAIN_DRAIN_DEADLINE", "25", "30")),
        ({"LIVE_AFTER": 15}, ("LIVE_AFTER", "15", "DATABASE_COMMAND_TIMEOUT", "10")),
        ({"DRAIN_CLAIM_SIZE": 0}, ("DRAIN_CLAIM_SIZE", "0")),
        ({"DRAIN_WINDOW": -1}, ("DRAIN_WINDOW", "-1")),
        ({"DRAIN_APPS": {}}, ("DRAIN_APPS",)),
        ({"DRAIN_APPS": {"shop": {"topic": "x"}}}, ("key_file",)),
        ({"DRAIN_APPS": {"shop": simulator.app(key_file="/nowhere.p8")}}, ("/nowhere.p8",)),
    ):
        daemon = drain(wait_for=None, **settings)
        assert await daemon.ended(20) == 2, daemon.tail()
        line = json.dumps(daemon.events("configuration_refused"))
        assert all(word in line for word in words), line
