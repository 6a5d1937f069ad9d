"""The real drain with a collector of spans."""

from __future__ import annotations

from tests.support.collector import collecting
from tests.support.database import Database
from tests.support.processes import DrainFactory, Simulator

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_each_attempt_is_a_span_linked_to_the_rows_context_and_the_last_ones_are_sent_at_the_end(
    drain: DrainFactory, database: Database, simulator: Simulator
) -> None:
    simulator.control.next_requests(1, "answer", reason="InternalServerError")
    with collecting() as collector:
        daemon = drain(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, DRAIN_RETRY_BASE=0.1)
        await database.enqueue_deliveries(
            1, more=f"""headers => '{{"traceparent": "00-{TRACE}-b7ad6b7169203331-01"}}'"""
        )
        await database.until(
            "SELECT count(*) = 1 FROM {schema}.notification_deliveries WHERE status = 'sent'"
        )
        assert daemon.stop() == 0
    first, second = collector.spans
    assert {first.name, second.name} == {f"push {simulator.topic}"}
    for span in (first, second):
        assert [link.trace_id.hex() for link in span.links] == [TRACE]
        assert span.trace_id.hex() != TRACE
    said = [{item.key: item.value for item in span.attributes} for span in (first, second)]
    assert [attributes["drain.attempt"].int_value for attributes in said] == [1, 2]
    assert [attributes["drain.outcome"].string_value for attributes in said] == ["retry", "sent"]
    assert [attributes["http.response.status_code"].int_value for attributes in said] == [500, 200]
    device = (await database.fetch("SELECT device_token FROM {schema}.notification_deliveries"))[0][0]
    assert device.encode() not in b"".join(collector.bodies)
