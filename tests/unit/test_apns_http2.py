"""Our half of HTTP/2 against h2 as the peer, and against frames that no good peer sends."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st
from jh2._hazmat import Encoder

from drain.apns.flight import request_headers
from drain.apns.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PUSH_PROMISE,
    RECEIVE_WINDOW,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    PeerError,
    frame,
)
from drain.apns.http2 import ClientConnection
from drain.apns.model import Push

HEADER = [
    (b":method", b"POST", False),
    (b":scheme", b"https", False),
    (b":path", b"/3/device/ab", True),
    (b":authority", b"apns", False),
]


@dataclass
class Heard:
    """A listener that writes down what it hears."""

    events: list[tuple[object, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append((name.removeprefix("on_"), *arguments))

    def of(self, *names: str) -> list[tuple[object, ...]]:
        return [event for event in self.events if event[0] in names]


def settled(settings_payload: bytes = b"") -> tuple[ClientConnection, Heard]:
    heard = Heard()
    connection = ClientConnection(heard)  # type: ignore[arg-type]
    connection.take()
    connection.receive(frame(SETTINGS, 0, 0, settings_payload))
    connection.take()
    heard.events.clear()
    return connection, heard


def answer_block(status: bytes = b"200") -> bytes:
    return Encoder().encode([(b":status", status, False)])


class Server:
    """h2 in the role of APNs: answers every request with its apns-id, and a body when that says so."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.requests: list[dict[bytes, bytes]] = []
        self.never_indexed: set[bytes] = set()
        self.bodies: dict[int, bytes] = {}
        self.resets: list[tuple[int, int]] = []

    def talk(self, data: bytes) -> bytes:
        for event in self.h2.receive_data(data):
            if isinstance(event, RequestReceived):
                self.requests.append(dict(event.headers))
                self.never_indexed |= {header[0] for header in event.headers if not header.indexable}
                self.bodies[event.stream_id] = b""
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                body = self.bodies[event.stream_id]
                self.h2.send_headers(event.stream_id, [(b":status", b"200")], end_stream=not body)
                if body:
                    self.h2.send_data(event.stream_id, body[:50], end_stream=True)
            elif isinstance(event, StreamReset):
                self.resets.append((event.stream_id, event.error_code))
        return self.h2.data_to_send()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.binary(max_size=6000), min_size=1, max_size=30),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_h2_understands_us_and_we_understand_h2_whatever_the_pieces(
    bodies: list[bytes], cuts: list[int]
) -> None:
    heard = Heard()
    client, server = ClientConnection(heard), Server()  # type: ignore[arg-type]
    client.receive(server.h2.data_to_send())
    back = server.talk(client.take())
    sent: dict[int, bytes] = {}
    for number, body in enumerate(bodies):
        sent[client.request([*HEADER, (b"apns-id", b"%d" % number, True)], body)] = body
        back += server.talk(client.take())
    at = 0
    for cut in cuts * (len(back) // sum(cuts) + 1):
        client.receive(back[at : at + cut])
        at += cut
    client.receive(back[at:])
    assert server.bodies == sent
    assert [int(request[b"apns-id"]) for request in server.requests] == list(range(len(bodies)))
    ended = [event[1] for event in heard.of("headers", "data") if event[3]]
    assert ended == list(sent)


def test_a_body_over_the_frame_size_goes_out_in_pieces() -> None:
    heard = Heard()
    client, server = ClientConnection(heard), Server()  # type: ignore[arg-type]
    client.receive(server.h2.data_to_send())
    body = bytes(40_000)
    huge = [*HEADER, (b"x-long", b"a" * 20_000, True)]
    stream = client.request(huge, body)
    server.talk(client.take())
    assert server.bodies[stream] == body
    assert client.window == 65_535 - 40_000


def test_secrets_and_what_differs_are_never_indexed_and_the_rest_is() -> None:
    """Apple's rule for :path and authorization; an indexed apns-id would push the topic out of the table."""
    push = Push(
        "6f1c2a3b-0000-4000-8000-abcdef012345", "ab" * 32, "com.example.app", "alert", 10, 0, "c", b"{}"
    )
    client, server = ClientConnection(Heard()), Server()  # type: ignore[arg-type]
    client.receive(server.h2.data_to_send())
    server.talk(client.take())
    sizes = []
    for _ in range(100):
        client.request(request_headers(push, b"api.push.apple.com", b"bearer secret"), b"{}")
        data = client.take()
        sizes.append(len(data))
        server.talk(data)
    assert server.never_indexed == {
        b":path",
        b"apns-id",
        b"apns-expiration",
        b"apns-collapse-id",
        b"authorization",
    }
    assert server.requests[-1] == {
        b":method": b"POST",
        b":scheme": b"https",
        b":path": b"/3/device/" + b"ab" * 32,
        b":authority": b"api.push.apple.com",
        b"apns-id": b"6f1c2a3b-0000-4000-8000-abcdef012345",
        b"apns-topic": b"com.example.app",
        b"apns-push-type": b"alert",
        b"apns-priority": b"10",
        b"apns-expiration": b"0",
        b"apns-collapse-id": b"c",
        b"authorization": b"bearer secret",
    }
    assert max(sizes[1:]) < sizes[0]


def test_answers_that_follow_a_goaway_are_read() -> None:
    """python-hyper/h2#1181: frames after GOAWAY raise ProtocolError."""
    client, heard = settled()
    for _ in range(2):
        client.request(HEADER, b"{}")
    client.receive(
        frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0) + b"{}")
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, answer_block())
        + frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0))
    )
    assert [event[0] for event in heard.events] == ["goaway", "headers", "goaway"]
    assert heard.events[0][1:] == (1, 0, b"{}")


def test_a_peers_settings_apply_in_both_directions() -> None:
    client, heard = settled(struct.pack(">HI", 3, 1))
    assert client.max_streams == 1
    client.receive(frame(SETTINGS, 0, 0, struct.pack(">HIHIHI", 3, 1000, 4, 100, 5, 20_000)))
    assert (client.max_streams, client.stream_window, client.max_frame_size) == (1000, 100, 20_000)
    client.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 0)))
    assert client.max_streams == 0
    assert client.take() == frame(SETTINGS, 1, 0, b"") * 2
    assert len(heard.of("settings")) == 2


def test_a_peer_that_keeps_no_header_table_is_served_without_one() -> None:
    server = Server()
    client = ClientConnection(Heard())  # type: ignore[arg-type]
    for size in (4096, 100, 0):
        server.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: size})
    client.receive(server.h2.data_to_send())
    for _ in range(3):
        client.request([*HEADER, (b"apns-topic", b"t", False)], b"{}")
        server.talk(client.take())
    assert len(server.requests) == 3
    assert server.h2.decoder.header_table_size == 0


def test_received_data_is_acknowledged_for_ever_and_for_every_stream() -> None:
    """2,427 error bodies used up the window of the connection, and answers stopped."""
    client, _ = settled()
    stream = client.request(HEADER, b"{}")
    client.take()
    room = RECEIVE_WINDOW
    for _ in range(3000):
        client.receive(frame(DATA, 0, stream, bytes(1000)))
        room -= 1000
        assert room >= 0
        update = client.take()
        if update:
            assert update[3] == WINDOW_UPDATE
            room += int.from_bytes(update[9:13], "big")


def test_padding_priority_continuation_and_unknown_frames_are_understood() -> None:
    client, heard = settled()
    stream = client.request(HEADER, b"{}")
    block = answer_block(b"400")
    client.receive(
        frame(0x20, 0xFF, 0, b"unknown")
        + frame(2, 0, stream, bytes(5))
        + frame(HEADERS, PADDED | WITH_PRIORITY, stream, b"\x03" + bytes(5) + block[:1] + bytes(3))
        + frame(CONTINUATION, 0, stream, block[1:2])
        + frame(CONTINUATION, END_HEADERS, stream, block[2:])
        + frame(DATA, PADDED, stream, b"\x02{}" + bytes(2))
        + frame(DATA, PADDED | END_STREAM, stream, b"\x00")
    )
    assert heard.events == [
        ("headers", stream, [(b":status", b"400", False)], False),
        ("data", stream, b"{}", False),
        ("data", stream, b"", True),
    ]


def test_a_ping_is_answered_and_an_answer_is_heard() -> None:
    client, heard = settled()
    client.receive(frame(PING, 0, 0, b"12345678"))
    assert client.take() == frame(PING, 1, 0, b"12345678")
    client.ping()
    assert client.take()[3] == PING
    client.receive(frame(PING, 1, 0, b"apnsping"))
    assert heard.events == [("pong",)]


def test_an_abandoned_stream_is_reset_and_its_late_answer_keeps_the_header_table_right() -> None:
    client, heard = settled()
    first, second = client.request(HEADER, b"{}"), client.request(HEADER, b"{}")
    client.take()
    client.reset(first, ErrorCode.CANCEL)
    assert client.take() == frame(RST_STREAM, 0, first, struct.pack(">I", 8))
    encoder = Encoder()
    for stream in (first, second):
        block = encoder.encode([(b":status", b"200", False), (b"apns-unique-id", b"x", False)])
        client.receive(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
    assert [event[2] for event in heard.of("headers")] == [
        [(b":status", b"200", False), (b"apns-unique-id", b"x", False)]
    ] * 2


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 1, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (b"\xff\xff\xff" + bytes(6), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)), ErrorCode.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(PUSH_PROMISE, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(CONTINUATION, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 2, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 9, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 0, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, PADDED, 1, b"\x05ab"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\xfe"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x40"), ErrorCode.COMPRESSION_ERROR),
        (
            frame(HEADERS, 0, 1, bytes(16_384)) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 4,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_left_with_the_right_code(
    data: bytes, code: ErrorCode, capfd: pytest.CaptureFixture[str]
) -> None:
    client, _ = settled()
    client.request(HEADER, b"{}")
    with pytest.raises(PeerError) as error:
        client.receive(data)
    assert error.value.code == code
    capfd.readouterr()  # A panic of jh2's decoder writes its own traceback.


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(PING, 0, 0, bytes(8))])
def test_a_peer_that_does_not_begin_with_settings_is_said_not_to_speak_http2(data: bytes) -> None:
    client = ClientConnection(Heard())  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="does not speak HTTP/2"):
        client.receive(data)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 255), st.sampled_from([0, 1, 3, 5]), st.binary(max_size=40)
        )
    )
)
def test_no_bytes_of_a_peer_raise_anything_but_peer_error(frames: list[tuple[int, int, int, bytes]]) -> None:
    client, _ = settled()
    client.request(HEADER, b"{}")
    client.request(HEADER, b"{}")
    try:
        for kind, flags, stream, payload in frames:
            client.receive(frame(kind, flags, stream, payload))
    except PeerError:
        pass
