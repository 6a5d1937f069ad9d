"""What a ledger row becomes on the wire, and why a bad one never gets there."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drain.apns.content import TOPIC_SUFFIX, Delivery, InvalidDelivery, compact, make_push
from drain.apns.model import Push

TOPIC = "com.example.app"
ID = UUID("6F1C2A3B-0000-4000-8000-ABCDEF012345")


def made(**fields: object) -> Push | InvalidDelivery:
    values: dict[str, object] = {
        "notification_id": ID,
        "device_token": "ab" * 32,
        "push_type": "alert",
        "priority": None,
        "collapse_id": None,
        "expires_at": None,
        "payload": '{"aps": {"alert": "hi"}}',
    }
    return make_push(Delivery(**{**values, **fields}), TOPIC)  # type: ignore[arg-type]


def push(**fields: object) -> Push:
    result = made(**fields)
    assert isinstance(result, Push), result
    return result


def refused(**fields: object) -> str:
    result = made(**fields)
    assert isinstance(result, InvalidDelivery), result
    return result.reason


def test_the_whole_request() -> None:
    assert push() == Push(
        notification_id="6f1c2a3b-0000-4000-8000-abcdef012345",
        device_token="ab" * 32,
        topic=TOPIC,
        push_type="alert",
        priority=None,
        expiration=None,
        collapse_id=None,
        body=b'{"aps":{"alert":"hi"}}',
    )


@pytest.mark.parametrize(
    ("push_type", "topic"),
    [
        ("alert", "com.example.app"),
        ("background", "com.example.app"),
        ("complication", "com.example.app.complication"),
        ("controls", "com.example.app.push-type.controls"),
        ("fileprovider", "com.example.app.pushkit.fileprovider"),
        ("liveactivity", "com.example.app.push-type.liveactivity"),
        ("location", "com.example.app.location-query"),
        ("mdm", "com.example.app"),
        ("pushtotalk", "com.example.app.voip-ptt"),
        ("voip", "com.example.app.voip"),
        ("widgets", "com.example.app.push-type.widgets"),
    ],
)
def test_each_push_type_has_its_topic(push_type: str, topic: str) -> None:
    assert push(push_type=push_type).topic == topic
    assert len(TOPIC_SUFFIX) == 11


def test_a_topic_that_has_its_suffix_already_keeps_one() -> None:
    delivery = Delivery(ID, "ab", "voip", None, None, None, "{}")
    result = make_push(delivery, "com.example.app.voip")
    assert isinstance(result, Push)
    assert result.topic == "com.example.app.voip"


def test_an_unknown_push_type_is_named() -> None:
    assert "'Alert'" in refused(push_type="Alert")
    assert len(refused(push_type="x" * 10_000)) < 300


@pytest.mark.parametrize("priority", [1, 5, 10, None])
def test_priorities_pass(priority: int | None) -> None:
    assert push(priority=priority).priority == priority


@pytest.mark.parametrize("priority", [0, -1, 2, 11])
def test_other_priorities_do_not(priority: int) -> None:
    assert refused(priority=priority) == f"priority {priority} is none of 1, 5, 10"


@pytest.mark.parametrize("priority", [None, 5])
def test_background_is_always_5(priority: int | None) -> None:
    """APNs takes an absent priority for 10, and refuses that for background."""
    assert push(push_type="background", priority=priority).priority == 5


@pytest.mark.parametrize("priority", [1, 10])
def test_background_with_another_priority_is_refused(priority: int) -> None:
    assert "background" in refused(push_type="background", priority=priority)


def test_no_expiry_has_no_header_and_the_epoch_is_0_and_a_time_is_absolute() -> None:
    """rpush/rpush#206: 0 by default, and offline phones got nothing."""
    assert push(expires_at=None).expiration is None
    assert push(expires_at=datetime(1970, 1, 1, tzinfo=UTC)).expiration == 0
    assert push(expires_at=datetime(1960, 1, 1, tzinfo=UTC)).expiration == 0
    later = datetime(2026, 3, 1, 12, 0, 0, 900_000, tzinfo=UTC)
    assert push(expires_at=later).expiration == 1_772_366_400
    elsewhere = later.astimezone(timezone(timedelta(hours=9)))
    assert push(expires_at=elsewhere).expiration == 1_772_366_400
    assert push(expires_at=datetime(9999, 12, 31, tzinfo=UTC)).expiration == 253_402_214_400


def test_postgresqls_infinities_mean_what_they_say() -> None:
    """asyncpg gives the greatest and least datetime, without a zone."""
    assert push(expires_at=datetime.max).expiration is None
    assert push(expires_at=datetime.min).expiration == 0


def test_an_expiry_without_a_zone_is_not_guessed() -> None:
    assert "time zone" in refused(expires_at=datetime(2026, 3, 1))


@pytest.mark.parametrize("token", ["ab", "AB" * 32, "0" * 200])
def test_device_tokens_of_any_length_pass(token: str) -> None:
    """Apple: do not assume a length."""
    assert push(device_token=token).device_token == token


@pytest.mark.parametrize(
    "token", ["", "abc", "0" * 202, "zz", "ab/../..", "ab cd", "ab\n", "٣٣", "ab\r\nx: y"]
)
def test_device_tokens_that_are_no_hex_pairs_do_not(token: str) -> None:
    reason = refused(device_token=token)
    assert f"device_token of {len(token)} characters" in reason
    assert not token or token not in reason.replace("device_token of", "")


@pytest.mark.parametrize("collapse_id", ["a", "x" * 64, "order 17/4"])
def test_collapse_ids_pass(collapse_id: str) -> None:
    assert push(collapse_id=collapse_id).collapse_id == collapse_id


@pytest.mark.parametrize(
    ("collapse_id", "why"),
    [
        ("x" * 65, "65 bytes, limit 64"),
        ("é" * 33, "66 bytes, limit 64"),
        ("é", "printable ASCII"),
        ("", "printable ASCII"),
        (" a", "outer spaces"),
        ("a\r\napns-topic: other", "printable ASCII"),
        ("a\n", "printable ASCII"),
        ("\ud800", "printable ASCII"),
    ],
)
def test_collapse_ids_that_are_no_header_do_not(collapse_id: str, why: str) -> None:
    """The limit is of bytes; CR LF would write a header of its own."""
    assert why in refused(collapse_id=collapse_id)


@pytest.mark.parametrize(("push_type", "limit"), [("alert", 4096), ("liveactivity", 4096), ("voip", 5120)])
def test_the_limit_is_of_the_bytes_that_are_written(push_type: str, limit: int) -> None:
    def payload(size: int) -> str:
        return '{ "a" :  "' + "x" * (size - len('{"a":""}')) + '" }'

    assert len(push(push_type=push_type, payload=payload(limit)).body) == limit
    assert (
        refused(push_type=push_type, payload=payload(limit + 1))
        == f"payload is {limit + 1} bytes, limit {limit}"
    )
    assert f"limit {limit}" in refused(push_type=push_type, payload='{"a":"' + "é" * (limit // 2) + '"}')


@pytest.mark.parametrize(
    ("payload", "body"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}'),
        ('{"t": "a \\" : , b"}', '{"t":"a \\" : , b"}'),
        ('{"t": "ü 😀"}', '{"t":"ü 😀"}'),
        # Numbers that a double does not hold, or would write differently, stay as they are.
        (
            '{"id": 123456789012345678901234567890, "t": "a \\" : b"}',
            '{"id":123456789012345678901234567890,"t":"a \\" : b"}',
        ),
        ('{"price": 1.10, "big": 1e400}', '{"price":1.10,"big":1e400}'),
        ('{"x": 9007199254740993}', '{"x":9007199254740993}'),
        ('{"x": -9999999999999999999}', '{"x":-9999999999999999999}'),
    ],
)
def test_payloads_are_written_compactly_and_exactly(payload: str, body: str) -> None:
    assert push(payload=payload).body == body.encode()


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "[1]",
        '"a"',
        "null",
        "1.5",
        '{"a":NaN}',
        '{"a": 1.5,}',
        "{",
        '{"a":1.5',
        "[" * 100_000,
        '{"a":1.5,"b":' * 50_000,
    ],
)
def test_payloads_that_are_no_json_object_do_not_pass(payload: str) -> None:
    reason = refused(payload=payload)
    assert reason.startswith("payload is")
    assert len(reason) < 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=5), st.sampled_from([None, 2]))
def test_compacting_changes_no_value(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # PostgreSQL's jsonb has no lone surrogates.
    body = compact(text)
    assert json.loads(body, parse_float=str, parse_int=str) == json.loads(
        text, parse_float=str, parse_int=str
    )
    assert len(body) <= len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
