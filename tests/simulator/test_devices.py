"""Devices: gone ones, those of another app, and what is on the screen after collapse."""

import time

from deploy.simulator.client import SimulatorClient, step
from tests.simulator.wire import Peer

A, B = "aa" * 32, "bb" * 32


def body(text: str) -> bytes:
    return b'{"aps":{"alert":"%s"}}' % text.encode()


async def test_unregistered_from_a_time_on_and_registered_again(peer: Peer, apns: SimulatorClient) -> None:
    now = int(time.time() * 1000)
    apns.unregister(A, since_ms=now + 60_000)
    assert (await peer.ask(A)).status == 200, "not yet"
    apns.configure(clock_offset_seconds=61)
    gone = await peer.ask(A)
    assert (gone.status, gone.json) == (410, {"reason": "Unregistered", "timestamp": now + 60_000})
    assert (await peer.ask(B)).status == 200
    apns.register(A)
    assert (await peer.ask(A)).status == 200


async def test_other_rules(peer: Peer, apns: SimulatorClient) -> None:
    apns.configure(topics=["com.example.app", "com.example.shop"])
    apns.rule(A, expired_since=5)
    assert (await peer.ask(A)).json == {"reason": "ExpiredToken", "timestamp": 5}
    apns.rule(A, topics=["com.example.shop"])
    assert (await peer.ask(A)).reason == "DeviceTokenNotForTopic"
    assert (await peer.ask(A, apns_topic="com.example.shop")).status == 200
    apns.rule(A, B, reason="BadDeviceToken")
    assert (await peer.ask(A)).status == (await peer.ask(B)).status == 400


async def test_of_one_collapse_id_the_latest_is_shown(peer: Peer, apns: SimulatorClient) -> None:
    for text in ("packed", "sent", "arrived"):
        await peer.ask(A, body(text), apns_collapse_id="order-1")
    await peer.ask(A, body("other order"), apns_collapse_id="order-2")
    await peer.ask(A, body("news"))
    await peer.ask(A, body("news"))
    await peer.ask(A, b'{"aps":{"content-available":1}}', apns_push_type="background", apns_priority="5")
    await peer.ask(B, body("elsewhere"), apns_collapse_id="order-1")
    device = apns.device(A)
    assert (device["requests"], device["delivered"], device["background"]) == (7, 7, 1)
    assert [(one["collapse_id"], one["body"], one["collapsed"]) for one in device["shown"]] == [
        ("order-1", body("arrived").decode(), 3),
        ("order-2", body("other order").decode(), 1),
        (None, body("news").decode(), 1),
        (None, body("news").decode(), 1),
    ]


async def test_the_later_push_is_shown_even_when_its_answer_comes_first(
    peer: Peer, apns: SimulatorClient
) -> None:
    apns.script([step("answer", delay=0.1), step("pass")])
    slow = peer.push(A, body("old"), apns_collapse_id="one")
    quick = peer.push(A, body("new"), apns_collapse_id="one")
    await peer.answer(quick)
    await peer.answer(slow)
    (shown,) = apns.device(A)["shown"]
    assert (shown["body"], shown["collapsed"]) == (body("new").decode(), 2)


async def test_rejected_pushes_are_not_shown(peer: Peer, apns: SimulatorClient) -> None:
    apns.next_requests(1, "answer", reason="ServiceUnavailable")
    await peer.ask(A)
    device = apns.device(A)
    assert (device["requests"], device["delivered"], device["shown"]) == (1, 0, [])


async def test_an_unknown_device_is_empty(apns: SimulatorClient) -> None:
    assert apns.device("no-such-token")["requests"] == 0
    assert apns.devices() == {}
