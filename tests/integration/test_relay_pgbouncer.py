"""relay behind pgbouncer in transaction mode, with fewer sessions on the server than it has connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import asyncpg
import pytest
from pydantic import SecretStr

from common.database import connect_arguments
from common.settings import SharedSettings
from migrations.__main__ import set_wakeup
from tests.support.commands import CommandLine
from tests.support.pgbouncer import MISSING, PROGRAM, transaction_pooler

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

UNPUBLISHED = "SELECT count(*) = 0 FROM {schema}.outbox WHERE published_at IS NULL"
BEHIND = {"DATABASE_STATEMENT_CACHE": 0, "OBSERVE_INTERVAL": 1}


@pytest.fixture
def pooled(database) -> Iterator[str]:
    """URL of the test's database by way of a pgbouncer with two sessions."""
    with transaction_pooler(database.admin.port, sessions=2) as port:
        yield database.through(port)


async def test_two_relays_with_many_lanes_share_two_sessions(database, broker, relay, pooled):
    """MagicStack/asyncpg#198, #121: prepared statements of another client, or of nobody."""
    await broker.declare()
    await database.enqueue_events(3000)
    await database.enqueue_events(1000, key="'k' || (n % 50)")
    await database.fetch(
        "UPDATE {schema}.outbox SET published_at = now() - interval '30 days' WHERE id <= 500"
    )
    daemons = [
        relay(
            DATABASE_URL=pooled,
            RELAY_LANES=3,
            RELAY_PRUNE_INTERVAL=0.2,
            RELAY_PRUNE_BATCH=100,
            DATABASE_POOL_SIZE=4,
            **BEHIND,
        )
        for _ in range(2)
    ]
    for _ in range(10):
        await database.enqueue_events(100)
        await asyncio.sleep(0.2)
    await database.until("SELECT count(*) = 4500 AND count(published_at) = 4500 FROM {schema}.outbox")
    assert len(await broker.take(count=4500)) == 4500
    await asyncio.sleep(3.0)  # three looks of each observer
    for daemon in daemons:
        said = {line["event"] for line in daemon.lines}
        assert not said & {"batch_failed", "prune_failed", "observation_failed"}, daemon.tail()
        assert daemon.get("/readyz")[0] == 200
        assert daemon.metrics().value("outbox_unpublished", source="fresh") is not None
    assert [daemon.stop() for daemon in daemons] == [0, 0]


async def test_backends_terminated_behind_the_pooler_are_survived(database, broker, relay, pooled):
    await broker.declare()
    daemon = relay(DATABASE_URL=pooled, RELAY_TICK=0.02, RELAY_BACKOFF_CAP=1, **BEHIND)
    for _ in range(10):
        await database.enqueue_events(50)
        await asyncio.sleep(random.uniform(0, 0.05))
        await asyncio.to_thread(database.terminate_sessions)
    await database.until(UNPUBLISHED)
    assert len({message.message_id for message in await broker.take(count=500)}) == 500
    assert daemon.stop() == 0


async def test_the_wakeup_listens_past_the_pooler(database, broker, relay, pooled):
    """LISTEN does not work in transaction mode: it has a URL of its own."""
    await broker.declare()
    set_wakeup(database.url, database.schema, True)
    daemon = relay(
        DATABASE_URL=pooled, RELAY_TICK=30, RELAY_WAKEUP="true", RELAY_LISTEN_URL=database.url, **BEHIND
    )
    await daemon.seen("wakeup_listening")
    await daemon.seen("broker_connected")
    for _ in range(5):
        await database.enqueue_events(1)
        await database.until(UNPUBLISHED, timeout=10)
    assert daemon.stop() == 0


async def test_the_commands_work_through_the_pooler(database, broker, pooled, tmp_path):
    await broker.declare()
    await database.enqueue_events(20)
    command = CommandLine(
        "relay",
        tmp_path,
        {
            "DATABASE_URL": pooled,
            "DATABASE_STATEMENT_CACHE": "0",
            "RELAY_AMQP_URL": broker.url,
            "SECRETS_DIR": "/dev/null",
        },
    )
    assert command.ok("status", "--json").json
    command.ok("check")
    command.ok("prune", "--yes")


async def test_a_statement_outside_a_transaction_is_answered_as_itself(database, pooled):
    """Its parse and its execution are two exchanges, and the pooler may send them to two sessions."""
    settings = SharedSettings(
        database_url=SecretStr(pooled), database_schema=database.schema, database_statement_cache=0
    )

    async def ask(number: int) -> None:
        connection = await asyncpg.connect(**connect_arguments(settings, f"client-{number}"))
        try:
            for n in range(60):
                assert await connection.fetchval(f"SELECT 'client {number}, {n}'") == f"client {number}, {n}"
                assert await connection.fetchrow("SELECT $1::int, $2::text", n, str(number)) == (
                    n,
                    str(number),
                )
                assert await connection.fetch(f"SELECT {number} AS a") == [(number,)]
                await connection.execute("SELECT set_config('application_name', $1, true)", f"{number}")
        finally:
            await connection.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(ask(number) for number in range(8)))
