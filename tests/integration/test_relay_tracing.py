"""The real relay with a collector of spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.broker import Broker
from tests.support.database import Database
from tests.support.processes import RelayFactory

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    """Keeps what OTLP exporters post."""

    bodies: list[bytes]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector(("127.0.0.1", 0), _Handler) as server:
        server.bodies = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_a_publish_becomes_a_span_linked_to_the_producers_and_the_last_ones_are_sent_at_the_end(
    relay: RelayFactory, database: Database, broker: Broker, collector: Collector
) -> None:
    await broker.declare()
    daemon = relay(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}", RELAY_TICK=0.1)
    await database.fetch(
        "INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, payload, headers) "
        "VALUES ('order', '1', 'order.placed', '5', $1)",
        f'{{"traceparent": "00-{TRACE}-b7ad6b7169203331-01"}}',
    )
    (message,) = await broker.take(count=1)
    assert message.headers["traceparent"] == f"00-{TRACE}-b7ad6b7169203331-01"
    daemon.stop()
    sent = b"".join(collector.bodies)
    assert b"send events" in sent
    assert bytes.fromhex(TRACE) in sent
