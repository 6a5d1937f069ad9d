"""Clients that break HTTP/2, and odd but legal ones."""

import pytest
from jh2.hpack import NeverIndexedHeaderTuple

from deploy.simulator import frames
from deploy.simulator.client import SimulatorClient
from deploy.simulator.process import Ready
from tests.simulator.conftest import Connect
from tests.simulator.wire import DEVICE, PAYLOAD, Answer, Peer, open_tls

BROKEN = {
    "an even stream": (frames.frame(frames.HEADERS, 5, 2, b"\x82"), "PROTOCOL_ERROR"),
    "data on an idle stream": (frames.frame(frames.DATA, 1, 99, b"x"), "PROTOCOL_ERROR"),
    "a reset of an idle stream": (frames.rst_stream(99, 8), "PROTOCOL_ERROR"),
    "a push promise": (frames.frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), "PROTOCOL_ERROR"),
    "a window update of nothing": (frames.window_update(0, 0), "PROTOCOL_ERROR"),
    "a window update of three bytes": (frames.frame(frames.WINDOW_UPDATE, 0, 0, b"abc"), "FRAME_SIZE_ERROR"),
    "settings of five bytes": (frames.frame(frames.SETTINGS, 0, 0, b"abcde"), "FRAME_SIZE_ERROR"),
    "a frame over the limit": (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", "FRAME_SIZE_ERROR"),
    "a header block that is none": (
        frames.frame(frames.HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"),
        "COMPRESSION_ERROR",
    ),
    "a continuation of nothing": (frames.frame(frames.CONTINUATION, 4, 1, b""), "PROTOCOL_ERROR"),
    "an interrupted header block": (
        frames.frame(frames.HEADERS, 1, 1, b"\x83") + frames.frame(frames.PING, 0, 0, b"x" * 8),
        "PROTOCOL_ERROR",
    ),
    "padding longer than the frame": (frames.frame(frames.HEADERS, 0xC, 1, b"\x09\x83"), "PROTOCOL_ERROR"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_ends_the_connection(peer: Peer, apns: SimulatorClient, case: str) -> None:
    data, code = BROKEN[case]
    peer.send(data)
    await peer.gone()
    assert peer.goaways[0].code == frames.ERROR_CODES[code]
    assert apns.stats()["last_protocol_errors"][0]["code"] == code


async def test_a_closed_stream_used_again(peer: Peer) -> None:
    assert (await peer.ask()).status == 200
    block = peer._encoder.encode(peer.headers())
    peer.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    await peer.gone()
    assert peer.goaways[0].code == frames.ERROR_CODES["STREAM_CLOSED"]


async def test_something_that_is_not_http2(ready: Ready, apns: SimulatorClient) -> None:
    reader, writer = await open_tls(ready, alpn=False)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"no HTTP/2 preface" in await reader.read()
    writer.close()
    assert apns.stats()["protocol_errors"] == 1


async def test_stream_ids_may_be_skipped(peer: Peer) -> None:
    peer._next_stream = 5
    assert (await peer.ask()).status == 200


async def test_headers_in_fragments_with_padding_and_priority(peer: Peer) -> None:
    stream = peer.push(send=False)
    peer.data(stream, PAYLOAD)
    assert (await peer.answer(stream)).status == 200
    block = peer._encoder.encode(peer.headers())
    flags = frames.PADDED | frames.HAS_PRIORITY
    first = b"\x04" + b"\0\0\0\0\x10" + block[:20] + b"\0" * 4
    peer.send(frames.frame(frames.HEADERS, flags, 3, first))
    peer.send(frames.frame(frames.CONTINUATION, 0, 3, block[20:30]))
    peer.send(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 3, block[30:]))
    peer.send(frames.frame(frames.DATA, frames.PADDED | frames.END_STREAM, 3, b"\x03" + PAYLOAD + b"\0\0\0"))
    peer.answers[3] = Answer()
    assert (await peer.answer(3)).status == 200


async def test_trailers(peer: Peer, apns: SimulatorClient) -> None:
    stream = peer.push(send=False)
    peer.data(stream, PAYLOAD, end=False)
    peer.send(frames.frame(frames.HEADERS, 5, stream, peer._encoder.encode([("x-trailer", "1")])))
    assert (await peer.answer(stream)).status == 200
    assert apns.arrivals()[0]["body"] == PAYLOAD.decode()


async def test_a_request_without_a_path(peer: Peer) -> None:
    assert (await peer.ask(path=None)).reset == frames.ERROR_CODES["PROTOCOL_ERROR"]
    assert (await peer.ask()).status == 200


async def test_a_client_that_cancels(peer: Peer, apns: SimulatorClient) -> None:
    apns.always("hold")
    stream = peer.push()
    apns.wait(held=1)
    peer.send(frames.rst_stream(stream, frames.ERROR_CODES["CANCEL"]))
    stats = apns.wait(never_answered=1)
    assert (stats["outcomes"], stats["streams_open"]) == ({"cancelled": 1}, 0)
    assert stats["delivered"] == 1, "APNs may have had it by then"
    assert apns.release() == 0


async def test_which_secrets_the_client_indexed(connect: Connect, apns: SimulatorClient) -> None:
    careless, careful = await connect(), await connect()
    assert (await careless.ask()).status == 200
    headers = [NeverIndexedHeaderTuple(name, value) for name, value in careful.headers(DEVICE)]
    careful.answers[1] = Answer()
    careful.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, careful._encoder.encode(headers)))
    careful.data(1, PAYLOAD)
    assert (await careful.answer(1)).status == 200
    first, second = apns.connections()
    assert (first["paths_indexed"], first["authorizations_indexed"]) == (1, 1)
    assert (second["paths_indexed"], second["authorizations_indexed"]) == (0, 0)
