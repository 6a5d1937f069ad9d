"""A row's message: equal to what pamqp makes of it, and every bound named before anything is sent."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader

from relay.amqp import frames
from relay.message import AGGREGATE_ID, AGGREGATE_TYPE, OUTBOX_ID, Encoder, Message, MessageConfig
from relay.model import OutboxRow, Rejected

FRAME_MAX = 131072
EVENT = UUID("0af76519-16cd-43dd-8448-eb211c80319c")
MOMENT = datetime(2026, 3, 4, 5, 6, 7, 890000, tzinfo=UTC)
ROW = OutboxRow(
    id=2**40 + 7,
    event_id=EVENT,
    aggregate_type="order",
    aggregate_id="17",
    event_type="order.placed",
    exchange=None,
    routing_key=None,
    ordering_key=None,
    body=b'{"total": 5}',
    content_type="application/json",
    headers="{}",
    created_at=MOMENT,
    attempts=0,
)


def encode(
    config: MessageConfig | None = None, frame_max: int = FRAME_MAX, **changes: Any
) -> Message | Rejected:
    return Encoder(config or MessageConfig()).encode(ROW._replace(**changes), frame_max)


def message(config: MessageConfig | None = None, frame_max: int = FRAME_MAX, **changes: Any) -> Message:
    encoded = encode(config, frame_max, **changes)
    assert isinstance(encoded, Message), encoded
    return encoded


def refusal(config: MessageConfig | None = None, frame_max: int = FRAME_MAX, **changes: Any) -> str:
    encoded = encode(config, frame_max, **changes)
    assert isinstance(encoded, Rejected), encoded
    return encoded.error


def decode(raw: bytes) -> list[Any]:
    """Every frame of the bytes, by pamqp."""
    decoded = []
    while raw:
        size, channel, frame = unmarshal(raw)
        assert channel == 5
        decoded.append(frame)
        raw = raw[size:]
    return decoded


def sent(
    encoded: Message, frame_max: int = FRAME_MAX
) -> tuple[commands.Basic.Publish, Any, dict[str, Any], bytes]:
    publish, header, *bodies = decode(frames([encoded], 5, frame_max))
    body = b"".join(piece.value for piece in bodies)
    assert header.body_size == len(body)
    return publish, header.properties, header.properties.headers or {}, body


short = st.text(max_size=80).filter(lambda text: len(text.encode()) <= 255)
names = st.text(min_size=1, max_size=40).filter(
    lambda text: (
        len(text.encode()) <= 128 and text not in (AGGREGATE_ID, AGGREGATE_TYPE, OUTBOX_ID, "CC", "BCC")
    )
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
moments = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC))


@given(
    row_id=st.integers(2**33, 2**63 - 1),
    event_id=st.uuids(),
    event_type=short,
    routing_key=short,
    exchange=st.from_regex(r"[A-Za-z0-9._:-]{0,127}", fullmatch=True),  # pamqp takes no other, RabbitMQ does
    content_type=short,
    app_id=short,
    aggregate=st.tuples(short, short),
    body=st.binary(max_size=300),
    created_at=moments,
)
def test_a_message_without_headers_is_byte_for_byte_what_pamqp_makes(
    row_id: int,
    event_id: UUID,
    event_type: str,
    routing_key: str,
    exchange: str,
    content_type: str,
    app_id: str,
    aggregate: tuple[str, str],
    body: bytes,
    created_at: datetime,
) -> None:
    encoded = encode(
        MessageConfig(app_id=app_id),
        id=row_id,
        event_id=event_id,
        event_type=event_type,
        routing_key=routing_key,
        exchange=exchange,
        content_type=content_type,
        aggregate_type=aggregate[0],
        aggregate_id=aggregate[1],
        body=body,
        created_at=created_at,
    )
    if isinstance(encoded, Rejected):
        assert "as its content type" in encoded.error  # the type drawn happened to promise JSON or UTF-8
        return
    properties = commands.Basic.Properties(
        content_type=content_type,
        headers={AGGREGATE_TYPE: aggregate[0], AGGREGATE_ID: aggregate[1], OUTBOX_ID: row_id},
        delivery_mode=2,
        message_id=str(event_id),
        timestamp=created_at,
        message_type=event_type,
        app_id=app_id,
    )
    publish = commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
    expected = marshal(publish, 5) + marshal(ContentHeader(body_size=len(body), properties=properties), 5)
    if body:
        expected += marshal(ContentBody(body), 5)
    assert frames([encoded], 5, FRAME_MAX) == expected


@given(headers=st.dictionaries(names, values, max_size=6))
def test_headers_of_the_row_reach_the_message_untouched(headers: dict[str, Any]) -> None:
    _, properties, received, _ = sent(message(headers=json.dumps(headers)))
    own = {AGGREGATE_TYPE: "order", AGGREGATE_ID: "17", OUTBOX_ID: ROW.id}
    assert received == headers | own
    reference = commands.Basic.Properties(headers=headers | own)
    assert (
        properties.headers == unmarshal(marshal(ContentHeader(properties=reference), 5))[2].properties.headers
    )


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_in_the_headers_keeps_all_its_bits(number: float) -> None:
    _, _, received, _ = sent(message(headers=json.dumps({"rate": number})))
    assert struct.pack(">d", received["rate"]) == struct.pack(">d", number)


def test_a_message_is_persistent_and_says_what_it_is() -> None:
    publish, properties, headers, body = sent(message())
    assert (publish.exchange, publish.routing_key, publish.mandatory) == ("events", "order.placed", True)
    assert properties.delivery_mode == 2  # AMQP.md E10: unset is transient
    assert properties.message_id == str(EVENT)
    assert properties.message_type == "order.placed"
    assert properties.timestamp == MOMENT.replace(microsecond=0)
    assert properties.content_type == "application/json"
    assert properties.app_id == "relay"
    assert headers == {AGGREGATE_TYPE: "order", AGGREGATE_ID: "17", OUTBOX_ID: ROW.id}
    assert body == ROW.body


def test_exchange_and_routing_key_of_the_row_win_over_the_defaults() -> None:
    publish, *_ = sent(message(exchange="other", routing_key="a.b"))
    assert (publish.exchange, publish.routing_key) == ("other", "a.b")
    publish, *_ = sent(message(exchange="", routing_key="a queue"))
    assert (publish.exchange, publish.routing_key) == ("", "a queue")


def test_trace_context_goes_to_the_message_untouched() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    _, _, headers, _ = sent(message(headers=json.dumps({"traceparent": parent, "tracestate": "a=1"})))
    assert (headers["traceparent"], headers["tracestate"]) == (parent, "a=1")


def test_headers_copied_from_another_message_do_not_displace_the_relays_own() -> None:
    copied = json.dumps({OUTBOX_ID: 1, AGGREGATE_ID: "other", "kept": True})
    _, _, headers, _ = sent(message(headers=copied))
    assert headers == {AGGREGATE_TYPE: "order", AGGREGATE_ID: "17", OUTBOX_ID: ROW.id, "kept": True}


@given(size=st.integers(0, 700), frame_max=st.integers(300, 600))
def test_a_body_larger_than_a_frame_is_cut_into_frames_that_fit(size: int, frame_max: int) -> None:
    body = bytes(range(256)) * 3
    encoded = message(content_type="application/octet-stream", body=body[:size])
    raw = frames([encoded], 5, frame_max)
    _, _, *bodies = decode(raw)
    assert b"".join(piece.value for piece in bodies) == body[:size]
    assert all(len(piece.value) + 8 <= frame_max for piece in bodies)


def test_many_messages_are_one_write() -> None:
    first, second = message(id=1), message(id=2, routing_key="other")
    raw = frames([first, second], 5, FRAME_MAX)
    assert raw == frames([first], 5, FRAME_MAX) + frames([second], 5, FRAME_MAX)


UMLAUTS = "ü" * 128  # 128 characters, 256 bytes

BOUNDS = {
    "routing key": ({"routing_key": UMLAUTS}, "256 bytes", "255"),
    "exchange": ({"exchange": UMLAUTS}, "256 bytes", "255"),
    "event type": ({"event_type": UMLAUTS, "routing_key": "k"}, "256 bytes", "255"),
    "content type": ({"content_type": "x" * 256}, "256 bytes", "255"),
    "header name": ({"headers": json.dumps({"n" * 129: 1})}, "129 bytes", "128"),
    "integer over 64 bits": ({"headers": json.dumps({"a": {"b": [2**63]}})}, str(2**63), "'a.b[0]'"),
    "integer far over 64 bits": ({"headers": json.dumps({"n": 2**70})}, str(2**70), "64 bits"),
    "integer under 64 bits": ({"headers": json.dumps({"n": -(2**63) - 1})}, str(-(2**63) - 1), "64 bits"),
    "not a number": ({"headers": '{"n": NaN}'}, "headers", "not JSON"),
    "infinite": ({"headers": '{"n": 1e999, "m": 1}'}, "'n'", "no finite number"),
    "lone surrogate": ({"headers": '{"n": "\\ud800", "m": 1}'}, "header", "Unicode"),
    "headers not an object": ({"headers": "[1]"}, "list", "not an object"),
    "headers not JSON": ({"headers": "{"}, "headers", "not JSON"),
    "headers larger than a frame": ({"headers": json.dumps({"h": "x" * 200_000})}, "200", "131072"),
    "aggregate id larger than a frame": ({"aggregate_id": "x" * 200_000}, "200", "131072"),
    "sender-selected distribution": ({"headers": '{"CC": "a"}'}, "'CC'", "list"),
    "hidden copies": ({"headers": '{"BCC": ["a", 1]}'}, "'BCC'", "list"),
    "not JSON": ({"body": b"\x00\x01"}, "2 bytes", "'application/json'"),
    "empty is not JSON": ({"body": b""}, "0 bytes", "'application/json'"),
    "NaN is not JSON": ({"body": b"[NaN]"}, "5 bytes", "'application/json'"),
    "JSON by suffix": ({"body": b"<a/>", "content_type": "application/vnd.x+json; v=1"}, "4 bytes", "+json"),
    "not UTF-8": ({"body": b"\xff", "content_type": 'text/plain; charset="UTF-8"'}, "0xff", "text/plain"),
    "before 1970": ({"created_at": datetime(1969, 12, 31, tzinfo=UTC)}, "1969", "1970"),
}


@pytest.mark.parametrize(("changes", "value", "bound"), BOUNDS.values(), ids=BOUNDS.keys())
def test_a_row_that_can_never_be_sent_is_refused_with_the_value_and_the_bound(
    changes: dict[str, Any], value: str, bound: str
) -> None:
    error = refusal(**changes)
    assert value in error
    assert bound in error


def test_a_body_over_the_limit_is_refused_and_the_error_names_both_sizes() -> None:
    config = MessageConfig(max_body_bytes=1_000_000)
    assert refusal(config, body=b"0" * 1_000_001) == "body has 1000001 bytes, the bound is 1000000"
    message(config, content_type="text/plain", body=b"0" * 1_000_000)


def test_255_bytes_fit_and_headers_that_just_fill_a_frame_fit() -> None:
    message(routing_key="x" * 255, exchange="y" * 255, event_type="z" * 255, content_type="t" * 255)
    empty = message(aggregate_id="")
    room = FRAME_MAX - 8 - len(empty.header)
    assert len(message(aggregate_id="x" * room).header) == FRAME_MAX - 8
    assert str(FRAME_MAX) in refusal(aggregate_id="x" * (room + 1))


def test_no_frame_limit_negotiated_is_no_limit() -> None:
    message(frame_max=0, headers=json.dumps({"h": "x" * 200_000}))


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"5",
        b'"x"',
        ("[" * 1500 + "]" * 1500).encode(),
        b"1" + b"0" * 9000,
        b"0." + b"1" * 9000,
        b" {} ",
    ],
    ids=["null", "number", "string", "deep", "huge", "precise", "spaces"],
)
def test_whatever_postgres_prints_of_a_jsonb_passes(body: bytes) -> None:
    message(body=body)


def test_bytes_of_another_type_pass_unread() -> None:
    for content_type in (
        "application/octet-stream",
        "application/protobuf",
        "",
        "text/plain; charset=latin-1",
    ):
        _, properties, _, body = sent(message(content_type=content_type, body=b"\xff\x00"))
        assert body == b"\xff\x00"
        assert (properties.content_type or "") == content_type


def test_routes_are_remembered_but_do_not_fill_the_memory() -> None:
    encoder = Encoder(MessageConfig())
    for number in range(5000):
        encoder.encode(ROW._replace(routing_key=str(number)), FRAME_MAX)
    assert len(encoder._routes) <= 2048


def test_a_refused_route_is_refused_again_and_harms_no_other() -> None:
    encoder = Encoder(MessageConfig())
    bad = ROW._replace(routing_key="x" * 256)
    assert [type(encoder.encode(row, FRAME_MAX)) for row in (bad, ROW, bad)] == [Rejected, Message, Rejected]


CLOUD = MessageConfig(cloud_events=True, cloud_events_source="/shop")


def test_cloud_events_in_binary_mode() -> None:
    """AMQP Protocol Binding for CloudEvents 1.0, section 3.1."""
    local = MOMENT.astimezone(timezone(timedelta(hours=2)))
    _, properties, headers, body = sent(
        message(CLOUD, created_at=local, ordering_key="k", headers='{"a": "b"}')
    )
    assert {name: value for name, value in headers.items() if name.startswith("cloudEvents_")} == {
        "cloudEvents_specversion": "1.0",
        "cloudEvents_id": str(EVENT),
        "cloudEvents_source": "/shop",
        "cloudEvents_type": "order.placed",
        "cloudEvents_time": "2026-03-04T05:06:07.890000Z",
        "cloudEvents_subject": "17",
        "cloudEvents_partitionkey": "k",
    }
    assert headers["a"] == "b"
    assert properties.content_type == "application/json"  # is datacontenttype
    assert body == ROW.body


def test_cloud_events_older_prefix_and_default_source() -> None:
    _, _, headers, _ = sent(message(MessageConfig(cloud_events=True, cloud_events_prefix="cloudEvents:")))
    assert headers["cloudEvents:source"] == "/order"
    assert headers["cloudEvents:specversion"] == "1.0"


def test_two_rows_of_one_event_are_told_apart_by_a_header() -> None:
    event = uuid4()
    told = [sent(message(id=number, event_id=event))[2][OUTBOX_ID] for number in (1, 2)]
    assert told == [1, 2]
