"""The fixtures themselves: each test has servers' worth of its own, and leaves nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.broker import Broker
from tests.support.database import Database, assert_no_session_left


async def test_database_has_the_newest_schema_and_is_empty(database: Database) -> None:
    async with database.session() as connection:
        assert await connection.fetchval("SELECT count(*) FROM relay_drain.outbox") == 0
        assert await connection.fetchval("SHOW server_version_num") is not None
    assert database.value("SELECT count(*) FROM relay_drain.notification_deliveries") == 0


@pytest.mark.parametrize("number", range(3))
def test_database_is_new_for_each_test(database: Database, number: int) -> None:
    assert database.value("SELECT count(*) FROM relay_drain.inbox") == 0
    database.run("SELECT relay_drain.accept_event('test', gen_random_uuid())")


async def test_leak_guard_names_the_session_that_was_left(database: Database) -> None:
    connection = await database.connect()
    with pytest.raises(AssertionError, match=str(connection.get_server_pid())):
        assert_no_session_left(database, patience=0.1)
    await connection.close()
    assert_no_session_left(database)


async def test_broker_gives_each_test_its_own_vhost(broker: Broker) -> None:
    queue = await broker.declare()
    await broker.publish(b"1", "order.created", message_id="a", delivery_mode=2)
    assert [message.message_id for message in await broker.peek(queue)] == ["a"]
    assert broker.depth(queue) == 1
    (message,) = await broker.take(queue, 1)
    assert (message.body, message.routing_key, message.exchange) == (b"1", "order.created", "events")
    assert message.properties.delivery_mode == 2
    assert broker.depth(queue) == 0


async def test_take_returns_what_came_beyond_the_expected_count(broker: Broker) -> None:
    queue = await broker.declare()
    for body in (b"1", b"2", b"3"):
        await broker.publish(body, "k")
    assert [message.body for message in await broker.take(queue, 2)] == [b"1", b"2", b"3"]


async def test_take_comes_back_when_too_few_messages_come(broker: Broker) -> None:
    queue = await broker.declare()
    began = time.monotonic()
    assert await broker.take(queue, 1, timeout=0.5) == []
    assert time.monotonic() - began < 5


async def test_broker_closes_connections_and_channels_from_its_side(broker: Broker) -> None:
    async with broker.channel() as first:
        closed = asyncio.get_running_loop().create_future()
        first.closing.add_done_callback(lambda future: closed.set_result(future.exception()))
        assert broker.connections() == 1
        assert broker.close_channels() == 1
        error = await asyncio.wait_for(closed, 5)
        assert "closed by a test" in str(error)
        assert broker.connections() == 1
        assert broker.close_connections() == 1
    await asyncio.sleep(0.05)
    assert broker.connections() == 0
