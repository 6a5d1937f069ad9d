"""What the simulator saw: requests, doubles, connections; and that counting costs bounded memory."""

import json
import urllib.request

import pytest

from deploy.simulator.client import NotInTime, SimulatorClient, SimulatorError, step
from deploy.simulator.devices import Devices
from deploy.simulator.ledger import Ledger
from deploy.simulator.process import Ready
from deploy.simulator.request import Request
from tests.simulator.conftest import Connect
from tests.simulator.wire import Peer

ID = "0a1b2c3d-0000-4000-8000-00000000abcd"
A, B = "aa" * 32, "bb" * 32


async def test_a_double_is_counted_as_request_and_as_delivery(
    connect: Connect, apns: SimulatorClient
) -> None:
    apns.script([step("answer", reason="ServiceUnavailable"), step("pass")])
    one, other = await connect(), await connect()
    await one.ask(A, apns_id=ID)
    await one.ask(A, apns_id=ID)
    stats = apns.stats()
    assert (stats["requests"], stats["repeated_requests"], stats["repeated_deliveries"]) == (2, 1, 0)
    await other.ask(A, apns_id=ID.upper())
    await other.ask(B)
    stats = apns.stats()
    assert (stats["requests"], stats["repeated_requests"], stats["repeated_deliveries"]) == (4, 2, 1)
    assert (stats["delivered"], stats["distinct_ids"], stats["distinct_devices"]) == (3, 2, 2)
    assert apns.repeated() == {ID: {"requests": 3, "delivered": 2}}
    push = apns.push(ID)
    assert (push["requests"], push["delivered"]) == (3, 2)
    assert [(one["status"], one["delivered"], one["connection"]) for one in push["arrivals"]] == [
        (503, False, push["arrivals"][0]["connection"]),
        (200, True, push["arrivals"][0]["connection"]),
        (200, True, push["arrivals"][0]["connection"] + 1),
    ]
    assert stats["answers"] == {"200": 3, "503 ServiceUnavailable": 1}


async def test_the_arrival_log(peer: Peer, apns: SimulatorClient) -> None:
    await peer.ask(A, b'{"aps":{}}', apns_id=ID, apns_collapse_id="c", apns_expiration="0", apns_priority="5")
    await peer.ask(B, apns_topic=None)
    first, second = apns.arrivals()
    assert (
        first.items()
        >= {
            "device": A,
            "apns_id": ID,
            "collapse_id": "c",
            "expiration": "0",
            "priority": "5",
            "push_type": "alert",
            "topic": "com.example.app",
            "body": '{"aps":{}}',
            "outcome": "answered",
            "status": 200,
            "stream_id": 1,
        }.items()
    )
    assert (second["status"], second["reason"], second["delivered"]) == (400, "MissingTopic", False)
    assert apns.arrivals(device=B) == [second]
    assert apns.arrivals(after=first["sequence"]) == [second]
    assert apns.arrivals(limit=1) == [first]
    assert apns.devices() == {A: {"requests": 1, "delivered": 1}, B: {"requests": 1, "delivered": 0}}


async def test_connections_are_counted(connect: Connect, apns: SimulatorClient) -> None:
    one, other = await connect(), await connect()
    for peer in (one, one, other):
        await peer.ask()
    stats = apns.stats()
    assert (stats["connections_opened"], stats["connections_open"]) == (2, 2)
    assert [figures["requests"] for figures in apns.connections()] == [2, 1]
    await one.close()
    apns.wait(at_most={"connections_open": 1})
    assert [figures["answered"] for figures in apns.ended_connections()] == [2]


async def test_waiting_for_figures(peer: Peer, apns: SimulatorClient) -> None:
    peer.push()
    assert (await apns.until(requests=1))["requests"] == 1
    with pytest.raises(NotInTime, match="'requests': 1"):
        apns.wait(requests=2, timeout=0.05)
    with pytest.raises(SimulatorError, match="no figure called nonsense"):
        apns.wait(nonsense=1)


async def test_a_reset_forgets_traffic_and_keeps_what_is_open(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("hold")
    stream = peer.push(A)
    apns.wait(held=1)
    apns.reset("traffic")
    stats = apns.stats()
    assert (stats["requests"], stats["pending"], stats["connections_open"]) == (1, 1, 1)
    apns.release()
    await peer.answer(stream)
    stats = apns.stats()
    assert (stats["delivered"], stats["pending"]) == (1, 0)


def test_the_api_refuses_what_it_does_not_know(apns: SimulatorClient, ready: Ready) -> None:
    for method, path, body, why in (
        ("GET", "/nowhere", None, "no such path"),
        ("DELETE", "/stats", None, "takes GET"),
        ("PATCH", "/config", {"colour": "red"}, "colour"),
        ("PATCH", "/config", {"accept": "maybe"}, "accept"),
        ("POST", "/connections/act", {"connections": "some", "action": {"do": "drop"}}, "connections"),
        ("POST", "/reset", {"what": ["everything"]}, "everything"),
        ("GET", "/arrivals?limit=x", None, "limit"),
        ("POST", "/keys", {"key_id": "X"}, "team_id"),
        ("POST", "/keys", {"key_id": "X", "team_id": "Y", "key_file": "/nowhere.p8"}, "nowhere"),
    ):
        with pytest.raises(SimulatorError, match=why):
            apns.call(method, path, body)
    with urllib.request.urlopen(ready.control_url + "/health") as response:
        assert json.load(response) == {"ok": True}


def test_memory_is_bounded_and_counts_stay_exact() -> None:
    ledger = Ledger(Devices(screens=10), log_cap=100, id_cap=1_000)
    for at in range(12_000):
        apns_id = f"00000000-0000-4000-8000-{at % 2_000:012d}"
        device = f"{at % 50:064x}"
        request = Request("POST", "", device, apns_id, None, "alert", None, None, b"c", None, 4, ())
        arrival = ledger.arrive(0.0, 1, at, request, b"body")
        ledger.deliver(arrival)
        ledger.answer(arrival, 200, None)
    totals = ledger.totals
    assert (totals.requests, totals.answered, totals.delivered) == (12_000, 12_000, 12_000)
    assert ledger.distinct_ids == 1_000
    assert (totals.repeated_requests, totals.repeated_deliveries, totals.ids_untracked) == (
        5_000,
        5_000,
        6_000,
    )
    assert len(ledger.arrivals(limit=1_000)) == 100
    shown = [ledger.devices.at(f"{at:064x}").as_json() for at in range(50)]
    assert sum(bool(one["shown"]) for one in shown) == 10
    assert {one["delivered"] for one in shown} == {240}
