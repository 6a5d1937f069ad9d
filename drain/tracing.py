"""A span for each push, linked to the context that the row carries. Needs the extra `otel`; the core does without.

Every attempt is a span of its own with the same link: a retry is found beside the attempts before it, whichever
process made them. The device learns nothing of it: APNs carries no context. What is common to both daemons' spans
stands in common/tracing.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.tracing import Spans, provider_from_environment
from drain.apns.model import Answered, NoAnswer, Push, Reply
from drain.model import Settlement

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_from_environment() -> OtelTracer | None:
    """Return a tracer when the environment names an OTLP endpoint, else None.

    Raises:
        ConfigurationError: an endpoint is named and the extra is not installed.
    """
    provider = provider_from_environment("drain")
    return None if provider is None else OtelTracer(provider)


class OtelTracer:
    """Makes spans with an SDK's provider. Called from the loop; does not wait."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        self._spans = Spans(provider, "drain")
        self._kind = SpanKind.CLIENT
        self._failed = StatusCode.ERROR
        self._started: dict[str, int] = {}
        """UNIX nanoseconds by notification id; as many as pushes in flight, for each has one reply."""

    def handed_over(self, push: Push) -> None:
        """The push waits for a stream, or has one."""
        self._started[push.notification_id] = time.time_ns()

    def replied(self, push: Push, reply: Reply, settlement: Settlement) -> None:
        """Make the span of one push: from the handing over to its reply, with the moment of the write if known."""
        ended = time.time_ns()
        delivery = settlement.delivery
        attributes: dict[str, str | int] = {
            "messaging.system": "apns",
            "messaging.operation.name": "push",
            "messaging.operation.type": "send",
            "messaging.destination.name": push.topic,
            "messaging.message.id": push.notification_id,
            "messaging.message.body.size": len(push.body),
            "drain.app": delivery.app,
            "drain.attempt": delivery.attempts,
            "drain.event_id": str(delivery.event_id),
            "drain.outcome": settlement.label,
            "drain.push_type": push.push_type,
        }
        if isinstance(reply, Answered):
            attributes["http.response.status_code"] = reply.status
        span = self._spans.tracer.start_span(
            f"push {push.topic}",
            context=self._spans.root,
            kind=self._kind,
            links=self._spans.links(delivery.headers),
            start_time=self._started.pop(push.notification_id, ended),
            attributes=attributes,
        )
        if isinstance(reply, Answered | NoAnswer):
            span.add_event("request written", timestamp=ended - int(reply.seconds * 1e9))
        if settlement.label != "sent":
            span.set_attribute("error.type", settlement.reason_class)
            span.set_status(self._failed, settlement.reason)
        span.end(ended)

    def close(self, timeout: float) -> None:
        """Send what is not sent yet, for at most so many seconds, whatever the collector does. Blocks."""
        self._spans.close(timeout)
