"""Order per key: what reaches the broker first of each event is in id order, whatever dies and whatever refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import defaultdict
from pathlib import Path

import aiormq
import pytest

from tests.support.commands import CommandLine

KEYS, EVENTS, UNKEYED, REPLICAS, KILLS = 100, 10_000, 1000, 4, 8
UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"


class Arrivals:
    """Ids in the order of their arrival in a queue, taken slowly enough that the queue is full now and then."""

    def __init__(self) -> None:
        self.ids: list[tuple[int, str]] = []

    @contextlib.asynccontextmanager
    async def collecting(self, broker, queue: str):
        connection = await aiormq.connect(broker.url)
        try:
            channel = await connection.channel()
            await channel.basic_qos(prefetch_count=200)

            async def on_message(message):
                headers = message.header.properties.headers
                self.ids.append((int(headers["x-outbox-id"]), str(headers["x-aggregate-id"])))
                await asyncio.sleep(0.02)
                await channel.basic_ack(message.delivery.delivery_tag)

            await channel.basic_consume(queue, on_message)
            yield self
        finally:
            await connection.close()

    def first(self) -> dict[str, list[int]]:
        """Of each key the ids in the order in which they came first: what a consumer with the inbox applies."""
        seen: set[int] = set()
        arrived: dict[str, list[int]] = defaultdict(list)
        for row_id, key in self.ids:
            if row_id not in seen:
                seen.add(row_id)
                arrived[key].append(row_id)
        return arrived


def inversions(ids: list[int]) -> int:
    """Neighbours in the wrong order."""
    return sum(later < earlier for earlier, later in itertools.pairwise(ids))


async def test_ten_thousand_events_of_a_hundred_keys_arrive_in_order_through_kills_and_nacks(
    database, broker, relay
):
    """gruelbox/transaction-outbox#198, dotnetcore/CAP#1480, MassTransit/MassTransit#3512."""
    queue = await broker.declare(arguments={"x-max-length": 400, "x-overflow": "reject-publish"})
    settings = {"RELAY_TICK": 0.1, "RELAY_NACK_DELAY": 0.1, "RELAY_BATCH_SIZE": 150, "LIVE_AFTER": 60}
    enqueue = """SELECT count({schema}.enqueue_event('order', 'k' || (n % $2), 'order.placed', '{}'::jsonb,
                 ordering_key => 'k' || (n % $2))) FROM generate_series(1, $1::int) AS n"""
    await database.fetch(enqueue, EVENTS // 2, KEYS)
    await database.enqueue_events(UNKEYED)
    async with Arrivals().collecting(broker, queue) as arrivals:
        daemons = [relay(wait_for=None, **settings) for _ in range(REPLICAS)]
        for _ in range(KILLS):
            await database.fetch(enqueue, EVENTS // 2 // KILLS, KEYS)
            await asyncio.sleep(random.uniform(0.2, 0.8))
            victim = daemons.pop(random.randrange(REPLICAS))
            victim.kill()
            daemons.append(relay(wait_for=None, **settings))
        await database.until(UNPUBLISHED, timeout=180)
        async with asyncio.timeout(60):
            while len({row_id for row_id, _ in arrivals.ids}) < EVENTS + UNKEYED:
                await asyncio.sleep(0.05)
        nacked = [line for daemon in daemons for line in daemon.events("rows_nacked")]
        for daemon in daemons:
            await daemon.seen("started")
        assert [daemon.stop() for daemon in daemons] == [0] * REPLICAS
    assert nacked, "no queue refused anything: the test proves less than it says"
    first = arrivals.first()
    assert sum(len(ids) for ids in first.values()) == EVENTS + UNKEYED
    keyed = {key: ids for key, ids in first.items() if key.startswith("k")}
    assert len(keyed) == KEYS
    assert sum(map(inversions, keyed.values())) == 0
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    print(f"{len(arrivals.ids) - EVENTS - UNKEYED} doubles, {len(nacked)} lines about nacks")


@pytest.fixture
def command(database, tmp_path: Path) -> CommandLine:
    return CommandLine("relay", tmp_path, {"DATABASE_URL": database.url, "SECRETS_DIR": "/dev/null"})


async def test_a_row_in_quarantine_blocks_its_key_visibly_and_no_other_until_it_is_released(
    database, broker, relay, command
):
    queue = await broker.declare(key="order.#")
    daemons = [relay(RELAY_MAX_ATTEMPTS=2, RELAY_RETRY_BASE=0.2, RELAY_RETRY_CAP=0.2) for _ in range(2)]
    enqueue = """SELECT count({schema}.enqueue_event('order', $1, $2, '{}'::jsonb, ordering_key => $1))
                 FROM generate_series(1, $3::int) AS n"""
    await database.fetch(enqueue, "bad", "order.placed", 3)
    await database.fetch(enqueue, "bad", "nowhere", 1)  # row 4
    await database.fetch(enqueue, "bad", "order.placed", 20)
    await database.fetch(enqueue, "good", "order.placed", 20)
    await database.until("SELECT quarantined_at IS NOT NULL FROM {schema}.outbox WHERE id = 4")
    for _ in range(3):  # whatever comes later: the key stands, all else flows
        await database.fetch(enqueue, "bad", "order.placed", 5)
        await database.fetch(enqueue, "good", "order.placed", 5)
        await database.enqueue_events(10)
        await database.until(
            "SELECT count(*) = 0 FROM {schema}.outbox "
            "WHERE published_at IS NULL AND ordering_key IS DISTINCT FROM 'bad'"
        )
    open_rows = "SELECT id, attempts FROM {schema}.outbox WHERE published_at IS NULL ORDER BY id"
    stuck = await database.fetch(open_rows)
    assert [(row["id"], row["attempts"]) for row in stuck] == [
        (4, 2), *((row["id"], 0) for row in stuck[1:])
    ]  # fmt: skip
    assert len(stuck) == 36

    status = command.ok("status", "--json").json
    assert "bad" in str(status), status
    assert '"good"' not in str(status)

    await broker.bind(key="nowhere")
    command.ok("quarantine", "release", "--id", "4", "--yes")
    await database.until(UNPUBLISHED)
    messages = await broker.take(queue, count=3 + 36 + 35 + 30)
    ids = [m.headers["x-outbox-id"] for m in messages if m.headers["x-aggregate-id"] == "bad"]
    assert len(messages) == 104
    assert ids == sorted(ids)
    assert [daemon.stop() for daemon in daemons] == [0, 0]


async def test_a_nacked_row_waits_and_the_row_behind_it_waits_too(database, broker, relay):
    """ow00us/sb11-mopl-team1#266: A fails and waits for its retry, B of the same key overtakes."""
    await broker.declare("narrow", "a.#", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await broker.declare("wide", "b.#")
    await broker.publish(b"{}", "a.filler", message_id="filler")
    daemon = relay(RELAY_NACK_DELAY=0.3)
    enqueue = "SELECT {schema}.enqueue_event('order', '1', $1, '{}'::jsonb, ordering_key => 'k')"
    await database.fetch(enqueue, "a.first")
    await database.fetch(enqueue, "b.second")
    await database.until("SELECT last_error LIKE 'nack%' FROM {schema}.outbox WHERE id = 1")
    await daemon.seen("rows_nacked")
    await asyncio.sleep(1.0)
    assert broker.depth("wide") == 0, "B overtook A"
    assert (await broker.take("narrow", count=1))[0].message_id == "filler"
    await database.until(UNPUBLISHED)
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.outbox") == 0
    assert daemon.stop() == 0
