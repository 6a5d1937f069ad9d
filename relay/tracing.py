"""A span for each publish, linked to the producer's span. Needs the extra `otel`; the core does without it.

The message keeps the producer's `traceparent` untouched, so consumers continue the producer's trace. Relay's own span
is no part of it: it stands for itself and links to it, and the poll is nobody's parent (OpenTelemetry semantic
conventions, docs/messaging/messaging-spans.md and rabbitmq.md).

Names and exporter come from the SDK's own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and so on. A span costs several times what the publish costs: sample under load.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_never

from common.errors import ConfigurationError
from relay.model import Failed, Left, Nacked, OutboxRow, Published, Rejected, Unroutable, Verdict

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracer_from_environment(exchange: str) -> OtelTracer | None:
    """Return a tracer when the environment names an OTLP endpoint, else None.

    Args:
        exchange: the configured one, for rows that name none.

    Raises:
        ConfigurationError: an endpoint is named and the extra is not installed.
    """
    named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(f"{named} is set, but the extra 'otel' is not installed: {error}") from None
    resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "relay"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` is bounded, atexit is not
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider, exchange)


class OtelTracer:
    """A `relay.observer.Tracer` that makes spans with an SDK's provider."""

    def __init__(self, provider: TracerProvider, exchange: str) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("relay")
        self._exchange = exchange
        self._root = Context()  # never a child of whatever happens to be current
        self._kind = SpanKind.PRODUCER
        self._failed = StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()

    def publishes(
        self, rows: Sequence[OutboxRow], verdicts: Sequence[Verdict], started_ns: int, ended_ns: int
    ) -> None:
        """Make the spans of one batch, which all took as long as the batch."""
        for row, verdict in zip(rows, verdicts, strict=True):
            exchange = self._exchange if row.exchange is None else row.exchange
            routing_key = row.event_type if row.routing_key is None else row.routing_key
            destination = ":".join(part for part in (exchange, routing_key) if part) or "amq.default"
            span = self._tracer.start_span(
                f"send {exchange or 'amq.default'}",
                context=self._root,
                kind=self._kind,
                links=self._links(row),
                start_time=started_ns,
                attributes={
                    "messaging.system": "rabbitmq",
                    "messaging.operation.name": "send",
                    "messaging.operation.type": "send",
                    "messaging.destination.name": destination,
                    "messaging.rabbitmq.destination.routing_key": routing_key,
                    "messaging.message.id": str(row.event_id),
                    "messaging.message.body.size": len(row.body),
                },
            )
            if (error := _error(verdict)) is not None:
                span.set_attribute("error.type", type(verdict).__name__.lower())
                span.set_status(self._failed, error)
            span.end(ended_ns)

    def close(self, timeout: float) -> None:
        """Send what is not sent yet, for at most so many seconds, whatever the collector does. Blocks."""
        # A daemon thread: the exporter retries beyond any timeout, and must not hold up the process's end.
        flushing = threading.Thread(
            target=self._provider.force_flush, args=(int(timeout * 1000),), name="relay-spans", daemon=True
        )
        flushing.start()
        flushing.join(timeout)

    def _links(self, row: OutboxRow) -> list[Link]:
        from opentelemetry.trace import Link, get_current_span

        if '"traceparent"' not in row.headers:
            return []
        try:
            headers: Any = json.loads(row.headers)
        except ValueError:
            headers = None
        if not isinstance(headers, dict):
            return []  # the row is rejected for it
        carrier = {name: str(headers[name]) for name in ("traceparent", "tracestate") if name in headers}
        context = get_current_span(self._propagator.extract(carrier, self._root)).get_span_context()
        return [Link(context)] if context.is_valid else []


def _error(verdict: Verdict) -> str | None:
    match verdict:
        case Published():
            return None
        case Unroutable(error) | Failed(error) | Rejected(error) | Nacked(error) | Left(error):
            return error
        case _:
            assert_never(verdict)
