"""The ceiling: one raw socket, confirms, pipelined batches, no database, the same bytes as relay's messages.

Run as its own process by the benchmark; prints one JSON line with the rate and the CPU it took.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pamqp import commands
from pamqp.frame import marshal, unmarshal
from pamqp.header import ProtocolHeader
from yarl import URL

from relay.amqp import frames
from relay.message import Encoder, Message, MessageConfig
from relay.model import OutboxRow

BATCH = 100


class RawPublisher:
    """A blocking AMQP connection with one channel in confirm mode."""

    def __init__(self, url: str) -> None:
        target = URL(url)
        self._socket = socket.create_connection((target.host or "localhost", target.port or 5672))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._socket.sendall(ProtocolHeader().marshal())
        self._read()
        login = f"\0{target.user}\0{target.password}"
        self._send(commands.Connection.StartOk(mechanism="PLAIN", response=login), 0)
        tune: Any = self._read()
        self.frame_max = tune.frame_max
        self._send(commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0), 0)
        self._send(commands.Connection.Open(target.path[1:] or "/"), 0)
        self._read()
        self._send(commands.Channel.Open(), 1)
        self._read()
        self._send(commands.Confirm.Select(), 1)
        self._read()

    def publish(self, batch: bytes, count: int, window: int) -> None:
        """Write `count` messages, `BATCH` in each write, with at most `window` of them unconfirmed."""
        sent = confirmed = 0
        while confirmed < count:
            while sent < count and sent + BATCH - confirmed <= window:
                self._socket.sendall(batch)
                sent += BATCH
            answer: Any = self._read()
            if not isinstance(answer, commands.Basic.Ack):
                raise SystemExit(f"the broker answered {answer!r}")
            confirmed = max(confirmed + 1 if not answer.multiple else 0, confirmed, answer.delivery_tag or 0)

    def _send(self, frame: Any, channel: int) -> None:
        self._socket.sendall(marshal(frame, channel))

    def _read(self) -> Any:
        while True:
            if len(self._buffer) >= 8:
                size = int.from_bytes(self._buffer[3:7], "big") + 8
                if len(self._buffer) >= size:
                    frame = unmarshal(self._buffer[:size])[2]
                    self._buffer = self._buffer[size:]
                    return frame
            data = self._socket.recv(1 << 16)
            if not data:
                raise SystemExit("the broker closed the connection")
            self._buffer += data


def message(exchange: str, size: int, frame_max: int) -> Message:
    """What relay would send for a row with a body of this size."""
    row = OutboxRow(
        2**33,
        UUID(int=1),
        "order",
        "1234567",
        "order.placed",
        exchange,
        None,
        None,
        body_of(size).encode(),
        "application/json",
        "{}",
        datetime.now(UTC),
        0,
    )
    encoded = Encoder(MessageConfig()).encode(row, frame_max)
    assert isinstance(encoded, Message), encoded
    return encoded


def body_of(size: int) -> str:
    """A JSON object of exactly this many bytes, as PostgreSQL prints it."""
    empty = '{"filling": ""}'
    return '{"filling": "' + "x" * (size - len(empty)) + '"}'


def main() -> None:
    """Publish and report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--exchange", required=True)
    arguments.add_argument("--count", type=int, required=True)
    arguments.add_argument("--size", type=int, required=True)
    arguments.add_argument("--window", type=int, required=True)
    options = arguments.parse_args()
    publisher = RawPublisher(options.url)
    batch = frames(
        [message(options.exchange, options.size, publisher.frame_max)] * BATCH, 1, publisher.frame_max
    )
    publisher.publish(batch, BATCH, options.window)  # the route and the queue are warm
    publisher = RawPublisher(options.url)  # whose delivery tags count from one
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    publisher.publish(batch, options.count, options.window)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"rate": options.count / seconds, "cpu_us": cpu / options.count * 1e6}))


if __name__ == "__main__":
    main()
