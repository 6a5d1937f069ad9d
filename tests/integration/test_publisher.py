"""The publish side against a real RabbitMQ: faults of rows and queues (AMQP.md E1 to E10, FAULTS.md Relay)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from aio_pika import DeliveryMode

from relay.message import MessageConfig
from relay.model import PUBLISHED, Failed, Left, Nacked, Published, Rejected, Unroutable
from relay.publish import Publisher
from tests.integration.amqp_proxy import AmqpProxy
from tests.integration.publishing import Queues, Side, kinds, looking_at, publish_side, row, rows
from tests.support.broker import Broker


@pytest.fixture
def exchange() -> str:
    return f"events.{uuid4().hex}"


@pytest.fixture
async def side(broker: Broker, exchange: str) -> AsyncIterator[Side]:
    async with publish_side(broker.url, exchange) as running:
        yield running


@pytest.fixture
async def queues(broker: Broker, exchange: str, side: Side) -> AsyncIterator[Queues]:
    async with looking_at(broker.url, exchange) as looking:
        yield looking
        await looking.channel.exchange_delete(exchange) if hasattr(
            looking.channel, "exchange_delete"
        ) else None


async def test_a_batch_is_one_write_one_wait_and_each_message_once(side: Side, queues: Queues) -> None:
    queue = await queues.bind()
    await side.publish(rows(1))  # the first publish to an exchange goes alone
    await queues.take(queue)
    link = side.broker.link
    assert link is not None
    writes: list[int] = []
    write = link.write
    link.write = lambda data: (writes.append(len(data)), write(data))[1]  # type: ignore[method-assign]
    batch = rows(100)
    assert await side.publish(batch) == [PUBLISHED] * 100
    assert len(writes) == 1
    assert await queues.ids(queue) == [r.id for r in batch]


async def test_no_binding_the_row_is_not_published_and_rebinding_delivers_it(
    side: Side, queues: Queues
) -> None:
    """dotnetcore/CAP#1508, mosquito/aio-pika#411: no queue bound, broker drops, row says done."""
    queue = await queues.bind()
    await queues.unbind(queue)
    lost = row()
    (verdict,) = await side.publish([lost])
    assert isinstance(verdict, Unroutable)
    assert "NO_ROUTE" in verdict.error
    assert "order.placed" in verdict.error
    assert side.seen.unroutable == [(side.exchange, False)]
    topic = await queues.channel.get_exchange(side.exchange)
    await (await queues.channel.get_queue(queue)).bind(topic, "#")
    assert await side.publish([lost], one_at_a_time=True) == [PUBLISHED]
    assert await queues.ids(queue) == [lost.id]


async def test_unroutable_counts_as_published_when_the_setting_says_so(broker: Broker, exchange: str) -> None:
    async with publish_side(broker.url, exchange, unroutable="accept") as side:
        assert await side.publish(rows(3)) == [PUBLISHED] * 3
        assert side.seen.unroutable == [(exchange, True)] * 3


async def test_of_messages_with_one_message_id_the_lost_one_is_told_not_a_delivered_one(
    side: Side, queues: Queues
) -> None:
    """AMQP.md E2, mosquito/aio-pika#689: the library credits the wrong message."""
    queue = await queues.bind("found")
    await side.publish([row(routing_key="found")])
    await queues.take(queue)
    event = uuid4()
    for lost_at in range(3):
        keys = ["lost" if place == lost_at else "found" for place in range(3)]
        batch = [row(event_id=event, routing_key=key) for key in keys]
        verdicts = await side.publish(batch)
        assert [isinstance(verdict, Unroutable) for verdict in verdicts] == [key == "lost" for key in keys]
        assert await queues.ids(queue) == [r.id for r, key in zip(batch, keys, strict=True) if key == "found"]


async def test_a_missing_exchange_fails_its_row_and_the_other_499_are_published_once(
    side: Side, queues: Queues
) -> None:
    """MassTransit/MassTransit#6216, namastack/namastack-outbox#371."""
    queue = await queues.bind()
    bad = row(exchange="no.such.exchange")
    batch = [bad, *rows(499)]
    verdicts = await side.publish(batch)
    assert isinstance(verdicts[0], Failed)
    assert "no exchange 'no.such.exchange'" in verdicts[0].error
    assert verdicts[1:] == [PUBLISHED] * 499
    assert await queues.ids(queue) == [r.id for r in batch[1:]]
    assert side.seen.connections == 1


async def test_500_rows_to_a_missing_exchange_cost_one_channel(side: Side, queues: Queues) -> None:
    opened = side.seen.channels
    verdicts = await side.publish(rows(500, exchange="no.such.exchange"))
    assert kinds(verdicts) == {"Failed": 500}
    assert side.seen.channels - opened <= 1
    assert side.seen.flights == 1


async def test_an_exchange_that_is_deleted_while_the_relay_runs_fails_its_rows_only(
    side: Side, queues: Queues
) -> None:
    queue = await queues.bind()
    gone = f"gone.{uuid4().hex}"
    other = await queues.bind(exchange=gone)
    assert await side.publish([*rows(2), *rows(2, exchange=gone)]) == [PUBLISHED] * 4
    await (await queues.channel.get_exchange(gone)).delete()
    before = await queues.ids(queue) + await queues.ids(other)
    assert len(before) == 4
    batch = [r for pair in zip(rows(20), rows(20, exchange=gone), strict=True) for r in pair]
    verdicts = await side.publish(batch)
    assert verdicts[0::2] == [PUBLISHED] * 20
    assert all(isinstance(verdict, Failed) for verdict in verdicts[1::2])
    delivered = await queues.ids(queue)
    assert set(delivered) == {
        r.id for r in batch[0::2]
    }  # some twice: they were in flight when the channel closed
    again = rows(20)
    assert await side.publish(again) == [PUBLISHED] * 20  # and from now on once each
    assert await queues.ids(queue) == [r.id for r in again]


async def test_a_200_kb_header_is_found_before_it_costs_the_connection(side: Side, queues: Queues) -> None:
    """AMQP.md E4, rabbitmq/rabbitmq-java-client#362."""
    queue = await queues.bind()
    batch = rows(50)
    batch[7] = row(headers='{"big": "' + "x" * 200_000 + '"}')
    verdicts = await side.publish(batch)
    assert isinstance(verdicts[7], Rejected)
    assert "131072" in verdicts[7].error
    assert kinds(verdicts) == {"Published": 49, "Rejected": 1}
    assert await queues.ids(queue) == [r.id for r in batch if r is not batch[7]]
    assert side.seen.connections == 1


async def test_a_frame_that_is_just_full_is_taken_by_the_broker(side: Side, queues: Queues) -> None:
    queue = await queues.bind()
    link = side.broker.link
    assert link is not None
    room = link.frame_max - 8
    size = next(
        size
        for size in range(room, 0, -1)
        if not isinstance(
            side.publisher._encoder.encode(row(aggregate_id="x" * size), link.frame_max), Rejected
        )
    )
    assert (
        await side.publish([row(aggregate_id="x" * size), row(body=b"1" * (link.frame_max * 2 + 5))])
        == [PUBLISHED] * 2
    )
    first, second = await queues.take(queue)
    assert len(str(first.headers["x-aggregate-id"])) == size
    assert len(second.body) == link.frame_max * 2 + 5


async def test_rows_that_can_never_be_sent_harm_no_other(side: Side, queues: Queues) -> None:
    """AMQP.md E5: key over 255 bytes, type over 255 bytes, integer header of 2**63."""
    queue = await queues.bind()
    good = rows(3)
    bad = [
        row(routing_key="ü" * 128),
        row(event_type="x" * 256, routing_key="k"),
        row(headers='{"n": 9223372036854775808}'),
        row(body=b"no json"),
    ]
    verdicts = await side.publish([good[0], *bad, *good[1:]])
    assert kinds(verdicts) == {"Published": 3, "Rejected": 4}
    assert await queues.ids(queue) == [r.id for r in good]


async def test_every_kind_of_header_reaches_the_consumer_as_it_was(side: Side, queues: Queues) -> None:
    queue = await queues.bind()
    await side.publish(
        [
            row(
                headers='{"a": null, "b": true, "c": [1, {"d": "e"}], "f": -9223372036854775808, "g": 0.1,'
                ' "h": {}, "i": 40000, "j": 4000000000, "": "empty name", "ü": "ß"}'
            )
        ]
    )
    (message,) = await queues.take(queue)
    own = {"x-outbox-id", "x-aggregate-id", "x-aggregate-type"}
    assert {name: value for name, value in message.headers.items() if name not in own} == {
        "a": None, "b": True, "c": [1, {"d": "e"}], "f": -(2**63), "g": 0.1, "h": {}, "i": 40000,
        "j": 4000000000, "": "empty name", "ü": "ß",
    }  # fmt: skip


async def test_messages_are_persistent_and_carry_the_event(side: Side, queues: Queues) -> None:
    """AMQP.md E10, BrighterCommand/Brighter#721."""
    queue = await queues.bind()
    sent = row(headers='{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}')
    await side.publish([sent])
    (message,) = await queues.take(queue)
    assert message.delivery_mode == DeliveryMode.PERSISTENT
    assert (message.message_id, message.type, message.app_id) == (str(sent.event_id), "order.placed", "relay")
    assert (message.headers["x-aggregate-type"], message.headers["x-aggregate-id"]) == ("order", "1")
    assert message.headers["traceparent"] == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert message.timestamp == sent.created_at.replace(microsecond=0)


async def test_a_full_queue_nacks_its_rows_and_the_others_are_published(side: Side, queues: Queues) -> None:
    full = await queues.bind("full", arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    queue = await queues.bind("fine")
    batch = [row(routing_key=key) for key in ["full", "fine"] * 6]
    verdicts = await side.publish(batch)
    assert all(isinstance(verdict, Published) for verdict in verdicts[1::2])
    assert [type(verdict) for verdict in verdicts[0::2]][2:] == [Nacked] * 4
    assert await queues.ids(queue) == [r.id for r in batch[1::2]]
    assert len(await queues.take(full)) == 2
    assert side.seen.connections == 1


async def test_a_nacked_row_holds_back_its_key_until_it_is_through(side: Side, queues: Queues) -> None:
    """ow00us/sb11-mopl-team1#266: A fails and waits, B of the same key overtakes."""
    queue = await queues.bind("#", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    a, b, other = row(ordering_key="k"), row(ordering_key="k"), row(ordering_key="l")
    assert await side.publish([row()]) == [PUBLISHED]  # the queue is full now
    verdicts = await side.publish([a, other, b])
    assert [type(verdict) for verdict in verdicts] == [Nacked, Nacked, Left]
    await queues.take(queue)
    assert await side.publish([a]) == [PUBLISHED]
    assert await queues.ids(queue) == [a.id]
    assert await side.publish([b]) == [PUBLISHED]


async def test_rows_of_a_key_arrive_in_order_and_keys_go_side_by_side(side: Side, queues: Queues) -> None:
    queue = await queues.bind()
    batch = [row(ordering_key=f"key-{number % 10}") for number in range(100)]
    assert await side.publish(batch) == [PUBLISHED] * 100
    delivered = await queues.ids(queue)
    assert sorted(delivered) == [r.id for r in batch]
    for key in range(10):
        of_key = {r.id for r in batch if r.ordering_key == f"key-{key}"}
        assert [i for i in delivered if i in of_key] == sorted(of_key)
    assert side.seen.flights <= 12


async def test_a_failing_row_holds_back_its_own_key_and_no_other(side: Side, queues: Queues) -> None:
    queue = await queues.bind("found")
    batch = [
        row(routing_key="lost" if number == 1 else "found", ordering_key="ab"[number % 2])
        for number in range(8)
    ]
    verdicts = await side.publish(batch)
    assert [type(verdict) for verdict in verdicts[1::2]] == [Unroutable, Left, Left, Left]
    assert verdicts[0::2] == [PUBLISHED] * 4
    assert f"behind row {batch[1].id}" in str(verdicts[3])
    assert await queues.ids(queue) == [r.id for r in batch[0::2]]


async def test_suspects_go_one_at_a_time(side: Side, queues: Queues) -> None:
    queue = await queues.bind()
    batch = [row(), row(exchange="no.such.exchange"), row()]
    verdicts = await side.publish(batch, one_at_a_time=True)
    assert [type(verdict) for verdict in verdicts] == [Published, Failed, Published]
    assert await queues.ids(queue) == [batch[0].id, batch[2].id]


async def test_several_lanes_share_a_connection_and_nothing_else(
    broker: Broker, side: Side, queues: Queues
) -> None:
    """One lane's bad rows close its own channel, never another's."""
    queue = await queues.bind()
    lanes = [Publisher(side.broker, MessageConfig(exchange=side.exchange)) for _ in range(4)]
    sent: list[int] = []

    async def lane(publisher: Publisher, bad: bool) -> None:
        for _ in range(10):
            batch = [row(exchange="no.such.exchange")] if bad else rows(20)
            verdicts = await publisher.publish(batch, asyncio.get_running_loop().time() + 5)
            assert kinds(verdicts) == ({"Failed": 1} if bad else {"Published": 20})
            sent.extend([] if bad else [r.id for r in batch])

    await asyncio.gather(*[lane(publisher, number == 0) for number, publisher in enumerate(lanes)])
    assert sorted(await queues.ids(queue)) == sorted(sent)
    assert side.seen.connections == 1


async def test_swallowed_confirms_end_the_batch_at_its_deadline_and_the_next_one_works(
    broker: Broker, exchange: str
) -> None:
    """OpenSDN-io/community#129, mosquito/aio-pika#671: the confirm never comes; the channel stays bad."""
    async with (
        AmqpProxy(broker.url) as proxy,
        publish_side(proxy.url, exchange) as side,
        looking_at(broker.url, exchange) as queues,
    ):
        queue = await queues.bind()
        await side.publish(rows(1))
        loop = asyncio.get_running_loop()
        confirmed = rows(1)
        silent = rows(1)
        seen = 0

        def after_the_first(frame: Any) -> bool:
            nonlocal seen
            seen += getattr(frame, "name", "") == "Basic.Ack"
            return getattr(frame, "name", "") == "Basic.Ack" and seen > 1

        proxy.swallow = after_the_first
        began = loop.time()
        verdicts = await side.publish([*confirmed, *silent], timeout=0.5, one_at_a_time=True)
        assert 0.4 < loop.time() - began < 1.0
        assert verdicts[0] is PUBLISHED
        assert isinstance(verdicts[1], Left)
        proxy.swallow = lambda _: False
        opened = side.seen.channels
        await side.publisher.ready(2.0)
        assert side.seen.channels == opened + 1  # a fresh channel after the doubt
        assert await side.publish(silent) == [PUBLISHED]
        assert side.seen.connections == 1
        assert set(await queues.ids(queue)) >= {confirmed[0].id, silent[0].id}


async def test_a_cancelled_publish_is_not_turned_into_an_outcome_and_its_channel_is_not_used_again(
    broker: Broker, exchange: str
) -> None:
    async with (
        AmqpProxy(broker.url) as proxy,
        publish_side(proxy.url, exchange) as side,
        looking_at(broker.url, exchange) as queues,
    ):
        queue = await queues.bind()
        await side.publish(rows(1))
        proxy.swallow = lambda frame: getattr(frame, "name", "") == "Basic.Ack"
        task = asyncio.create_task(side.publish(rows(5)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.swallow = lambda _: False
        again = rows(3)
        opened = side.seen.channels
        assert await side.publish(again) == [PUBLISHED] * 3
        assert side.seen.channels == opened + 1
        assert (await queues.ids(queue))[-3:] == [r.id for r in again]


async def test_a_return_that_nobody_can_be_named_for_is_believed_of_none(
    broker: Broker, exchange: str
) -> None:
    """A row whose header was lost on the way: what is not confirmed yet stays unpublished."""
    async with publish_side(broker.url, exchange) as side:
        link = side.broker.link
        assert link is not None
        channel = await link.open_channel(link.loop.time() + 2)
        encoded = [side.publisher._encoder.encode(r, link.frame_max) for r in rows(2)]
        channel_write = link.write

        def without_the_header(data: bytes) -> None:
            channel_write(data.replace(b"x-outbox-id", b"x-outbox-xx"))

        link.write = without_the_header  # type: ignore[method-assign]
        flight = await channel.publish(encoded, link.loop.time() + 2)  # type: ignore[arg-type]
        assert list(flight.states) == [0, 0]
        assert "could not be matched" in str(channel.ended)
