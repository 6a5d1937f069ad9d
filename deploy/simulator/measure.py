"""How many pushes a second a simulator takes: `python -m deploy.simulator.measure --pushes 100000`.

Starts a simulator of its own and sends it prepared frames as fast as it answers, from one blocking TLS socket per
connection in turn. The figure that counts is the simulator's CPU time per push: the client uses the other core.
"""

import argparse
import json
import resource
import socket
import ssl
import sys
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Final

from jh2._hazmat import Encoder

from deploy.simulator import frames
from deploy.simulator.frames import FrameCutter
from deploy.simulator.process import SimulatorProcess
from deploy.simulator.provider import provider_token

_BODY: Final = json.dumps(
    {"aps": {"alert": {"title": "Order 4711", "body": "is on its way"}, "sound": "default"}}
)


@dataclass(slots=True)
class _Load:
    """One connection: prepared requests, and what flow control and the answers allow."""

    tls: ssl.SSLSocket
    requests: deque[tuple[bytes, int]]
    window: int = frames.DEFAULT_WINDOW
    in_flight: int = 0
    answered: int = 0


def _prepare(count: int, token: str) -> deque[tuple[bytes, int]]:
    encoder = Encoder()
    body = _BODY.encode()
    out: deque[tuple[bytes, int]] = deque()
    for at in range(count):
        headers = [
            (b":method", b"POST", False),
            (b":scheme", b"https", False),
            (b":path", b"/3/device/%064x" % (at % 5000), True),
            (b":authority", b"localhost", False),
            (b"apns-id", str(uuid.uuid4()).encode(), False),
            (b"apns-topic", b"com.example.app", False),
            (b"apns-push-type", b"alert", False),
            (b"apns-priority", b"10", False),
            (b"apns-collapse-id", b"order-%d" % at, False),
            (b"authorization", f"bearer {token}".encode(), True),
        ]
        block = encoder.encode(headers)
        stream = 2 * at + 1
        request = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)
        out.append((request + frames.frame(frames.DATA, frames.END_STREAM, stream, body), len(body)))
    return out


def _drive(load: _Load, depth: int) -> None:
    load.tls.sendall(frames.PREFACE + frames.settings({}) + frames.window_update(0, 2**30))
    cutter = FrameCutter()
    cutter.cut(frames.PREFACE)
    pushes = len(load.requests)
    while load.answered < pushes:
        batch = []
        while load.requests and load.in_flight < depth and load.window >= load.requests[0][1]:
            request, size = load.requests.popleft()
            batch.append(request)
            load.window -= size
            load.in_flight += 1
        if batch:
            load.tls.sendall(b"".join(batch))
        for kind, flags, stream_id, payload in cutter.cut(load.tls.recv(1 << 18)):
            if kind == frames.HEADERS and flags & frames.END_STREAM:
                load.answered += 1
                load.in_flight -= 1
            elif kind == frames.WINDOW_UPDATE and stream_id == 0:
                load.window += frames.read_word(payload)
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                load.tls.sendall(frames.SETTINGS_ACK)
            elif kind in (frames.HEADERS, frames.RST_STREAM, frames.GOAWAY):
                raise SystemExit(f"unexpected frame {kind} on stream {stream_id}: {payload!r}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.simulator.measure")
    parser.add_argument("--pushes", type=int, default=100_000)
    parser.add_argument("--depth", type=int, default=200, help="requests in flight")
    parser.add_argument("simulator", nargs="*", help="arguments of the simulator, after --")
    options = parser.parse_args()
    with SimulatorProcess(*options.simulator) as simulator:
        ready = simulator.ready
        context = ssl.create_default_context(cafile=ready.ca_file)
        context.set_alpn_protocols(["h2"])
        requests = _prepare(options.pushes, provider_token(ready.key_file, ready.key_id, ready.team_id))
        with (
            socket.create_connection((ready.host, ready.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            cpu_before = simulator.client.stats()["cpu_seconds"]
            started = time.perf_counter()
            _drive(_Load(tls, requests), options.depth)
            seconds = time.perf_counter() - started
            stats = simulator.client.stats()
    cpu = stats["cpu_seconds"] - cpu_before
    figures = {
        "pushes": options.pushes,
        "delivered": stats["delivered"],
        "seconds": round(seconds, 2),
        "pushes_per_second": round(options.pushes / seconds),
        "cpu_us_per_push": round(cpu / options.pushes * 1e6, 1),
        "pushes_per_cpu_second": round(options.pushes / cpu),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
