"""What can go wrong on the wire, each fault as the client sees it and as the simulator counts it."""

import asyncio
import json
import select
import socket
import time

import pytest

from deploy.simulator import frames
from deploy.simulator.client import SimulatorClient, step
from deploy.simulator.process import Ready
from tests.simulator.conftest import Connect
from tests.simulator.wire import Peer, tls_context

MANY = frames.SETTING_MAX_CONCURRENT_STREAMS


@pytest.mark.parametrize("code", ["REFUSED_STREAM", "INTERNAL_ERROR", "CANCEL", "PROTOCOL_ERROR"])
async def test_rst_stream_with_any_code(peer: Peer, apns: SimulatorClient, code: str) -> None:
    apns.next_requests(1, "reset", code=code)
    assert (await peer.ask()).reset == frames.ERROR_CODES[code]
    assert (await peer.ask()).status == 200, "the connection lives on"
    stats = apns.stats()
    assert (stats["requests"], stats["answered"], stats["never_answered"]) == (2, 1, 1)
    assert stats["delivered"] == (1 if code == "REFUSED_STREAM" else 2)


async def test_silence_on_one_stream(peer: Peer, apns: SimulatorClient) -> None:
    apns.next_requests(1, "silence", delivered=False)
    silent = peer.push()
    assert (await peer.ask()).status == 200
    await peer.nothing_for(0.05, silent)
    stats = apns.stats()
    assert (stats["requests"], stats["answered"], stats["delivered"], stats["streams_open"]) == (2, 1, 1, 1)
    assert stats["outcomes"] == {"silent": 1}


async def test_goaway_below_the_stream_at_hand(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(latency={"kind": "fixed", "seconds": 0.1})
    apns.script([step("pass", times=2), step("goaway", last_stream_id="before", reason="Shutdown")])
    peer = await connect()
    streams = [peer.push() for _ in range(4)]
    assert (await peer.answer(streams[0])).status == 200
    assert (await peer.answer(streams[1])).status == 200
    assert await peer.gone() == "eof", "it closes when the streams up to the last id are answered"
    assert [one.ended for one in peer.answers.values()] == [True, True, False, False]
    (goaway,) = peer.goaways
    assert (goaway.last_stream_id, goaway.code) == (streams[1], 0)
    assert json.loads(goaway.debug) == {"reason": "Shutdown"}
    stats = apns.wait(at_most={"connections_open": 0})
    assert (stats["requests"], stats["delivered"], stats["excluded"]) == (3, 2, 1)
    (ended,) = apns.ended_connections()
    assert ended["after_goaway"] == 1


async def test_goaway_with_a_chosen_last_stream_code_and_debug(
    connect: Connect, apns: SimulatorClient
) -> None:
    apns.always("hold")
    peer = await connect()
    streams = [peer.push() for _ in range(5)]
    apns.wait(held=5)
    apns.act(
        "goaway",
        last_stream_id=5,
        code="ENHANCE_YOUR_CALM",
        reason="BadCertificate",
        timestamp=12,
        close="never",
    )
    await peer.until(lambda: peer.goaways)
    (goaway,) = peer.goaways
    assert (goaway.last_stream_id, goaway.code) == (5, 11)
    assert json.loads(goaway.debug) == {"reason": "BadCertificate", "timestamp": 12}
    assert apns.release() == 3
    for stream in streams[:3]:
        assert (await peer.answer(stream)).status == 200
    late = peer.push()
    await peer.alive()
    assert not peer.answers[late].ended, "a stream above the last id is never processed"
    assert apns.stats()["requests"] == 5


async def test_graceful_goaway_to_all(connect: Connect, apns: SimulatorClient) -> None:
    apns.always("hold")
    peer = await connect()
    stream = peer.push()
    apns.wait(held=1)
    apns.act("goaway", last_stream_id="max", close="never")
    await peer.until(lambda: peer.goaways)
    later = peer.push()
    apns.wait(held=2)
    apns.release()
    assert (await peer.answer(stream)).status == (await peer.answer(later)).status == 200


@pytest.mark.parametrize("policy", ["delivered", "lost"])
async def test_dropped_with_requests_in_flight(connect: Connect, apns: SimulatorClient, policy: str) -> None:
    apns.configure(latency={"kind": "fixed", "seconds": 30}, in_flight_on_loss=policy)
    peer = await connect()
    for _ in range(3):
        peer.push()
    apns.wait(requests=3)
    apns.act("drop")
    assert await peer.gone() == "ConnectionResetError"
    stats = apns.wait(at_most={"connections_open": 0})
    assert (stats["answered"], stats["never_answered"], stats["pending"]) == (0, 3, 0)
    assert stats["delivered"] == (3 if policy == "delivered" else 0)


@pytest.mark.parametrize("delivered", [None, False])
@pytest.mark.parametrize("do", ["drop", "close"])
async def test_a_request_ends_its_connection(
    peer: Peer, apns: SimulatorClient, do: str, delivered: bool | None
) -> None:
    apns.next_requests(1, do, delivered=delivered)
    peer.push()
    await peer.gone()
    stats = apns.wait(at_most={"connections_open": 0})
    assert (stats["outcomes"], stats["delivered"]) == ({"lost": 1}, 1 if delivered is None else 0)


async def test_stop_reading_and_resume(connect: Connect, apns: SimulatorClient) -> None:
    peer = await connect()
    assert (await peer.ask()).status == 200
    apns.act("stop_reading")
    stream = peer.push()
    await peer.nothing_for(0.1, stream)
    assert apns.stats()["requests"] == 1
    apns.act("resume_reading")
    assert (await peer.answer(stream)).status == 200


def test_a_peer_that_stops_reading_blocks_writes(apns: SimulatorClient, ready: Ready) -> None:
    with (
        socket.create_connection((ready.host, ready.port), timeout=5) as plain,
        tls_context(ready).wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        tls.sendall(frames.PREFACE + frames.settings({}))
        tls.recv(1000)
        apns.act("stop_reading")
        tls.settimeout(0.3)
        pings = frames.frame(frames.PING, 0, 0, b"x" * 8) * 4_000
        with pytest.raises(TimeoutError):
            for _ in range(400):  # 27 MB, more than any buffer on the way
                tls.sendall(pings)
        assert select.select([], [tls], [], 0.3)[1] == [], "and it stays blocked"
        assert apns.stats()["pings"] == 0


async def test_stop_reading_for_a_while_in_the_middle_of_a_burst(peer: Peer, apns: SimulatorClient) -> None:
    apns.script([step("pass"), step("stop_reading", seconds=0.3)])
    started = time.monotonic()
    streams = [peer.push() for _ in range(4)]
    for stream in streams[:2]:
        assert (await peer.answer(stream)).status == 200
    assert not peer.answers[streams[2]].ended
    for stream in streams[2:]:
        assert (await peer.answer(stream)).status == 200
    assert time.monotonic() - started >= 0.299


async def test_a_muted_connection_reads_and_says_nothing(peer: Peer, apns: SimulatorClient) -> None:
    await peer.alive()
    apns.act("mute")
    stream = peer.push()
    apns.wait(requests=1)
    await peer.nothing_for(0.05, stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await peer.alive()
    apns.act("unmute")
    assert (await peer.ask()).status == 200


async def test_the_stream_limit_changes_in_flight(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("hold")
    streams = [peer.push() for _ in range(3)]
    apns.wait(held=3)
    apns.act("stream_limit", streams=2)
    await peer.until(lambda: len(peer.settings) == 2)
    assert [one[MANY] for one in peer.settings] == [1000, 2]
    assert (await peer.answer(peer.push())).reset == frames.ERROR_CODES["REFUSED_STREAM"]
    apns.release()
    for stream in streams:
        assert (await peer.answer(stream)).status == 200, "what was open stays"
    stats = apns.stats()
    assert (stats["requests"], stats["refused"]) == (3, 1)


async def test_one_stream_until_the_first_accepted_push(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(start_with_one_stream=True, max_concurrent_streams=500)
    peer = await connect()
    streams = [peer.push(authorization=None)] + [peer.push() for _ in range(4)]
    outcomes = [await peer.answer(stream) for stream in streams]
    assert outcomes[0].status == 403
    assert outcomes[1].status == 200 or outcomes[1].reset is not None
    await peer.until(lambda: [one[MANY] for one in peer.settings] == [1, 500])
    streams = [peer.push() for _ in range(100)]
    assert {(await peer.answer(stream)).status for stream in streams} == {200}


async def test_a_cold_burst_over_the_limit_is_refused(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(start_with_one_stream=True)
    apns.always("hold")
    peer = await connect()
    first, *others = [peer.push() for _ in range(50)]
    assert {(await peer.answer(stream)).reset for stream in others} == {frames.ERROR_CODES["REFUSED_STREAM"]}
    apns.release()
    assert (await peer.answer(first)).status == 200
    stats = apns.stats()
    assert (stats["requests"], stats["delivered"], stats["refused"]) == (1, 1, 49)
    assert apns.arrivals()[-1]["outcome"] == "refused"


async def test_a_limit_counts_only_once_acknowledged_when_told(
    connect: Connect, apns: SimulatorClient
) -> None:
    apns.configure(stream_limit_enforced="acknowledged", max_concurrent_streams=1)
    apns.always("hold")
    peer = await connect(acknowledge_settings=False)
    for _ in range(3):
        peer.push()
    apns.wait(held=3)
    peer.send(frames.SETTINGS_ACK)
    assert (await peer.answer(peer.push())).reset == frames.ERROR_CODES["REFUSED_STREAM"]


async def test_the_limit_falls_to_one_after_an_error(peer: Peer, apns: SimulatorClient) -> None:
    apns.configure(one_stream_after=["ExpiredProviderToken"])
    apns.next_requests(1, "answer", reason="ExpiredProviderToken")
    assert (await peer.ask()).status == 403
    await peer.until(lambda: peer.settings[-1][MANY] == 1)
    assert (await peer.ask()).status == 200
    await peer.until(lambda: peer.settings[-1][MANY] == 1000)


async def test_the_receive_window_is_topped_up(peer: Peer, apns: SimulatorClient) -> None:
    for _ in range(40):
        assert (await peer.ask(body=b"x" * 4096)).status == 200
    assert sum(increment for stream, increment in peer.window_updates if stream == 0) >= 40 * 4096 - 65_535


async def test_a_held_receive_window_is_never_topped_up(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(receive_window="hold")
    peer = await connect()
    for _ in range(15):
        assert (await peer.ask(body=b"x" * 4096)).status == 200
    assert peer.window_updates == []
    apns.act("release_window")
    await peer.until(lambda: peer.window_updates)
    assert peer.window_updates == [(0, 15 * 4096)]


async def test_a_client_that_ignores_the_window_is_told_off(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(receive_window="hold")
    peer = await connect()
    for _ in range(17):
        peer.push(body=b"x" * 4096)
    await peer.gone()
    assert peer.goaways[0].code == frames.ERROR_CODES["FLOW_CONTROL_ERROR"]
    assert apns.stats()["protocol_errors"] == 1


async def test_bodies_wait_for_the_clients_window(peer: Peer, apns: SimulatorClient) -> None:
    """A client that never acknowledges what it got: after 65,535 bytes no more error bodies come."""
    apns.always("answer", reason="BadDeviceToken", body="x" * 16_000)
    streams = [peer.push() for _ in range(5)]
    for stream in streams[:4]:
        assert (await peer.answer(stream)).status == 400
    await peer.nothing_for(0.05, streams[4])
    assert peer.answers[streams[4]].status == 400, "the headers came"
    assert sum(len(chunk) for chunk in peer.answers[streams[4]].chunks) == 65_535 - 64_000
    assert apns.stats()["bodies_blocked"] == 1
    peer.send(frames.window_update(0, 100_000))
    assert len(b"".join((await peer.answer(streams[4])).chunks)) == 16_000


async def test_bodies_wait_for_the_streams_window(connect: Connect, apns: SimulatorClient) -> None:
    peer = await connect(settings={frames.SETTING_INITIAL_WINDOW_SIZE: 10})
    stream = peer.push(apns_topic=None)
    await peer.alive()
    assert b"".join(peer.answers[stream].chunks) == b'{"reason":'
    peer.send(frames.window_update(stream, 100))
    assert (await peer.answer(stream)).json == {"reason": "MissingTopic"}


async def test_a_body_in_pieces(peer: Peer, apns: SimulatorClient) -> None:
    apns.next_requests(1, "answer", reason="ServiceUnavailable", body_frames=4)
    answer = await peer.ask()
    assert len(answer.chunks) == 4
    assert answer.json == {"reason": "ServiceUnavailable"}


async def test_a_body_left_out(peer: Peer, apns: SimulatorClient) -> None:
    apns.next_requests(1, "answer", status=503, no_body=True)
    answer = await peer.ask()
    assert (answer.status, answer.chunks, answer.ended_on_headers) == (503, [], True)


async def test_an_empty_data_frame_after_200(peer: Peer, apns: SimulatorClient) -> None:
    apns.configure(empty_data_after_200=True)
    answer = await peer.ask()
    assert (answer.status, answer.chunks, answer.ended_on_headers) == (200, [b""], False)


async def test_an_html_body(peer: Peer, apns: SimulatorClient) -> None:
    apns.configure(answer_body="html")
    assert b"".join((await peer.ask(apns_topic=None)).chunks).startswith(b"<html>")
    apns.configure(answer_body="json")
    apns.next_requests(
        1, "answer", status=502, body="<h1>Bad gateway</h1>", headers={"Content-Type": "text/html"}
    )
    answer = await peer.ask()
    assert (answer.status, answer.headers["content-type"]) == (502, "text/html")


@pytest.mark.parametrize("mode", ["missing", "upper", "random", "not-an-id"])
async def test_another_apns_id_in_the_answer(peer: Peer, apns: SimulatorClient, mode: str) -> None:
    mine = "0a1b2c3d-0000-4000-8000-00000000abcd"
    for answers in ("config", "script"):
        if answers == "config":
            apns.configure(answer_apns_id=mode)
        else:
            apns.configure(answer_apns_id="echo")
            apns.next_requests(1, "answer", apns_id=mode)
        shown = (await peer.ask(apns_id=mine)).headers.get("apns-id")
        if mode == "random":
            assert shown not in (None, mine)
        else:
            assert shown == {"missing": None, "upper": mine.upper()}.get(mode, mode)


async def test_an_answer_that_never_ends(peer: Peer, apns: SimulatorClient) -> None:
    apns.next_requests(1, "answer", unfinished=True)
    stream = peer.push()
    await peer.alive()
    assert peer.answers[stream].status == 200
    await peer.nothing_for(0.05, stream)


async def test_garbage(peer: Peer, apns: SimulatorClient) -> None:
    await peer.alive()
    apns.next_requests(1, "garbage", hex="000000630000000000")
    peer.push()
    await peer.until(lambda: any(frame.kind == 0x63 for frame in peer.frames))


@pytest.mark.parametrize(
    ("then", "closed"), [("refuse", None), ("goaway", "eof"), ("drop", "ConnectionResetError")]
)
async def test_only_so_many_requests_per_connection(
    connect: Connect, apns: SimulatorClient, then: str, closed: str | None
) -> None:
    apns.configure(requests_per_connection=3, requests_per_connection_then=then)
    peer = await connect()
    for _ in range(3):
        assert (await peer.ask()).status == 200
    extra = peer.push()
    if closed is None:
        assert (await peer.answer(extra)).reset == frames.ERROR_CODES["REFUSED_STREAM"]
    else:
        assert await peer.gone() == closed
        assert [one.last_stream_id for one in peer.goaways] == ([5] if then == "goaway" else [])
    assert apns.stats()["requests"] == 3


async def test_too_many_errors_end_the_connection(connect: Connect, apns: SimulatorClient) -> None:
    apns.configure(errors_per_connection=2)
    apns.unregister("cd" * 32, since_ms=1)
    peer = await connect()
    for _ in range(3):
        assert (await peer.ask("cd" * 32)).status == 410, "410 is not held against the client"
    assert (await peer.ask("abc")).status == (await peer.ask("abc")).status == 400
    assert await peer.gone() == "eof"
    assert peer.goaways


async def test_pings_are_answered_and_counted(peer: Peer, apns: SimulatorClient) -> None:
    await peer.alive()
    apns.act("ping")
    apns.wait(pings=1)
    await peer.alive()
    (figures,) = apns.connections()
    assert (figures["pings"], figures["ping_acks"]) == (2, 1)
    apns.configure(answer_pings=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await peer.alive()
