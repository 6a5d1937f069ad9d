"""A span for each publish, linked to the producer's span. Needs the extra `otel`; the core does without it.

The message keeps the producer's `traceparent` untouched, so consumers continue the producer's trace (semantic
conventions, docs/messaging/rabbitmq.md); what is common to both daemons' spans stands in common/tracing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from common.tracing import Spans, provider_from_environment
from relay.model import Failed, Left, Nacked, OutboxRow, Published, Rejected, Unroutable, Verdict

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_from_environment(exchange: str) -> OtelTracer | None:
    """Return a tracer when the environment names an OTLP endpoint, else None.

    Args:
        exchange: the configured one, for rows that name none.

    Raises:
        ConfigurationError: an endpoint is named and the extra is not installed.
    """
    provider = provider_from_environment("relay")
    return None if provider is None else OtelTracer(provider, exchange)


class OtelTracer:
    """A `relay.observer.Tracer` that makes spans with an SDK's provider."""

    def __init__(self, provider: TracerProvider, exchange: str) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        self._spans = Spans(provider, "relay")
        self._exchange = exchange
        self._kind = SpanKind.PRODUCER
        self._failed = StatusCode.ERROR

    def publishes(
        self, rows: Sequence[OutboxRow], verdicts: Sequence[Verdict], started_ns: int, ended_ns: int
    ) -> None:
        """Make the spans of one batch, which all took as long as the batch."""
        for row, verdict in zip(rows, verdicts, strict=True):
            exchange = self._exchange if row.exchange is None else row.exchange
            routing_key = row.event_type if row.routing_key is None else row.routing_key
            destination = ":".join(part for part in (exchange, routing_key) if part) or "amq.default"
            span = self._spans.tracer.start_span(
                f"send {exchange or 'amq.default'}",
                context=self._spans.root,
                kind=self._kind,
                links=self._spans.links(row.headers),
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
        self._spans.close(timeout)


def _error(verdict: Verdict) -> str | None:
    match verdict:
        case Published():
            return None
        case Unroutable(error) | Failed(error) | Rejected(error) | Nacked(error) | Left(error):
            return error
        case _:
            assert_never(verdict)
