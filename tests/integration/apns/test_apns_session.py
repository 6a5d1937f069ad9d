"""One stream, one push, one reply: what aioapns gets wrong on the wire, each fault by the symptom it had."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter

import pytest

from deploy.local.certificates import Certificates
from deploy.simulator.client import SimulatorClient, step
from drain.apns.frames import PREFACE, SETTINGS, WINDOW_UPDATE
from drain.apns.model import Answered, MaybeDelivered, NotSent, Reply
from drain.apns.protocol import ApnsConnection
from tests.integration.apns.conftest import Courier, until


def kinds(replies: list[Reply]) -> dict[str, int]:
    return dict(Counter(type(reply).__name__ for reply in replies))


def statuses(replies: list[Reply]) -> list[int]:
    return [reply.status if isinstance(reply, Answered) else 0 for reply in replies]


@pytest.mark.parametrize("apns_id", ["missing", "upper", "random", "6f1c2a3b-0000-4000-8000-abcdef012345"])
async def test_answers_with_another_apns_id_find_their_push(
    courier: Courier, apns: SimulatorClient, apns_id: str
) -> None:
    """aioapns matches by apns-id: such a caller hung for ever, or the connection died."""
    apns.configure(answer_apns_id=apns_id)
    pushes = courier.pushes(20)
    apns.rule(*[push.device_token for push in pushes[::2]], reason="BadDeviceToken")
    replies = await courier.send(await courier.session(), pushes)
    assert statuses(replies) == [400, 200] * 10
    assert apns.stats()["connections_opened"] == 1


async def test_the_same_id_is_never_in_flight_twice(courier: Courier, apns: SimulatorClient) -> None:
    session = await courier.session()
    apns.always("hold")
    push = courier.push()
    first = courier.sending(session, [push])
    await apns.until(requests=1)
    [second] = await courier.send(session, [push])
    assert second == NotSent("the same notification_id is already in flight")
    apns.release()
    assert statuses(await first) == [200]
    apns.clear_scripts()
    assert statuses(await courier.send(session, [push])) == [200], "answered: free again"
    assert apns.stats()["requests"] == 2


async def test_a_cold_burst_on_a_connection_of_one_stream_is_delivered_whole(
    courier: Courier, apns: SimulatorClient
) -> None:
    """apnotic#140, #141; go-apnsmock with one stream: of 50 pushes 46 hung."""
    apns.configure(start_with_one_stream=True)
    session = await courier.session(connected=False)
    replies = await courier.send(session, courier.pushes(50))
    assert statuses(replies) == [200] * 50
    stats = apns.stats()
    assert (stats["requests"], stats["refused"]) == (50, 0)


async def test_nothing_is_sent_before_the_peers_settings(
    courier: Courier, certificates: Certificates
) -> None:
    """aioapns starts with 1,000 streams; what is refused then hangs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.good.certificate, certificates.good.key)
    context.set_alpn_protocols(["h2"])
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        try:
            async with asyncio.timeout(0.4):
                while True:
                    head = await reader.readexactly(9)
                    seen.append(head[3])
                    await reader.readexactly(int.from_bytes(head[:3], "big"))
        except TimeoutError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    target = courier.target(port=server.sockets[0].getsockname()[1], ca_file=certificates.ca)
    session = await courier.session(target, connected=False)
    replies = await courier.send(session, courier.pushes(10), within=0.3)
    await session.close(0.0)
    server.close()
    assert kinds(replies) == {"NotSent": 10}
    assert set(seen) == {SETTINGS, WINDOW_UPDATE}


async def test_a_loop_that_was_blocked_writes_nothing_late(courier: Courier, apns: SimulatorClient) -> None:
    """The lease may be gone by then."""
    session = await courier.session()
    loop = asyncio.get_running_loop()
    got: list[Reply] = []
    session.submit(courier.push(), loop.time() + 0.05, lambda _, reply: got.append(reply))
    time.sleep(0.1)
    await until(lambda: got)
    assert kinds(got) == {"NotSent": 1}
    assert apns.stats()["requests"] == 0


@pytest.mark.parametrize(
    "code",
    ["NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "REFUSED_STREAM", "CANCEL", "ENHANCE_YOUR_CALM", 77],
)
async def test_a_reset_stream_is_answered_at_once(
    courier: Courier, apns: SimulatorClient, code: str | int
) -> None:
    """sideshow/apns2#17; apnotic#58, #75; APNSwift#93, #101: waited for ever after a reset."""
    session = await courier.session(calm_seconds=0.05)
    pushes = courier.pushes(10)
    apns.script([step("reset", code=code)], device=pushes[4].device_token)
    replies = await courier.send(session, pushes)
    assert statuses(replies[:4] + replies[5:]) == [200] * 9
    name = code if isinstance(code, str) else "0x4d"
    assert replies[4] == (NotSent if code == "REFUSED_STREAM" else MaybeDelivered)(f"RST_STREAM {name}")
    assert session.in_flight == 0
    assert statuses(await courier.send(session, courier.pushes(10))) == [200] * 10


async def test_pushes_that_are_never_answered_harm_no_other_and_their_slots_come_back(
    courier: Courier, apns: SimulatorClient
) -> None:
    """rpush#648, #477, #564; pushy#816: a lost answer blocked the queue, and its slot was gone for good."""
    session = await courier.session(push_timeout=0.5, max_connections=1)
    free = session.free_streams
    pushes = courier.pushes(50)
    for push in pushes[:3]:
        apns.always("silence", device=push.device_token)
    began = time.monotonic()
    replies = await courier.send(session, pushes)
    assert time.monotonic() - began < 5
    assert kinds(replies[:3]) == {"NoAnswer": 3}
    assert statuses(replies[3:]) == [200] * 47
    assert session.free_streams == free
    stats = apns.stats()
    assert (stats["requests"], stats["connections_opened"]) == (50, 1)
    await apns.until(at_most={"streams_open": 0})


async def test_a_late_answer_harms_nobody(courier: Courier, apns: SimulatorClient) -> None:
    """aioapns#41: InvalidStateError killed the connection, and nine others were sent again."""
    session = await courier.session(push_timeout=1.0)
    late = courier.push()
    apns.always("answer", device=late.device_token, delay=1.3)
    others = courier.sending(session, courier.pushes(9))
    assert kinds(await courier.send(session, [late])) == {"NoAnswer": 1}
    apns.next_requests(5, "answer", delay=0.6)
    in_flight_when_it_comes = await courier.send(session, courier.pushes(5))
    assert statuses([*await others, *in_flight_when_it_comes]) == [200] * 14
    stats = apns.stats()
    assert (stats["requests"], stats["connections_opened"], stats["protocol_errors"]) == (15, 1, 0)


async def test_a_goaway_lets_answers_come_and_gives_the_rest_back(
    courier: Courier, apns: SimulatorClient
) -> None:
    """aioapns closes at once and sends everything again: ten in flight made twenty requests. python-hyper/h2#1181."""
    session = await courier.session()
    apns.script(
        [step("answer", delay=0.2, times=4), step("goaway", last_stream_id="this"), step("pass", times=9)]
    )
    pushes = courier.pushes(10)
    replies = await courier.send(session, pushes)
    assert statuses(replies[:5]) == [200] * 5
    assert replies[5:] == [NotSent("GOAWAY NO_ERROR")] * 5
    assert statuses(await courier.send(session, pushes[5:])) == [200] * 5
    stats = apns.stats()
    assert stats["delivered"] == 10
    assert stats["repeated_deliveries"] == 0
    assert stats["connections_opened"] == 2


async def test_a_goaway_with_everything_in_flight_doubles_nothing(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session()
    apns.next_requests(10, "hold")
    waiting = courier.sending(session, courier.pushes(10))
    await apns.until(requests=10)
    apns.act("goaway", last_stream_id="max", close="never")
    await until(lambda: not session.connected or session.open_connections > 1)
    assert statuses(await courier.send(session, courier.pushes(3))) == [200] * 3, "on another connection"
    apns.release()
    assert statuses(await waiting) == [200] * 10
    stats = apns.stats()
    assert (stats["requests"], stats["repeated_requests"]) == (13, 0)


async def test_a_goaway_that_is_never_followed_by_answers_ends_at_the_drain_deadline(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(drain_seconds=0.3)
    apns.next_requests(2, "silence")
    waiting = courier.sending(session, courier.pushes(2))
    await apns.until(requests=2)
    apns.act("goaway", last_stream_id="max", close="never")
    assert kinds(await waiting) == {"MaybeDelivered": 2}
    assert apns.stats()["requests"] == 2


async def test_a_dropped_connection_leaves_maybe_and_sends_nothing_again(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#480; aioapns: a TCP drop turned 10 requests into 20."""
    session = await courier.session()
    apns.next_requests(50, "hold")
    waiting = courier.sending(session, courier.pushes(50))
    await apns.until(requests=50)
    apns.act("drop")
    assert kinds(await waiting) == {"MaybeDelivered": 50}
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert apns.stats()["requests"] == 55


async def test_thousands_of_error_bodies_do_not_stall_the_connection(
    courier: Courier, apns: SimulatorClient
) -> None:
    """aioapns never acknowledges data: after 2,427 BadDeviceToken the answers stopped."""
    session = await courier.session(max_connections=1)
    apns.always("answer", reason="BadDeviceToken")
    for _ in range(6):
        replies = await courier.send(session, courier.pushes(500))
        assert {reply.reason for reply in replies if isinstance(reply, Answered)} == {"BadDeviceToken"}
    stats = apns.stats()
    assert (stats["requests"], stats["bodies_blocked"], stats["connections_opened"]) == (3000, 0, 1)


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ({"empty_data": True}, 200, None),
        ({"reason": "PayloadTooLarge", "body_frames": 7}, 413, "PayloadTooLarge"),
        ({"status": 503, "no_body": True}, 503, None),
        ({"status": 502, "body": "<html>Bad gateway</html>"}, 502, None),
        ({"status": 400, "body": "[1]"}, 400, None),
        ({"status": 400, "body": '{"reason": 7}'}, 400, None),
        ({"status": 418, "body": '{"reason": "Teapot"}'}, 418, "Teapot"),
        ({"status": 500, "body": "x" * 60_000, "body_frames": 10}, 500, None),
    ],
    ids=["empty data", "pieces", "no body", "html", "no object", "no text", "unknown", "endless"],
)
async def test_bodies_of_any_kind_are_one_answer(
    courier: Courier, apns: SimulatorClient, answer: dict[str, object], status: int, reason: str | None
) -> None:
    """aioapns takes each DATA frame for whole JSON: 5 pushes became 9 requests, or hung."""
    session = await courier.session(strikes=99)
    apns.next_requests(5, "answer", **answer)
    replies = await courier.send(session, courier.pushes(5))
    assert [(r.status, r.reason) for r in replies if isinstance(r, Answered)] == [(status, reason)] * 5
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    stats = apns.stats()
    assert (stats["requests"], stats["connections_opened"]) == (10, 1)


async def test_time_of_death_and_retry_after_reach_the_row(courier: Courier, apns: SimulatorClient) -> None:
    """aioapns#46: the timestamp of a 410 was lost."""
    session = await courier.session()
    gone, slow = courier.push(), courier.push()
    apns.unregister(gone.device_token, since_ms=1_700_000_000_123)
    apns.always("answer", device=slow.device_token, reason="TooManyRequests", headers={"retry-after": "30"})
    dead, later = await courier.send(session, [gone, slow])
    assert isinstance(dead, Answered)
    assert (dead.status, dead.reason, dead.timestamp_ms) == (410, "Unregistered", 1_700_000_000_123)
    assert isinstance(later, Answered)
    assert (later.status, later.retry_after) == (429, 30.0)


@pytest.mark.parametrize(("count", "size"), [(50, 2000), (200, 4096)])
async def test_a_burst_larger_than_the_window_waits_for_it(
    courier: Courier, apns: SimulatorClient, count: int, size: int
) -> None:
    """aioapns sends HEADERS first: 200 bodies of 4 KB made 630 of them, and 429 slots were lost."""
    session = await courier.session(max_connections=1)
    body = b'{"aps":{"alert":"' + b"x" * (size - 20) + b'"}}'
    replies = await courier.send(session, courier.pushes(count, body=body))
    assert statuses(replies) == [200] * count
    stats = apns.stats()
    assert (stats["requests"], stats["protocol_errors"], stats["refused"]) == (count, 0, 0)


async def test_a_window_that_stays_shut_opens_no_stream(courier: Courier, apns: SimulatorClient) -> None:
    apns.configure(receive_window="hold")
    session = await courier.session(max_connections=1)
    body = b'{"aps":{"alert":"' + b"x" * 4000 + b'"}}'
    replies = await courier.send(session, courier.pushes(40, body=body), within=0.5)
    delivered = statuses(replies).count(200)
    assert delivered == 65_535 // len(body)
    assert replies[delivered:] == [NotSent("no free stream in time")] * (40 - delivered)
    assert apns.stats()["requests"] == delivered
    apns.act("release_window")
    assert statuses(await courier.send(session, courier.pushes(40, body=body))) == [200] * 40


async def test_a_stream_window_below_the_body_is_not_waited_for(
    courier: Courier, apns: SimulatorClient
) -> None:
    apns.configure(initial_window_size=10)
    session = await courier.session()
    [reply] = await courier.send(session, [courier.push()])
    assert reply == NotSent("peer's stream window is 10 bytes")
    assert apns.stats()["requests"] == 0


async def test_the_stream_limit_moves_both_ways_and_late_pushes_are_not_sent(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#732, #476: one stream after an expired token, 700 s of latency. What is late is given back unsent."""
    session = await courier.session(max_connections=1)
    apns.act("stream_limit", streams=1)
    await until(lambda: session.free_streams == 1)
    apns.configure(latency={"kind": "fixed", "seconds": 0.1})
    replies = await courier.send(session, courier.pushes(20), within=0.45)
    sent = statuses(replies).count(200)
    assert 2 <= sent <= 6
    assert replies[sent:] == [NotSent("no free stream in time")] * (20 - sent)
    assert apns.stats()["requests"] == sent
    apns.act("stream_limit", streams=1000)
    await until(lambda: session.free_streams == session.limits.streams_per_connection)
    began = time.monotonic()
    assert statuses(await courier.send(session, courier.pushes(20))) == [200] * 20
    assert time.monotonic() - began < 1.8


async def test_headers_of_the_request_arrive_as_they_were_made(
    courier: Courier, apns: SimulatorClient
) -> None:
    """rpush#206: expiration 0 by default. None: no header; 0: "0"; a time passes unchanged."""
    session = await courier.session()
    pushes = [
        courier.push(expiration=None, priority=None),
        courier.push(expiration=0, priority=5),
        courier.push(expiration=4_000_000_000, collapse_id="order 17"),
    ]
    assert statuses(await courier.send(session, pushes)) == [200] * 3
    seen = [apns.arrivals(device=push.device_token)[0] for push in pushes]
    assert [arrival["expiration"] for arrival in seen] == [None, "0", "4000000000"]
    assert [arrival["priority"] for arrival in seen] == [None, "5", "10"]
    assert [arrival["collapse_id"] for arrival in seen] == [None, None, "order 17"]
    assert [arrival["apns_id"] for arrival in seen] == [push.notification_id for push in pushes]


async def test_all_pushes_of_one_turn_of_the_loop_are_written_at_once(
    courier: Courier, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await courier.session()
    writes = []
    flush = ApnsConnection.flush

    def counted(connection: ApnsConnection) -> None:
        if connection.streams.http2.outgoing:
            writes.append(len(connection.streams.flights))
        flush(connection)

    monkeypatch.setattr(ApnsConnection, "flush", counted)
    assert statuses(await courier.send(session, courier.pushes(50))) == [200] * 50
    assert [size for size in writes if size == 50] == [50]
    assert not [size for size in writes if 0 < size < 50], "each other write is an acknowledgement"


async def test_a_callback_that_raises_costs_no_other_push_its_reply(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session()
    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    got: list[Reply] = []

    def reply(number: int, answer: Reply) -> None:
        if number % 2:
            raise RuntimeError(number)
        got.append(answer)

    for number, push in enumerate(courier.pushes(10)):
        session.submit(push, loop.time() + 5, lambda _, r, n=number: reply(n, r))
    await until(lambda: len(got) == 5 and len(raised) == 5)
    assert apns.stats()["connections_opened"] == 1
