"""The real relay with a collector of spans."""

from __future__ import annotations

from tests.support.broker import Broker
from tests.support.collector import collecting
from tests.support.database import Database
from tests.support.processes import RelayFactory

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_publish_becomes_a_span_linked_to_the_producers_and_the_last_ones_are_sent_at_the_end(
    relay: RelayFactory, database: Database, broker: Broker
) -> None:
    await broker.declare()
    with collecting() as collector:
        daemon = relay(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, RELAY_TICK=0.1)
        await database.fetch(
            "INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, payload, headers) "
            "VALUES ('order', '1', 'order.placed', '5', $1)",
            f'{{"traceparent": "00-{TRACE}-b7ad6b7169203331-01"}}',
        )
        (message,) = await broker.take(count=1)
        assert message.headers["traceparent"] == f"00-{TRACE}-b7ad6b7169203331-01"
        daemon.stop()
    (span,) = collector.spans
    assert span.name == "send events"
    assert [link.trace_id.hex() for link in span.links] == [TRACE]
