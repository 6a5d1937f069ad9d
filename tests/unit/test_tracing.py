"""A span for each publish, linked to the producer's and no part of its trace."""

from __future__ import annotations

import builtins
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.errors import ConfigurationError
from common.tracing import ENDPOINTS
from relay.model import PUBLISHED, Failed, Left, Nacked, Rejected, Unroutable
from relay.tracing import OtelTracer, tracer_from_environment
from tests.integration.publishing import row

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[OtelTracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield OtelTracer(provider, "events")
    provider.shutdown()


def test_a_publish_is_a_span_that_links_to_the_producers(
    tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    sent = row(headers=f'{{"traceparent": "{PARENT}", "tracestate": "a=1"}}')
    tracer.publishes([sent], [PUBLISHED], 1_000, 2_000)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.parent) == ("send events", SpanKind.PRODUCER, None)
    assert (span.start_time, span.end_time) == (1_000, 2_000)
    (link,) = span.links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == PARENT[3:52]
    assert span.context is not None
    assert span.context.trace_id != link.context.trace_id
    assert span.attributes is not None
    assert span.attributes["messaging.destination.name"] == "events:order.placed"
    assert span.attributes["messaging.message.id"] == str(sent.event_id)
    assert span.status.status_code == StatusCode.UNSET


@pytest.mark.parametrize(
    "verdict",
    [Unroutable("u"), Failed("f"), Rejected("r"), Nacked("n"), Left("l")],
    ids=lambda v: type(v).__name__,
)
def test_what_was_not_published_is_an_error_with_its_reason(
    verdict: Any, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    tracer.publishes([row(exchange="", routing_key="queue")], [verdict], 1, 2)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == type(verdict).__name__.lower()
    assert span.status.status_code == StatusCode.ERROR
    assert span.status.description == type(verdict).__name__[0].lower()
    assert span.attributes["messaging.destination.name"] == "queue"


@pytest.mark.parametrize(
    "headers", ["{}", '{"traceparent": "nonsense"}', '{"traceparent": 5}', '"traceparent"', '{"traceparent"']
)
def test_headers_without_a_usable_context_give_a_span_without_a_link(
    headers: str, tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    tracer.publishes([row(headers=headers)], [PUBLISHED], 1, 2)
    (span,) = exporter.get_finished_spans()
    assert not span.links


def test_no_endpoint_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracer_from_environment("events") is None


def test_spans_reach_the_collector_and_a_silent_one_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector that answers gets the spans; with one that only listens, closing takes its timeout and no more."""
    got: list[int] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with (
        HTTPServer(("127.0.0.1", 0), Collector) as collector,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        threading.Thread(target=collector.handle_request, daemon=True).start()
        for port, timeout in ((collector.server_port, 5.0), (silent.getsockname()[1], 0.3)):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
            tracer = tracer_from_environment("events")
            assert tracer is not None
            tracer.publishes([row()], [PUBLISHED], 1, 2)
            began = time.monotonic()
            tracer.close(timeout)
            assert time.monotonic() - began < timeout + 0.5
    assert len(got) == 1


def test_an_endpoint_without_the_extra_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_ENDPOINT is set, but the extra 'otel'"):
        tracer_from_environment("events")
