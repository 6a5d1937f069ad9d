"""Each of Apple's rejections that a request's own content can earn."""

import json
from typing import Any

import pytest

from deploy.simulator.checks import TOPIC_SUFFIX
from deploy.simulator.client import SimulatorClient
from tests.simulator.conftest import Connect
from tests.simulator.wire import DEVICE, PAYLOAD, Peer

APP = "com.example.app"

REJECTED: list[tuple[str, int, str, dict[str, Any]]] = [
    ("a GET", 405, "MethodNotAllowed", {"method": "GET"}),
    ("a path of another service", 404, "BadPath", {"path": "/4/device/" + DEVICE}),
    ("a slash in the token", 404, "BadPath", {"device": "ab/cd"}),
    ("a percent sign in the token", 404, "BadPath", {"device": "ab%20"}),
    ("no token", 400, "MissingDeviceToken", {"device": ""}),
    ("no token and no slash", 400, "MissingDeviceToken", {"path": "/3/device"}),
    ("a token that is not hex", 400, "BadDeviceToken", {"device": "xyz1"}),
    ("an odd number of digits", 400, "BadDeviceToken", {"device": "abc"}),
    ("no authorization", 403, "MissingProviderToken", {"authorization": None}),
    ("another scheme", 403, "MissingProviderToken", {"authorization": "basic abc"}),
    ("not a JWT", 403, "InvalidProviderToken", {"authorization": "bearer abc"}),
    ("an unknown push type", 400, "InvalidPushType", {"apns_push_type": "loud"}),
    ("no topic", 400, "MissingTopic", {"apns_topic": None}),
    ("an empty topic", 400, "BadTopic", {"apns_topic": ""}),
    ("a malformed topic", 400, "BadTopic", {"apns_topic": "com example"}),
    ("somebody else's topic", 400, "TopicDisallowed", {"apns_topic": "com.example.other"}),
    ("voip without its suffix", 400, "BadTopic", {"apns_push_type": "voip"}),
    ("an alert to the voip topic", 400, "BadTopic", {"apns_topic": APP + ".voip"}),
    ("an unknown priority", 400, "BadPriority", {"apns_priority": "7"}),
    ("an urgent background push", 400, "BadPriority", {"apns_push_type": "background"}),
    ("an expiration in words", 400, "BadExpirationDate", {"apns_expiration": "soon"}),
    ("a negative expiration", 400, "BadExpirationDate", {"apns_expiration": "-1"}),
    ("an apns-id that is no UUID", 400, "BadMessageId", {"apns_id": "order-1"}),
    ("a collapse id of 65 bytes", 400, "BadCollapseId", {"apns_collapse_id": "x" * 65}),
    ("a collapse id of 33 characters and 66 bytes", 400, "BadCollapseId", {"apns_collapse_id": "ü" * 33}),
    ("no body", 400, "PayloadEmpty", {"body": b""}),
    ("a body of 4097 bytes", 413, "PayloadTooLarge", {"body": b"x" * 4097}),
    ("a body of 100,000 bytes", 413, "PayloadTooLarge", {"body": b"x" * 60_000}),
    (
        "a voip body of 5121 bytes",
        413,
        "PayloadTooLarge",
        {"body": b"x" * 5121, "apns_push_type": "voip", "apns_topic": APP + ".voip"},
    ),
    ("apns-id twice", 400, "DuplicateHeaders", {"extra": (("apns-id", "x"),)}),
    ("topic twice", 400, "DuplicateHeaders", {"extra": (("apns-topic", APP),)}),
]

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("a plain alert", {}),
    ("a long token", {"device": "0F" * 80}),
    ("no push type", {"apns_push_type": None}),
    ("no priority", {"apns_priority": None}),
    ("a background push", {"apns_push_type": "background", "apns_priority": "5"}),
    ("priority 1", {"apns_priority": "1"}),
    ("expiration 0", {"apns_expiration": "0"}),
    ("an expiration", {"apns_expiration": "1999999999"}),
    ("a collapse id of 64 bytes", {"apns_collapse_id": "x" * 64}),
    ("a body of 4096 bytes", {"body": b"x" * 4096}),
    (
        "a voip body of 5120 bytes",
        {"body": b"x" * 5120, "apns_push_type": "voip", "apns_topic": APP + ".voip"},
    ),
    ("two cookies", {"extra": (("cookie", "a=1"), ("cookie", "b=2"))}),
]


@pytest.mark.parametrize(
    ("status", "reason", "request_"), [case[1:] for case in REJECTED], ids=[c[0] for c in REJECTED]
)
async def test_rejected(peer: Peer, status: int, reason: str, request_: dict[str, Any]) -> None:
    answer = await peer.ask(**request_)
    assert (answer.status, answer.json) == (status, {"reason": reason})
    assert len(answer.headers["apns-id"]) == 36


@pytest.mark.parametrize("request_", [case[1] for case in ACCEPTED], ids=[c[0] for c in ACCEPTED])
async def test_accepted(peer: Peer, request_: dict[str, Any]) -> None:
    answer = await peer.ask(**request_)
    assert (answer.status, answer.chunks, answer.ended_on_headers) == (200, [], True)


async def test_every_push_type_has_its_topic(peer: Peer) -> None:
    for push_type, suffix in TOPIC_SUFFIX.items():
        answer = await peer.ask(apns_push_type=push_type, apns_topic=APP + suffix, apns_priority="5")
        assert answer.status == 200, push_type
        wrong = await peer.ask(apns_push_type=push_type, apns_topic=APP + ".voip-ptt.voip", apns_priority="5")
        assert wrong.status == 400, push_type


async def test_the_apns_id_comes_back_or_one_is_made_up(peer: Peer) -> None:
    mine = "0a1b2c3d-0000-4000-8000-00000000abcd"
    assert (await peer.ask(apns_id=mine)).headers["apns-id"] == mine
    assert (await peer.ask(apns_id=mine, apns_topic=None)).headers["apns-id"] == mine
    made_up = (await peer.ask(apns_id=None)).headers["apns-id"]
    assert len(made_up) == 36
    assert (await peer.ask(apns_id="bad")).headers["apns-id"] != "bad"


async def test_what_is_checked_can_be_told(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(
        topics=["com.example.shop"], device_token_lengths=[64], require_push_type=True, payload_limit=10
    )
    peer = await connect()
    shop: dict[str, Any] = {"apns_topic": "com.example.shop", "body": b"x"}
    assert (await peer.ask(**shop)).status == 200
    assert (await peer.ask()).reason == "TopicDisallowed"
    assert (await peer.ask(**shop | {"device": "abcd"})).reason == "BadDeviceToken"
    assert (await peer.ask(**shop | {"apns_push_type": None})).reason == "InvalidPushType"
    assert (await peer.ask(**shop | {"body": PAYLOAD})).reason == "PayloadTooLarge"


async def test_410_carries_its_time_in_milliseconds(peer: Peer, apns: SimulatorClient) -> None:
    apns.unregister(DEVICE, since_ms=1_700_000_000_123)
    answer = await peer.ask()
    assert answer.status == 410
    assert answer.json == {"reason": "Unregistered", "timestamp": 1_700_000_000_123}
    assert json.loads(b"".join(answer.chunks))["timestamp"] == 1_700_000_000_123
