"""The publish side when the way to the broker fails: lost, silent, unreachable, misconfigured."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from deploy.local.certificates import Certificates
from relay.broker import BrokerUnavailable
from relay.model import PUBLISHED, Left
from tests.integration.amqp_proxy import AmqpProxy
from tests.integration.publishing import Queues, eventually, looking_at, publish_side, row, rows
from tests.support.broker import Broker


@pytest.fixture(autouse=True)
def _quiet_library() -> Iterator[None]:
    """As in the daemon (common.logs.QUIET); else pytest keeps each record with its traceback, and that is a leak."""
    logger = logging.getLogger("aiormq")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def exchange() -> str:
    return f"events.{uuid4().hex}"


@pytest.fixture
async def queues(broker: Broker, exchange: str) -> AsyncIterator[Queues]:
    async with looking_at(broker.url, exchange) as looking:
        yield looking


def all_left(verdicts: list[Any]) -> bool:
    return bool(verdicts) and all(isinstance(verdict, Left) for verdict in verdicts)


async def test_a_connection_cut_in_flight_leaves_its_rows_and_the_next_batch_goes_through(
    broker: Broker, exchange: str, queues: Queues
) -> None:
    async with AmqpProxy(broker.url) as proxy, publish_side(proxy.url, exchange) as side:
        queue = await queues.bind()
        await side.publish(rows(1))
        proxy.swallow = lambda frame: getattr(frame, "name", "") == "Basic.Ack"
        batch = rows(20)
        publishing = asyncio.create_task(side.publish(batch))
        await asyncio.sleep(0.05)
        proxy.cut()
        began = asyncio.get_running_loop().time()
        assert all_left(await publishing)
        assert asyncio.get_running_loop().time() - began < 1.0  # not at the deadline: at once
        proxy.swallow = lambda _: False
        await side.publisher.ready(2.0)
        assert await side.publish(batch) == [PUBLISHED] * 20
        assert set(await queues.ids(queue)) >= {r.id for r in batch}


async def test_twenty_lost_connections_in_a_row_each_heal_within_one_backoff_step(
    broker: Broker, exchange: str, queues: Queues
) -> None:
    """JasperFx/wolverine#1430, mosquito/aio-pika#577: dead after a restart until the process restarts."""
    async with AmqpProxy(broker.url) as proxy, publish_side(proxy.url, exchange) as side:
        queue = await queues.bind()
        sent = []
        with capture_logs() as logs:
            for _ in range(20):
                proxy.cut()
                await eventually(lambda: not side.broker.connected, 2.0)
                await side.publisher.ready(2.0)
                batch = rows(3)
                assert await side.publish(batch) == [PUBLISHED] * 3
                sent += [r.id for r in batch]
        assert await queues.ids(queue) == sent
        assert 2 <= len(logs) < 40  # lost, connected; what follows at once is counted
        assert {entry["event"] for entry in logs} == {"broker_unavailable", "broker_connected"}
        assert proxy.open_connections == 1


async def test_a_broker_that_is_away_burns_nothing_and_is_said_once(
    broker: Broker, exchange: str, queues: Queues
) -> None:
    """zarusz/SlimMessageBus#459; AMQP.md E8."""
    loop = asyncio.get_running_loop()
    async with AmqpProxy(broker.url) as proxy, publish_side(proxy.url, exchange) as side:
        queue = await queues.bind()
        batch = rows(5)
        with capture_logs() as logs:
            proxy.refuse = True
            proxy.cut()
            await eventually(lambda: not side.broker.connected, 2.0)
            attempts = proxy.accepted
            began = loop.time()
            assert all_left(await side.publish(batch))
            assert loop.time() - began < 0.1
            with pytest.raises(BrokerUnavailable):
                await side.publisher.ready(0.3)
            await eventually(lambda: proxy.accepted - attempts >= 8, 5.0)
            assert side.broker.problem() is not None
            assert len(logs) == 1
            proxy.refuse = False
            await side.publisher.ready(2.0)
        assert [entry["event"] for entry in logs] == ["broker_unavailable", "broker_connected"]
        assert await side.publish(batch) == [PUBLISHED] * 5
        assert await queues.ids(queue) == [r.id for r in batch]


async def test_a_silent_broker_ends_the_batch_at_its_deadline_and_the_connection_soon_after(
    broker: Broker, exchange: str, queues: Queues
) -> None:
    """mosquito/aio-pika#46, ag2ai/faststream#1579: publish hangs for ever while packets are dropped."""
    loop = asyncio.get_running_loop()
    async with AmqpProxy(broker.url) as proxy, publish_side(proxy.url, exchange, connect_timeout=0.5) as side:
        queue = await queues.bind()
        await side.publish(rows(1))
        proxy.deaf = True
        batch = rows(5)
        began = loop.time()
        assert all_left(await side.publish(batch, timeout=0.5))
        assert loop.time() - began < 0.8
        began = loop.time()
        while side.broker.connected:  # heartbeats would take a minute to notice
            with pytest.raises(BrokerUnavailable):
                await side.publisher.ready(0.5)
        assert loop.time() - began < 4.0
        proxy.hear()
        await side.publisher.ready(3.0)
        assert await side.publish(batch) == [PUBLISHED] * 5
        assert set(await queues.ids(queue)) >= {r.id for r in batch}


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
async def test_a_black_hole_bounds_connecting_and_closing(scheme: str) -> None:
    """Packets dropped, not refused: neither TCP nor TLS nor AMQP answers."""
    loop = asyncio.get_running_loop()
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    url = f"{scheme}://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        with capture_logs() as logs:
            async with publish_side(url, "events", ready=False, connect_timeout=0.3) as side:
                began = loop.time()
                with pytest.raises(BrokerUnavailable, match=r"no answer within 0\.3 s"):
                    await side.publisher.ready(1.0)
                assert loop.time() - began < 1.2
                await eventually(lambda: len(held) >= 3, 5.0)
                began = loop.time()
            assert loop.time() - began < 1.5
        assert [entry["event"] for entry in logs] == ["broker_unavailable"]
    finally:
        server.close()
        for writer in held:
            writer.transport.abort()


async def test_close_is_bounded_when_the_broker_is_frozen_with_a_full_socket(
    broker: Broker, exchange: str, queues: Queues
) -> None:
    await queues.bind()
    async with AmqpProxy(broker.url) as proxy:
        before = len(asyncio.all_tasks())
        async with publish_side(proxy.url, exchange) as side:
            await side.publish(rows(1))
            proxy.deaf = True
            big = [row(body=b'"' + b"x" * 200_000 + b'"') for _ in range(100)]
            assert all_left(await side.publish(big, timeout=0.3))
            # publish_side asserts that closing takes less than 4.5 s
        await asyncio.sleep(0.1)
        left = [task for task in asyncio.all_tasks() if "amqp_proxy" not in repr(task)]
        assert len(left) <= before, left


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in _fds())


def _fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        found.append(fd)
    return found


async def _reconnect(count: int, url: str, exchange: str) -> None:
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with (
        AmqpProxy(url) as proxy,
        publish_side(proxy.url, exchange, backoff_base=0.001, backoff_cap=0.01) as side,
    ):
        marks: list[tuple[int, int, int]] = []
        for number in range(count):
            before = side.seen.connections
            proxy.cut()
            await eventually(lambda before=before: side.seen.connections > before, 10.0)
            await side.publisher.ready(5.0)
            if number % (count // 5) == count // 5 - 1:
                gc.collect()
                await asyncio.sleep(0.1)
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                marks.append((len(asyncio.all_tasks()), sockets(), memory))
        tasks, open_sockets, memory = zip(*marks, strict=True)
        assert max(tasks) - min(tasks) <= 2, tasks
        assert max(open_sockets) - min(open_sockets) <= 2, open_sockets
        assert memory[-1] - memory[0] < 4096, memory  # kB
    gc.collect()
    await asyncio.sleep(0.05)
    assert errors == []


async def test_many_reconnects_leak_no_task_no_socket_and_no_memory(broker: Broker, exchange: str) -> None:
    """mosquito/aio-pika#668, #433, #628."""
    await _reconnect(100, broker.url, exchange)


@pytest.mark.slow
async def test_five_hundred_reconnects_leak_no_task_no_socket_and_no_memory(
    broker: Broker, exchange: str
) -> None:
    await _reconnect(500, broker.url, exchange)


async def test_an_exchange_of_another_type_is_a_clear_error_and_heals_when_it_is_put_right(
    exchange: str, broker: Broker, queues: Queues
) -> None:
    await queues.channel.declare_exchange(exchange, "fanout", durable=True)
    with capture_logs() as logs:
        async with publish_side(broker.url, exchange, ready=False) as side:
            with pytest.raises(
                BrokerUnavailable, match=r"not a durable topic exchange.*inequivalent arg 'type'"
            ):
                await side.publisher.ready(0.5)
            assert exchange in (side.broker.problem() or "")
            assert all_left(await side.publish(rows(1)))
            await queues.channel.exchange_delete(exchange)
            await side.publisher.ready(2.0)
    assert [entry["event"] for entry in logs] == ["broker_unavailable", "broker_connected"]


async def test_an_exchange_that_is_not_ours_to_declare_must_exist(
    exchange: str, broker: Broker, queues: Queues
) -> None:
    async with publish_side(broker.url, exchange, ready=False, declare_exchange=False) as side:
        with pytest.raises(BrokerUnavailable, match="declaring it is turned off"):
            await side.publisher.ready(0.5)
        await queues.channel.declare_exchange(exchange, "direct", durable=False)
        await side.publisher.ready(2.0)
        await (await queues.channel.get_exchange(exchange)).delete()


@pytest.mark.parametrize("name", ["", "amq.topic"])
async def test_the_brokers_own_exchanges_are_not_declared(name: str, broker: Broker, queues: Queues) -> None:
    queue = await queues.bind()
    async with publish_side(broker.url, name) as side:
        if name == "":
            assert await side.publish([row(routing_key=queue)]) == [PUBLISHED]


@pytest.mark.parametrize("name", ["bad\x00name", "y" * 200])
async def test_an_exchange_name_that_the_library_refuses_is_a_problem_not_a_crash(
    name: str, broker: Broker
) -> None:
    async with publish_side(broker.url, name, ready=False) as side:
        with pytest.raises(BrokerUnavailable, match="exchange"):
            await side.publisher.ready(0.3)


async def test_a_wrong_password_is_said_without_saying_it(broker: Broker) -> None:
    url = (
        broker.url.replace("guest:guest", "guest:s3cret-word") if "guest:guest" in broker.url else broker.url
    )
    assert "s3cret-word" in url, "the test must know the fixture's user"
    with capture_logs() as logs:
        async with publish_side(url, "events", ready=False) as side:
            with pytest.raises(BrokerUnavailable, match=r"ACCESS_REFUSED|Authentication"):
                await side.publisher.ready(0.5)
    assert len(logs) == 1
    assert "s3cret-word" not in str(logs)


async def test_whatever_ends_the_keeper_is_raised_once_and_it_starts_again(
    broker: Broker, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fedify-dev/fedify#581: one exception ends the loop for good."""

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr("relay.broker.connect", broken)
    async with publish_side(broker.url, exchange, ready=False) as side:
        await asyncio.sleep(0.01)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="not foreseen"):
            await side.publisher.ready(1.0)
        await side.publisher.ready(2.0)


async def test_tls_with_a_client_certificate(
    broker: Broker, exchange: str, certificates: Certificates
) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    server.load_cert_chain(certificates.good.certificate, certificates.good.key)
    server.verify_mode = ssl.CERT_REQUIRED
    client, without = (ssl.create_default_context(cafile=certificates.ca) for _ in range(2))
    stranger = ssl.create_default_context(cafile=certificates.other_ca)
    for context in (client, stranger):
        context.load_cert_chain(certificates.client.certificate, certificates.client.key)
    async with AmqpProxy(broker.url, tls=server) as proxy:
        async with publish_side(proxy.url, exchange, ssl_context=client) as side:
            async with looking_at(broker.url, exchange) as queues:
                queue = await queues.bind()
                batch = rows(10)
                assert await side.publish(batch) == [PUBLISHED] * 10
                assert await queues.ids(queue) == [r.id for r in batch]
            proxy.cut()
            await eventually(lambda: not side.broker.connected, 2.0)
            await side.publisher.ready(2.0)
            proxy.deaf = True
        proxy.hear()
        for context in (without, stranger):
            async with publish_side(proxy.url, exchange, ssl_context=context, ready=False) as side:
                with pytest.raises(BrokerUnavailable):
                    await side.publisher.ready(0.5)
                await eventually(lambda side=side: "ot connected yet" not in str(side.broker.problem()))
