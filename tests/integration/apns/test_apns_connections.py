"""Connections: opened patiently, kept, pinged, spread, replaced, and never a flood of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aioapns.connection import APNsBaseClientProtocol

from deploy.local.certificates import Certificates
from deploy.simulator.client import SimulatorClient, step
from drain.apns.frames import PUSH_PROMISE, SETTINGS, frame
from drain.apns.model import Answered, MaybeDelivered, NotSent, Reply
from drain.apns.protocol import ApnsConnection
from tests.integration.apns.conftest import Courier, until
from tests.integration.apns.test_apns_session import kinds, statuses


def sockets() -> int:
    """Sockets of this process, whoever has them."""
    return sum(os.readlink(link).startswith("socket:") for link in _links())


def _links() -> list[Path]:
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


@contextlib.contextmanager
def refusing_server(certificates: Certificates) -> Iterator[int]:
    """Wants a client certificate of its own CA; OpenSSL sends the alert that asyncio's server does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.good.certificate, certificates.good.key)
    context.load_verify_locations(certificates.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                with accepted, contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


async def test_idle_connections_are_kept_and_pinged(
    courier: Courier, apns: SimulatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aioapns closes after ten idle seconds, and each new connection had a token of its own."""
    monkeypatch.setattr(APNsBaseClientProtocol, "INACTIVITY_TIME", 0.1)
    monkeypatch.setattr("drain.apns.session.LOOK_SECONDS", 0.05)
    session = await courier.session(idle_ping_interval=0.1, ping_timeout=0.2)
    await courier.send(session, courier.pushes(1))
    stats = await apns.until(pings=3)
    assert (stats["connections_open"], stats["connections_opened"]) == (1, 1)


async def test_connections_beyond_the_first_leave_when_they_were_idle_for_long(
    courier: Courier, apns: SimulatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drain.apns.session.LOOK_SECONDS", 0.05)
    apns.configure(latency={"kind": "fixed", "seconds": 0.1})
    session = await courier.session(streams_per_connection=2, max_connections=3, idle_seconds=0.3)
    while session.open_connections < 3:
        await courier.send(session, courier.pushes(20))
    await apns.until(at_most={"connections_open": 1})
    await asyncio.sleep(0.4)
    assert session.connected


@pytest.mark.parametrize("fault", ["mute", "stop_reading"])
async def test_a_dead_peer_is_found_by_its_silence_and_replaced(
    courier: Courier, apns: SimulatorClient, fault: str
) -> None:
    """gorush#568: a dead connection went unnoticed for 15 minutes."""
    session = await courier.session(ping_interval=0.3, ping_timeout=0.3, max_connections=1)
    await courier.send(session, courier.pushes(5))
    apns.act(fault)
    began = time.monotonic()
    replies = await courier.send(session, courier.pushes(5))
    assert kinds(replies) == {"MaybeDelivered": 5}
    assert time.monotonic() - began < 5
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert apns.stats()["connections_opened"] == 2


async def test_a_silent_peer_gets_no_more_pushes_while_it_is_asked_for_a_sign_of_life(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(ping_interval=0.2, ping_timeout=5.0, max_connections=2, push_timeout=1.0)
    apns.act("mute")
    waiting = courier.sending(session, courier.pushes(1))
    await until(lambda: not session.connected)
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5, "on another connection"
    apns.act("unmute")
    assert kinds(await waiting) in ({"Answered": 1}, {"NoAnswer": 1})
    assert apns.stats()["requests"] == 6


async def test_a_slow_peer_that_answers_pings_is_not_taken_for_dead(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(ping_interval=0.1, ping_timeout=0.2)
    apns.next_requests(5, "answer", delay=1.0)
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert apns.stats()["connections_opened"] == 1


async def test_a_connection_that_answers_pings_and_no_pushes_is_replaced(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(push_timeout=0.3, strikes=3, max_connections=1)
    apns.next_requests(1, "silence", for_connection=True)
    assert kinds(await courier.send(session, courier.pushes(5))) == {"NoAnswer": 5}
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert apns.stats()["requests"] == 10


@pytest.mark.parametrize("accept", ["off", "close", "reset", "hold", "close_after_handshake"])
async def test_apns_that_cannot_be_reached_burns_nothing_and_heals(
    courier: Courier, apns: SimulatorClient, accept: str
) -> None:
    """rpush#723, #734: rows marked failed. aioapns: 250 connects in 5 s, or a lock held without a deadline."""
    apns.configure(accept=accept)
    session = await courier.session(connected=False, connect_timeout=0.3, handshake_timeout=0.3)
    began = time.monotonic()
    replies = await courier.send(session, courier.pushes(20), within=1.0)
    assert 0.9 < time.monotonic() - began < 6
    assert kinds(replies) == {"NotSent": 20}
    assert not any(reply.config for reply in replies if isinstance(reply, NotSent))
    assert session.problem is not None
    assert session.connect_failures < 40, "one breaker for all pushes"
    assert apns.stats()["requests"] == 0
    apns.configure(accept="normal")
    assert statuses(await courier.send(session, courier.pushes(20))) == [200] * 20
    assert session.problem is None


async def test_a_name_that_does_not_resolve_is_a_problem_with_a_name(courier: Courier) -> None:
    session = await courier.session(courier.target(host="apns.invalid"), connected=False)
    await until(lambda: session.problem)
    assert "apns.invalid" in str(session.problem)


@pytest.mark.parametrize(
    ("certificate", "why"),
    [
        ("wrong_name", "mismatch"),
        ("expired", "expired"),
        ("unknown_ca", "unable to get local issuer certificate"),
        ("self_signed", "self-signed certificate"),
    ],
)
async def test_a_server_that_is_not_apns_gets_no_push(
    courier: Courier, apns: SimulatorClient, certificate: str, why: str
) -> None:
    apns.configure(certificate=certificate)
    session = await courier.session(connected=False)
    [reply] = await courier.send(session, [courier.push()], within=0.5)
    assert isinstance(reply, NotSent)
    assert reply.config, "waiting does not mend it"
    assert why in reply.why.lower()


async def test_a_refused_client_certificate_is_ours_to_mend(
    courier: Courier, certificates: Certificates
) -> None:
    """sygnal#117: an expired certificate, and requests piled up to 5 GB. TLS 1.3 says so after the handshake."""
    target = courier.target(
        team_id=None,
        key_id=None,
        key_file=None,
        certificate_file=certificates.unknown.certificate,
        certificate_key_file=certificates.unknown.key,
        ca_file=certificates.ca,
    )
    with refusing_server(certificates) as port:
        session = await courier.session(replace(target, port=port), connected=False)
        replies = await courier.send(session, courier.pushes(10), within=0.5)
        await session.close(0.5)
    assert all(isinstance(reply, NotSent) and reply.config for reply in replies), replies
    assert "unknown ca" in str(session.problem)


async def test_a_server_that_hangs_up_after_the_handshake_gets_no_push(
    courier: Courier, apns: SimulatorClient
) -> None:
    """The same without the alert: aioapns burnt five attempts in 0.06 s."""
    apns.configure(client_certificate="required")
    session = await courier.session(connected=False)
    assert kinds(await courier.send(session, courier.pushes(10), within=0.5)) == {"NotSent": 10}
    assert session.connect_failures < 20
    assert apns.stats()["requests"] == 0


async def test_a_client_certificate_needs_no_token(courier: Courier, apns: SimulatorClient) -> None:
    apns.configure(client_certificate="required")
    target = courier.target(
        team_id=None, key_id=None, key_file=None, certificate_file=Path(courier.ready.client_cert_file)
    )
    session = await courier.session(target)
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert apns.tokens() == []


async def test_a_missing_certificate_file_is_named(courier: Courier, tmp_path: Path) -> None:
    target = courier.target(team_id=None, key_id=None, key_file=None, certificate_file=tmp_path / "gone.pem")
    session = await courier.session(target, connected=False)
    [reply] = await courier.send(session, [courier.push()], within=0.3)
    assert isinstance(reply, NotSent)
    assert reply.config
    assert "gone.pem" in reply.why


async def test_every_connection_dropped_three_times_and_work_goes_on_within_seconds(
    courier: Courier, apns: SimulatorClient
) -> None:
    """aioapns#55: after one lost connection it never recovered. The backoff is the default one."""
    session = await courier.session(backoff_base=0.5, backoff_cap=60.0)
    for _ in range(3):
        assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
        apns.act("drop")
        await until(lambda: not session.connected)
    began = time.monotonic()
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5
    assert time.monotonic() - began < 5


async def test_hundreds_of_forced_reconnects_leak_no_socket(courier: Courier, apns: SimulatorClient) -> None:
    """sideshow/apns2#238: connections leaked."""
    session = await courier.session(backoff_base=0.001, backoff_cap=0.001, max_connections=2)
    before = sockets()
    apns.script([step("drop")], end="repeat_all")
    for _ in range(60):
        await courier.send(session, courier.pushes(2))
        assert sockets() <= before + 3
    assert session.connects >= 60
    await until(lambda: session.connected)
    assert sockets() <= before + 1


async def test_latency_is_hidden_by_more_connections_up_to_the_limit(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#399, #1017: one connection is a bottleneck."""
    apns.configure(latency={"kind": "fixed", "seconds": 0.1}, max_concurrent_streams=10)

    async def seconds(connections: int) -> float:
        session = await courier.session(max_connections=connections)
        while session.open_connections < connections:
            await courier.send(session, courier.pushes(50))
        began = time.monotonic()
        waiting = courier.sending(session, courier.pushes(80))
        await until(lambda: session.in_flight == 10 * connections)
        while not waiting.done():
            assert session.in_flight <= 10 * connections
            await asyncio.sleep(0.01)
        assert statuses(await waiting) == [200] * 80
        assert session.open_connections == connections
        return time.monotonic() - began

    alone, four = await seconds(1), await seconds(4)
    assert alone > 0.8
    assert four < alone


async def test_load_is_spread_evenly(courier: Courier, apns: SimulatorClient) -> None:
    apns.configure(latency={"kind": "fixed", "seconds": 0.05}, max_concurrent_streams=50)
    session = await courier.session(max_connections=3)
    while session.open_connections < 3:
        await courier.send(session, courier.pushes(300))
    apns.reset("traffic")
    await courier.send(session, courier.pushes(90))
    counts = [len(apns.arrivals(connection=one["connection"])) for one in apns.connections()]
    assert counts == [30, 30, 30]


async def test_a_connection_is_replaced_before_apns_refuses_its_requests(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushok#169: about 50,000 requests, then REFUSED_STREAM."""
    apns.configure(requests_per_connection=100)
    session = await courier.session(requests_per_connection=100, max_connections=1)
    for _ in range(30):
        assert statuses(await courier.send(session, courier.pushes(20))) == [200] * 20
    stats = apns.stats()
    assert (stats["requests"], stats["refused"]) == (600, 0)
    assert 6 <= stats["connections_opened"] <= 8
    assert stats["connections_open"] <= 2


async def test_requests_that_apns_refuses_are_sent_again_once_on_another_connection(
    courier: Courier, apns: SimulatorClient
) -> None:
    apns.configure(requests_per_connection=50)
    session = await courier.session()
    pushes = courier.pushes(120)
    rounds = 0
    while pushes:
        rounds += 1
        assert rounds < 20
        replies = await courier.send(session, pushes)
        assert set(kinds(replies)) <= {"Answered", "NotSent"}
        pushes = [push for push, reply in zip(pushes, replies, strict=True) if isinstance(reply, NotSent)]
    stats = apns.stats()
    assert (stats["delivered"], stats["repeated_deliveries"], stats["repeated_requests"]) == (120, 0, 0)


async def test_an_old_connection_is_replaced_without_a_gap(courier: Courier, apns: SimulatorClient) -> None:
    session = await courier.session(max_age=0.4, max_connections=1)
    replies: list[Reply] = []
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        assert session.connected
        replies += await courier.send(session, courier.pushes(5))
    assert set(statuses(replies)) == {200}
    stats = apns.stats()
    assert stats["connections_opened"] >= 3
    assert stats["connections_open"] <= 2


async def test_a_connection_that_answers_500_for_ever_is_left(
    courier: Courier, apns: SimulatorClient
) -> None:
    """pushy#529, #408."""
    session = await courier.session(max_connections=1)
    apns.next_requests(1, "answer", reason="InternalServerError", for_connection=True)
    answers = [(await courier.send(session, courier.pushes(1)))[0] for _ in range(6)]
    assert statuses(answers) == [500] * 3 + [200] * 3
    assert apns.stats()["connections_opened"] == 2


@pytest.mark.parametrize("reason", ["Shutdown", "IdleTimeout"])
async def test_a_server_that_closes_is_left_for_another(
    courier: Courier, apns: SimulatorClient, reason: str
) -> None:
    session = await courier.session(max_connections=1)
    apns.next_requests(1, "answer", reason=reason, for_connection=True)
    answers = [(await courier.send(session, courier.pushes(1)))[0] for _ in range(3)]
    assert [answer.reason for answer in answers if isinstance(answer, Answered)] == [reason, None, None]
    assert apns.stats()["connections_opened"] == 2


async def test_connections_that_end_with_their_first_bytes_are_not_counted_as_open(
    courier: Courier, certificates: Certificates
) -> None:
    """Counted, they would fill the pool, and no connection would be opened any more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.good.certificate, certificates.good.key)
    context.set_alpn_protocols(["h2"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(SETTINGS, 0, 0, b"") + frame(PUSH_PROMISE, 0, 1, bytes(4)))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    target = courier.target(port=server.sockets[0].getsockname()[1], ca_file=certificates.ca)
    session = await courier.session(target, connected=False, max_connections=1, backoff_cap=0.02)
    await until(lambda: session.connect_failures >= 4)
    assert "PUSH_PROMISE" in str(session.problem)
    await session.close(0.0)
    server.close()


async def test_enhance_your_calm_is_obeyed_before_connecting_again(
    courier: Courier, apns: SimulatorClient
) -> None:
    """node-apn#142: a burst of 20,000 ended so."""
    session = await courier.session(calm_seconds=0.6)
    await courier.send(session, courier.pushes(1))
    apns.act("goaway", code="ENHANCE_YOUR_CALM")
    await until(lambda: not session.connected)
    replies = await courier.send(session, courier.pushes(5), within=0.4)
    assert kinds(replies) == {"NotSent": 5}
    assert apns.stats()["tcp_accepted"] == 1
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5


async def test_a_goaway_at_once_is_no_reason_to_reconnect_at_full_speed(
    courier: Courier, apns: SimulatorClient
) -> None:
    """APNs takes fast reconnecting for an attack."""
    session = await courier.session(backoff_base=0.1, backoff_cap=5.0)
    apns.always("goaway", last_stream_id="before")
    loop = asyncio.get_running_loop()
    ends = loop.time() + 1.5
    while loop.time() < ends:
        await courier.send(session, courier.pushes(1), within=0.2)
    assert session.connects + session.connect_failures < 15


@pytest.mark.parametrize("garbage", ["ff" * 40, "48545450", "000004010000000005ffffffff"])
async def test_a_peer_that_breaks_the_protocol_is_left(
    courier: Courier, apns: SimulatorClient, garbage: str
) -> None:
    session = await courier.session()
    apns.next_requests(1, "garbage", hex=garbage + "00" * 20)
    [reply] = await courier.send(session, courier.pushes(1))
    assert isinstance(reply, MaybeDelivered)
    assert reply.why.startswith("protocol error")
    assert statuses(await courier.send(session, courier.pushes(5))) == [200] * 5


async def test_close_waits_for_what_is_owed_and_replies_to_everything(
    courier: Courier, apns: SimulatorClient
) -> None:
    session = await courier.session(streams_per_connection=3, max_connections=1)
    loop = asyncio.get_running_loop()
    apns.script([step("answer", delay=0.3, times=2), step("silence")])
    got: dict[int, Reply] = {}
    for number, push in enumerate(courier.pushes(5)):
        session.submit(push, loop.time() + 9, lambda _, reply, n=number: got.__setitem__(n, reply))
    await apns.until(requests=3)
    began = loop.time()
    await session.close(0.6)
    assert 0.5 < loop.time() - began < 4
    replies = [got[number] for number in range(5)]
    assert statuses(replies[:2]) == [200] * 2
    assert replies[2] == MaybeDelivered("session closed")
    assert replies[3:] == [NotSent("session closed")] * 2
    assert session.open_connections == 0
    assert await courier.send(session, courier.pushes(1)) == [NotSent("session closed")]
    await apns.until(at_most={"connections_open": 0})


async def test_close_is_quick_when_apns_hangs(courier: Courier, apns: SimulatorClient) -> None:
    session = await courier.session(close_timeout=0.3)
    apns.act("stop_reading")
    waiting = courier.sending(session, courier.pushes(5))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await session.close(0.2)
    assert time.monotonic() - began < 5
    assert kinds(await waiting) == {"MaybeDelivered": 5}


async def test_closing_while_connecting_leaves_nothing_behind(
    courier: Courier, apns: SimulatorClient
) -> None:
    apns.configure(accept="hold")
    before = sockets()
    session = await courier.session(connected=False)
    await asyncio.sleep(0.1)
    await session.close(1.0)
    await asyncio.sleep(0)
    assert sockets() == before


async def test_a_cancellation_at_the_very_moment_a_connection_is_ready_is_not_lost(
    courier: Courier, apns: SimulatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for of Python 3.11 swallows it, and close() waited for ever."""
    session = await courier.session(connected=False)
    settled = ApnsConnection.settled
    keeper = session._keeper
    assert keeper is not None

    def at_once(connection: ApnsConnection) -> None:
        settled(connection)
        keeper.cancel()

    monkeypatch.setattr(ApnsConnection, "settled", at_once)
    await asyncio.wait([keeper], timeout=5)
    assert keeper.cancelled()
