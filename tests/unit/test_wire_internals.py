"""Every name below aio-pika's public interface that relay/wire.py relies on: a new version must fail here first."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import aio_pika
import aiormq
import pytest
from aiormq import connection as aiormq_connection
from pamqp import commands, header
from pamqp.frame import marshal, unmarshal
from yarl import URL

PINNED = {"aio-pika": "10.2.1", "aiormq": "7.2.4", "pamqp": "4.0.1"}


@pytest.mark.parametrize(("package", "pinned"), PINNED.items())
def test_the_version_is_the_one_that_was_read(package: str, pinned: str) -> None:
    assert version(package) == pinned


def source(of: object) -> str:
    return inspect.getsource(of)  # type: ignore[arg-type]


def test_the_socket_comes_from_a_transport_factory_that_the_connection_is_given() -> None:
    parameters = inspect.signature(aiormq.Connection.__init__).parameters
    assert {"transport_factory", "context"} <= parameters.keys()
    assert "self._transport_factory.create(" in source(aiormq.Connection.connect)
    for factory in (aiormq_connection.TCPTransportFactory, aiormq_connection.TLSTransportFactory):
        assert issubclass(factory, aiormq_connection.TransportFactory)
        assert list(inspect.signature(factory.create).parameters) == ["self", "url", "kwargs"]


async def test_aio_pika_hands_its_kwargs_on_to_aiormq() -> None:
    connection = aio_pika.Connection(URL("amqp://localhost/"), ssl_context=None)
    assert connection.kwargs == {"context": None}
    assert "**self.kwargs" in source(aio_pika.Connection.connect)
    assert connection.transport is None
    await connection.close()


def test_heartbeat_and_name_are_taken_from_the_url() -> None:
    text = source(aiormq.Connection.__init__)
    assert 'self.url.query.get("heartbeat"' in text
    assert 'self.url.query.get("name")' in text


def test_the_reader_hands_each_frame_to_the_channel_in_the_table() -> None:
    reader = source(aiormq.Connection._Connection__reader)  # type: ignore[attr-defined]
    assert "self.channels.get(channel)" in reader
    assert "await ch.frames.put((weight, frame))" in reader
    assert "self.channels.pop(channel, None)" in reader


def test_nothing_else_of_a_channel_in_the_table_is_used() -> None:
    used = source(aiormq_connection).count("self.channels")
    known = {
        "self.channels = {}": 1,
        "self.channels.pop(0, None)": 1,
        "self.channels.get(channel)": 1,
        "self.channels.pop(channel, None)": 1,
        "if self.channels:": 1,
        "max(self.channels.keys())": 1,
        "in self.channels.keys():": 1,
        "in self.channels:": 1,
        "self.channels[channel_number] = channel": 1,
    }
    text = source(aiormq_connection)
    assert {name: text.count(name) for name in known} == known
    assert used == sum(known.values())


@pytest.mark.parametrize("name", ["blocked", "unblocked"])
async def test_blocked_and_unblocked_have_a_handler_that_the_reader_looks_up_on_the_instance(
    name: str,
) -> None:
    handler = getattr(aiormq.Connection, f"_Connection__handle_connection_{name}")
    assert inspect.iscoroutinefunction(handler)
    assert list(inspect.signature(handler).parameters) in (["self", "frame"], ["self", "_"])
    reader = source(aiormq.Connection._Connection__reader)  # type: ignore[attr-defined]
    assert f"await self.__handle_connection_{name}(frame)" in reader
    assert "__dict__" in dir(aiormq.Connection("amqp://localhost/"))


def test_the_end_of_the_reader_task_is_the_end_of_the_connection() -> None:
    text = source(aiormq.Connection.connect)
    assert "self._reader_task = self.create_task(self.__reader(frame_receiver))" in text
    assert "self._reader_task.add_done_callback(self._on_reader_done)" in text
    assert isinstance(aiormq.Connection.is_connection_was_stuck, property)


def test_frame_max_and_channel_max_are_those_that_were_negotiated() -> None:
    text = source(aiormq.Connection.connect)
    assert "self.connection_tune = connection_tune" in text
    assert "frame_max=connection_tune.frame_max" in text
    assert "channel_max=connection_tune.channel_max" in text
    assert {"channel_max", "frame_max", "heartbeat"} == set(commands.Connection.Tune().attributes())


def test_the_underlay_connection_is_where_it_was() -> None:
    from aio_pika.abc import UnderlayConnection

    assert "connection" in UnderlayConnection.__dataclass_fields__


METHODS = {
    commands.Channel.Open: commands.Channel.OpenOk,
    commands.Confirm.Select: commands.Confirm.SelectOk,
    commands.Channel.Close: commands.Channel.CloseOk,
    commands.Exchange.Declare: commands.Exchange.DeclareOk,
}


@pytest.mark.parametrize(("request_", "answer"), METHODS.items(), ids=lambda method: method.__name__)
def test_synchronous_methods_and_their_answers(request_: type, answer: type) -> None:
    assert request_.synchronous  # type: ignore[attr-defined]
    assert answer.name in request_.valid_responses  # type: ignore[attr-defined]


def test_frames_that_the_channel_reads() -> None:
    assert set(commands.Basic.Ack().attributes()) == {"delivery_tag", "multiple"}
    assert {"delivery_tag", "multiple"} <= set(commands.Basic.Nack().attributes())
    assert set(commands.Basic.Return().attributes()) == {
        "reply_code",
        "reply_text",
        "exchange",
        "routing_key",
    }
    assert {"reply_code", "reply_text"} <= set(commands.Channel.Close().attributes())
    assert "reason" in commands.Connection.Blocked().attributes()
    properties = commands.Basic.Properties(headers={"x-outbox-id": 5})
    _, channel, frame = unmarshal(marshal(header.ContentHeader(properties=properties), 3))
    assert channel == 3
    assert isinstance(frame, header.ContentHeader)
    assert frame.properties.headers == {"x-outbox-id": 5}
