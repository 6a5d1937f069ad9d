"""Faults of rows, from the table through the real process to the queue: the bad row stays back, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.support.commands import CommandLine

GOOD = 500
MAX_ATTEMPTS = 2
QUICK_RETRIES = {"RELAY_MAX_ATTEMPTS": MAX_ATTEMPTS, "RELAY_RETRY_BASE": 0.2, "RELAY_RETRY_CAP": 0.4}

INSERT = """
INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, exchange, routing_key, ordering_key, headers,
                             payload, payload_bytes, content_type)
SELECT 'order', n::text, coalesce(p->>'event_type', 'order.placed'), p->>'exchange', p->>'routing_key',
    p->>'ordering_key', coalesce(p->'headers', '{}'), CASE WHEN p ? 'hex' THEN NULL ELSE '{}'::jsonb END,
    decode(p->>'hex', 'hex'), coalesce(p->>'content_type', 'application/json')
FROM generate_series(1, $1::int) AS n, (SELECT $2::jsonb) AS given (p)
"""
MISSING_EXCHANGE = '{"exchange": "nobody.declared", "event_type": "bad.exchange"}'
NO_QUEUE = '{"routing_key": "nowhere.at.all", "event_type": "bad.route"}'
REJECTED = {
    "bad.key": ('{"event_type": "bad.key", "routing_key": "%s"}' % ("ü" * 200), "400 bytes"),
    "bad.json": ('{"event_type": "bad.json", "hex": "7b6f7073"}', "application/json"),
    "bad.utf8": (
        '{"event_type": "bad.utf8", "hex": "fffe", "content_type": "text/plain; charset=utf-8"}',
        "UTF-8",
    ),
}


@pytest.fixture
def command(database, tmp_path: Path) -> CommandLine:
    return CommandLine("relay", tmp_path, {"DATABASE_URL": database.url, "SECRETS_DIR": "/dev/null"})


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def test_one_bad_row_of_every_kind_among_500_stays_back_and_the_others_arrive_once(
    database, broker, relay, command
):
    """MassTransit/MassTransit#6216, rabbitmq/rabbitmq-java-client#362, celery/py-amqp#428, dotnetcore/CAP#1508."""
    await broker.declare(key="order.#")
    await database.fetch(INSERT, 1, MISSING_EXCHANGE)  # row 1
    await database.fetch(INSERT, 100, "{}")
    for text, _ in REJECTED.values():
        await database.fetch(INSERT, 1, text)
    await database.fetch(INSERT, 100, "{}")
    await database.fetch(
        INSERT, 1, '{"event_type": "bad.header", "headers": {"big": "%s"}}' % ("x" * 200_000)
    )
    await database.fetch(INSERT, 1, '{"event_type": "bad.body", "hex": "%s"}' % ("20" * 2_000_000))
    await database.fetch(INSERT, 1, NO_QUEUE)
    await database.fetch(INSERT, 300, "{}")

    daemon = relay(RELAY_MAX_BODY_BYTES=1_000_000, RELAY_BATCH_SIZE=50, **QUICK_RETRIES)
    await database.until(
        "SELECT count(*) = $1 FROM {schema}.outbox WHERE published_at IS NOT NULL AND event_type = 'order.placed'",
        GOOD,
    )
    await database.until("SELECT count(*) = 7 FROM {schema}.outbox WHERE quarantined_at IS NOT NULL")
    messages = await broker.take(count=GOOD)
    assert Counter(message.properties.message_type for message in messages) == {"order.placed": GOOD}
    assert len({message.message_id for message in messages}) == GOOD

    bad = {
        row["event_type"]: row
        for row in await database.fetch(
            "SELECT event_type, attempts, last_error, next_attempt_at FROM {schema}.outbox WHERE published_at IS NULL"
        )
    }
    expected = {
        "bad.exchange": (MAX_ATTEMPTS, "no exchange 'nobody.declared'"),
        "bad.route": (
            MAX_ATTEMPTS,
            "unroutable: 312 NO_ROUTE: exchange 'events', routing key 'nowhere.at.all'",
        ),
        "bad.header": (1, "headers and properties have"),
        "bad.body": (1, "body has 2000000 bytes, the bound is 1000000"),
        **{name: (1, text) for name, (_, text) in REJECTED.items()},
    }
    assert {name: row["attempts"] for name, row in bad.items()} == {k: v[0] for k, v in expected.items()}
    for name, (_, text) in expected.items():
        assert text in bad[name]["last_error"], name
        assert bad[name]["next_attempt_at"] is not None

    metrics = daemon.metrics()
    assert metrics.sum("relay_broker_connections_total") == 1
    assert metrics.sum("relay_broker_channels_total") <= 2 + MAX_ATTEMPTS, (
        "the missing exchange is tried at full speed"
    )
    assert metrics.value("relay_unroutable_total") == MAX_ATTEMPTS
    assert metrics.value("relay_quarantined_total") == 7
    assert len(daemon.lines) < 20
    began = cpu_seconds(daemon.pid)
    await asyncio.sleep(1.0)
    assert cpu_seconds(daemon.pid) - began < 0.3, "parked rows keep the processor busy"

    # Mend the cause, let the rows go: each one that can be sent is.
    await broker.declare("late", "#", "nobody.declared")
    await broker.bind(key="nowhere.#")
    command.ok("quarantine", "release", "--event-type", "bad.exchange", "--yes")
    command.ok("quarantine", "release", "--event-type", "bad.route", "--yes")
    await database.until("SELECT count(*) = 5 FROM {schema}.outbox WHERE published_at IS NULL")
    assert [message.routing_key for message in await broker.take("late", count=1)] == ["bad.exchange"]
    assert [message.routing_key for message in await broker.take(count=1)] == ["nowhere.at.all"]
    assert daemon.stop() == 0


async def test_without_a_binding_a_row_waits_and_a_binding_that_comes_in_time_delivers_it(
    database, broker, relay
):
    """namastack/namastack-outbox#371: a message that no queue took was marked as done."""
    await broker.declare(key="nothing")
    daemon = relay(RELAY_RETRY_BASE=0.3, RELAY_RETRY_CAP=0.3, RELAY_MAX_ATTEMPTS=1000)
    await database.enqueue_events(20)
    await database.until("SELECT min(attempts) >= 2 FROM {schema}.outbox")
    assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
    assert daemon.metrics().value("relay_unroutable_total") >= 40
    await broker.bind()
    await database.until("SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL")
    assert len(await broker.take(count=20)) == 20
    assert daemon.stop() == 0


async def test_unroutable_counts_as_published_when_the_setting_says_so_and_has_its_metric(
    database, broker, relay
):
    daemon = relay(RELAY_UNROUTABLE="accept")
    await database.enqueue_events(20)
    await database.until("SELECT count(published_at) = 20 FROM {schema}.outbox")
    metrics = daemon.metrics()
    assert metrics.value("relay_unroutable_total") == 20
    assert metrics.value("relay_rows_total", verdict="published") == 20
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    assert daemon.stop() == 0


async def test_a_head_of_a_thousand_bad_rows_does_not_starve_what_is_behind_it(database, broker, relay):
    """Unroutable, to a missing exchange, impossible to send, and keyed: all of them fail again and again meanwhile."""
    await broker.declare(key="order.#")
    await database.fetch(INSERT, 300, MISSING_EXCHANGE)
    await database.fetch(INSERT, 300, NO_QUEUE)
    await database.fetch(INSERT, 300, REJECTED["bad.key"][0])
    await database.fetch(INSERT, 100, '{"exchange": "nobody.declared", "ordering_key": "k"}')
    await database.fetch(INSERT, 200, "{}")
    await database.fetch(INSERT, 200, '{"ordering_key": "good"}')
    daemon = relay(RELAY_MAX_ATTEMPTS=1000, RELAY_RETRY_BASE=1, RELAY_RETRY_CAP=1)
    good = "SELECT count(*) = $1 FROM {schema}.outbox WHERE published_at IS NOT NULL"
    await database.until(good, 400)
    await database.until("SELECT count(*) = 601 FROM {schema}.outbox WHERE attempts >= 2")
    for n in range(3):
        await database.fetch(INSERT, 50, "{}")
        await database.until(good, 450 + 50 * n, timeout=10)
    messages = await broker.take(count=550)
    assert len(messages) == len({message.message_id for message in messages}) == 550
    keyed = [
        int(message.headers["x-outbox-id"]) for message in messages if message.headers["x-outbox-id"] > 1200
    ]
    assert await database.fetchval("SELECT max(id) FROM {schema}.outbox WHERE ordering_key = 'good'") in keyed
    # Of the blocked key only the head was ever tried.
    tried = await database.fetch("SELECT id FROM {schema}.outbox WHERE ordering_key = 'k' AND attempts > 0")
    assert [row["id"] for row in tried] == [901]
    assert daemon.metrics().sum("relay_broker_connections_total") == 1
    assert daemon.stop() == 0
