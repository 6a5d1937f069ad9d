"""The publish side against a RabbitMQ of its own, which is blocked, frozen, restarted and killed under it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from deploy.local.rabbitmq import PrivateRabbit
from relay.broker import BrokerUnavailable
from relay.model import PUBLISHED, Failed, Left, Published
from tests.integration.amqp_proxy import AmqpProxy
from tests.integration.publishing import eventually, kinds, looking_at, publish_side, row, rows

LIMIT = 1_048_576
"""Of the body, in bytes, on the broker's side."""


@pytest.fixture
def exchange() -> str:
    return f"events.{uuid4().hex}"


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateRabbit]:
    with PrivateRabbit(max_message_size=LIMIT) as running:
        yield running


def user_who_may(server: PrivateRabbit, configure: str, write: str) -> str:
    """Make a user with these patterns of permission; return its URL."""
    name = f"u{uuid4().hex[:8]}"
    server.admin.eval(
        f'ok = rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"secret">>, <<"test">>), '
        f'ok = rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"/">>, '
        f'<<"{configure}">>, <<"{write}">>, <<".*">>, <<"test">>).'
    )
    return server.url.replace("guest:guest", f"{name}:secret")


async def test_a_blocked_broker_gets_nothing_more_and_each_row_arrives_once_or_twice(
    server: PrivateRabbit, exchange: str
) -> None:
    """rabbitmq/rabbitmq-server#23, AMQP.md E6 and E7: one duplicate for each retry during an alarm."""
    loop = asyncio.get_running_loop()
    async with (
        AmqpProxy(server.url) as proxy,
        publish_side(proxy.url, exchange) as side,
        looking_at(server.url, exchange) as queues,
    ):
        queue = await queues.bind()
        await side.publish(rows(1))
        await queues.take(queue)
        batch = rows(10)
        with capture_logs() as logs:
            server.admin.set_memory_alarm()
            try:
                began = loop.time()
                verdicts = await side.publish(batch, timeout=1.0)
                assert loop.time() - began < 1.5
                assert kinds(verdicts) == {"Left": 10}
                assert side.broker.blocked
                assert side.broker.connected
                assert "low on memory" in str(side.broker.problem())
                written = len(proxy.sent)
                for _ in range(3):
                    verdicts = await side.publish(batch, timeout=1.0)
                    assert kinds(verdicts) == {"Left": 10}
                    assert "blocked" in str(verdicts[0])
                    with pytest.raises(BrokerUnavailable, match="low on memory"):
                        await side.publisher.ready(0.1)
                assert b"order.placed" not in b"".join(proxy.sent[written:])
            finally:
                server.admin.clear_memory_alarm()
            await side.publisher.ready(5.0)
        assert await side.publish(batch) == [PUBLISHED] * 10
        ids = await queues.ids(queue)
        assert {ids.count(r.id) for r in batch} <= {1, 2}
        assert len(ids) <= 20
        assert side.seen.connections == 1
        assert side.seen.blocked == [True, False]
        assert [entry["event"] for entry in logs] == ["broker_blocked", "broker_unblocked"]


async def test_a_relay_that_starts_or_reconnects_during_an_alarm_publishes_no_row(
    server: PrivateRabbit, exchange: str
) -> None:
    """The broker tells a connection that it is blocked only when it publishes: the first one must not be a row."""
    async with AmqpProxy(server.url) as proxy, looking_at(server.url, exchange) as queues:
        queue = await queues.bind()
        batch = rows(5)
        server.admin.set_memory_alarm()
        try:
            async with publish_side(proxy.url, exchange, ready=False) as side:
                await eventually(lambda: side.broker.blocked, 5.0)
                assert side.broker.connected
                proxy.cut()
                await eventually(lambda: side.seen.connections == 2 and side.broker.blocked, 5.0)
                assert kinds(await side.publish(batch)) == {"Left": 5}
                server.admin.clear_memory_alarm()
                await side.publisher.ready(5.0)
                assert await side.publish(batch) == [PUBLISHED] * 5
                assert side.seen.blocked == [True, False, True, False]
        finally:
            server.admin.clear_memory_alarm()
        assert await queues.ids(queue) == [r.id for r in batch]


async def test_a_body_over_the_brokers_limit_fails_its_row_and_the_other_49_are_published_once(
    server: PrivateRabbit, exchange: str
) -> None:
    """celery/py-amqp#428, rabbitmq/amqp091-go#285."""
    async with (
        publish_side(server.url, exchange) as side,
        looking_at(server.url, exchange) as queues,
    ):
        queue = await queues.bind()
        batch = rows(50)
        batch[20] = row(body=b'"' + b"x" * 2_000_000 + b'"')
        verdicts = await side.publish(batch)
        assert kinds(verdicts) == {"Published": 49, "Failed": 1}
        assert isinstance(verdicts[20], Failed)
        assert "2000002" in verdicts[20].error
        assert await queues.ids(queue) == [r.id for r in batch if r is not batch[20]]
        assert side.seen.connections == 1


async def test_an_exchange_that_refuses_this_user_fails_its_rows_and_the_others_are_published_once(
    server: PrivateRabbit, exchange: str
) -> None:
    url = user_who_may(server, f"^{exchange}$", f"^{exchange}$")
    async with looking_at(server.url, exchange) as queues, publish_side(url, exchange) as side:
        queue = await queues.bind()
        forbidden = f"forbidden.{uuid4().hex}"
        await queues.bind(exchange=forbidden)
        batch = rows(40)
        for place in (3, 17, 30):
            batch[place] = row(exchange=forbidden)
        verdicts = await side.publish(batch)
        assert kinds(verdicts) == {"Published": 37, "Failed": 3}
        assert "ACCESS_REFUSED" in str(verdicts[3])
        assert forbidden in str(verdicts[3])
        assert await queues.ids(queue) == [r.id for r in batch if r.exchange is None]
        with pytest.raises(BrokerUnavailable, match="grant the user 'configure'"):
            async with publish_side(url, forbidden, ready=False) as other:
                await other.publisher.ready(0.5)


async def test_a_frozen_broker_is_left_and_closed_in_time(server: PrivateRabbit, exchange: str) -> None:
    loop = asyncio.get_running_loop()
    async with publish_side(server.url, exchange) as side:
        await side.publish(rows(1))
        server.pause()
        try:
            began = loop.time()
            assert kinds(await side.publish(rows(20), timeout=0.5)) == {"Left": 20}
            assert loop.time() - began < 1.0
            began = loop.time()
            await side.broker.close(1.0)
            assert loop.time() - began < 2.5
        finally:
            server.resume()


async def test_messages_and_publishing_survive_a_restart_of_the_broker(
    server: PrivateRabbit, exchange: str
) -> None:
    """BrighterCommand/Brighter#721, JasperFx/wolverine#1430, dotnetcore/CAP#730."""
    sent: set[int] = set()
    published: set[int] = set()
    stop = asyncio.Event()
    async with publish_side(server.url, exchange) as side:
        async with looking_at(server.url, exchange) as queues:
            queue = await queues.bind()

        async def publishing() -> None:
            while not stop.is_set():
                try:
                    await side.publisher.ready(0.5)
                except BrokerUnavailable:
                    continue
                batch = rows(50)
                sent.update(r.id for r in batch)
                verdicts = await side.publish(batch)
                assert all(isinstance(verdict, Published | Left) for verdict in verdicts)
                published.update(r.id for r, v in zip(batch, verdicts, strict=True) if v is PUBLISHED)
                await asyncio.sleep(0.01)

        with capture_logs() as logs:
            task = asyncio.create_task(publishing())
            # Killed, then stopped as an operator does.
            for end, start in (
                (server.kill, server.start),
                (lambda: server.admin.stop_app(), lambda: server.admin.start_app()),
            ):
                await asyncio.sleep(0.3)
                before = len(published)
                await asyncio.to_thread(end)
                await eventually(lambda: not side.broker.connected, 5.0)
                await asyncio.to_thread(start)
                await eventually(lambda before=before: len(published) > before + 50, 10.0)
            stop.set()
            await task
        async with looking_at(server.url, exchange) as queues:
            delivered = set(await queues.ids(queue))
        assert published <= delivered <= sent
        assert side.seen.connections >= 3
        assert len(logs) <= 12


async def test_channels_closed_from_the_brokers_side_are_replaced_by_the_next_batch(
    server: PrivateRabbit, exchange: str
) -> None:
    """JasperFx/wolverine#1514: only the channel is closed, the sender stays dead."""
    vhost = f"v{uuid4().hex[:8]}"
    url = server.admin.add_vhost(vhost)
    async with publish_side(url, exchange) as side:
        async with looking_at(url, exchange) as queues:
            queue = await queues.bind()
        for _ in range(5):
            assert server.admin.close_channels(vhost) == 1
            await asyncio.sleep(0.05)  # while no row is in flight, which would be blamed
            await side.publisher.ready(2.0)
            assert await side.publish(rows(3)) == [PUBLISHED] * 3
        assert side.seen.connections == 1
        async with looking_at(url, exchange) as queues:
            assert len(await queues.ids(queue)) == 15


@pytest.mark.slow
async def test_twenty_restarts_of_the_broker_in_a_row(server: PrivateRabbit, exchange: str) -> None:
    async with publish_side(server.url, exchange) as side:
        async with looking_at(server.url, exchange) as queues:
            queue = await queues.bind()
        for number in range(20):
            await asyncio.to_thread(server.admin.stop_app)
            await eventually(lambda: not side.broker.connected, 5.0)
            await asyncio.to_thread(server.admin.start_app)
            await side.publisher.ready(5.0)
            assert await side.publish(rows(3)) == [PUBLISHED] * 3, number
        async with looking_at(server.url, exchange) as queues:
            assert len(await queues.ids(queue)) == 60
