"""What relay says about itself: when it waits, when it is blocked, when a part of it is dead, when it is only idle."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request

import pytest

from deploy.local.ports import free_port

UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"
# The shortest that the settings' own rules allow.
SHORT = {"RELAY_CONFIRM_TIMEOUT": 0.5, "RELAY_BATCH_DEADLINE": 2.5, "LIVE_AFTER": 5, "OBSERVE_INTERVAL": 1}


def probe(port: int, path: str) -> tuple[int, dict[str, str]]:
    """Status and problems, before there is a log line with the port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)["problems"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["problems"]


async def until_probe(daemon, path: str, status: int, timeout: float = 20.0) -> str:
    """Wait until a probe answers so; return its body."""
    deadline = time.monotonic() + timeout
    while (found := daemon.get(path))[0] != status:
        assert time.monotonic() < deadline, f"{path} is {found}, not {status}"
        await asyncio.sleep(0.1)
    return found[1]


async def test_started_while_postgres_is_away_it_waits_unready_and_works_when_it_comes(
    own_database, own_postgres, broker, relay
):
    await broker.declare()
    await own_database.enqueue_events(10)
    await asyncio.to_thread(own_postgres.stop)
    ports = free_port(), free_port()
    first, second = (
        relay(database=own_database, PROBE_PORT=port, wait_for="waiting_for_database", **SHORT)
        for port in ports
    )
    assert probe(ports[0], "/livez") == (200, {})
    assert probe(ports[0], "/startupz")[0] == 503
    assert "startup" in probe(ports[0], "/readyz")[1]
    second.terminate()
    assert await second.ended(timeout=15) == 0, second.tail()
    await asyncio.sleep(1.5)
    assert len(first.events("waiting_for_database")) == 1
    await asyncio.to_thread(own_postgres.start)
    await own_database.until(UNPUBLISHED)
    await until_probe(first, "/readyz", 200)
    assert probe(ports[0], "/startupz")[0] == 200
    assert first.stop() == 0


async def test_started_while_the_broker_is_away_it_waits_unready_and_works_when_it_comes(
    database, broker, relay, proxy
):
    await broker.declare()
    way = proxy(broker.admin.amqp_port)
    way.refuse()
    daemon = relay(RELAY_AMQP_URL=way.rewrite(broker.url), **SHORT)
    await database.enqueue_events(10)
    body = await until_probe(daemon, "/readyz", 503)
    assert "broker" in body
    await daemon.seen("broker_unavailable")
    assert daemon.get("/livez")[0] == 200
    assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
    way.accept()
    await database.until(UNPUBLISHED)
    await until_probe(daemon, "/readyz", 200)
    assert daemon.stop() == 0


async def test_a_blocked_loop_is_not_live_and_the_probe_says_so(database, broker, relay):
    await broker.declare()
    daemon = relay(argv=("-m", "tests.crash.faulty", "blocks"), **SHORT)
    await until_probe(daemon, "/livez", 200)
    await database.enqueue_events(1)
    body = await until_probe(daemon, "/livez", 503)
    assert "has not turned" in body
    assert daemon.alive
    assert daemon.metrics().sum("relay_batches_total") >= 1, "the probes' thread answers for metrics too"


async def test_an_idle_relay_with_a_long_tick_is_live(database, broker, relay):
    """An idle loop turns: waiting is no reason for a restart, however long the tick."""
    daemon = relay(RELAY_TICK=300, **SHORT)
    await until_probe(daemon, "/readyz", 200)
    began = time.monotonic()
    while time.monotonic() - began < SHORT["LIVE_AFTER"] + 2.5:
        assert daemon.get("/livez")[0] == 200
        await asyncio.sleep(0.25)
    assert daemon.stop() == 0


TASKS = ["lane-1", "lane-1-ends", "observer", "prune", "wakeup", "loop-lag"]


@pytest.mark.parametrize("task", TASKS)
async def test_a_dead_inner_task_ends_the_process_with_1(database, broker, relay, task):
    """rails/solid_queue#751, strelov1/freehire#1964: the process lives, its inner loop is dead, hours unnoticed."""
    daemon = relay(argv=("-m", "tests.crash.faulty", task), wait_for=None, RELAY_WAKEUP="true", **SHORT)
    assert await daemon.ended(timeout=20) == 1, daemon.tail()
    died = daemon.wait_for("inner_task_died", 0.1)
    assert died["task"] == task.removesuffix("-ends")
    assert daemon.events("stopped")
    assert daemon.output == ""


async def test_a_relay_that_achieves_nothing_ends_itself_and_one_that_waits_for_the_broker_does_not(
    database, broker, relay, proxy
):
    await broker.declare()
    way = proxy(broker.admin.amqp_port)
    way.refuse()
    stalled = {**SHORT, "STALLED_EXIT": 4}
    waiting = relay(RELAY_AMQP_URL=way.rewrite(broker.url), **stalled)
    faulty = relay(argv=("-m", "tests.crash.faulty", "stalls"), **stalled)
    assert await faulty.ended(timeout=30) == 1
    assert faulty.events("stalled")
    await asyncio.sleep(stalled["STALLED_EXIT"])
    await database.enqueue_events(10)
    way.accept()
    await database.until(UNPUBLISHED)
    assert not waiting.events("stalled")
    assert waiting.stop() == 0


async def test_while_it_stops_it_is_not_ready_and_finishes_its_batch(database, broker, relay, proxy):
    await broker.declare()
    way = proxy(broker.admin.amqp_port)
    daemon = relay(RELAY_AMQP_URL=way.rewrite(broker.url), RELAY_LANES=1)
    await database.enqueue_events(10)
    await database.until(UNPUBLISHED)
    way.stall("to_client")
    await database.enqueue_events(100)
    async with asyncio.timeout(20):
        while broker.depth() < 110:
            await asyncio.sleep(0.02)
    daemon.terminate()
    await daemon.seen("stopping")
    assert "shutdown" in daemon.get("/readyz")[1]
    assert daemon.get("/livez")[0] == 200
    way.forward()
    assert await daemon.ended() == 0
    assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 110
    assert len(await broker.take(count=110)) == 110
