"""A span for each push, linked to the row's context and no part of its trace."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.errors import ConfigurationError
from common.tracing import ENDPOINTS
from drain.apns.answers import GiveBack, Outcome, Retry, Sent, TokenDead
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Push, Reply
from drain.decide import settlement
from drain.model import Delivery
from drain.tracing import OtelTracer, tracer_from_environment

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DEVICE = "ab" * 32
NOW = datetime(2026, 1, 2, tzinfo=UTC)
PUSH = Push(str(UUID(int=1)), DEVICE, "com.example.app", "alert", 10, None, None, b"{}")


def row(headers: str = "{}", attempts: int = 1) -> Delivery:
    return Delivery(
        id=7,
        claim_version=1,
        notification_id=UUID(int=1),
        event_id=UUID(int=2),
        app="shop",
        device_token=DEVICE,
        registered_at=None,
        push_type="alert",
        priority=10,
        collapse_id=None,
        expires_at=None,
        payload="{}",
        coalesce_key=None,
        headers=headers,
        attempts=attempts,
        created_at=NOW,
        last_reason=None,
        claimed_at=NOW,
        due_at=NOW,
        reclaimed=False,
        token_dead_since=None,
    )


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[OtelTracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield OtelTracer(provider)
    provider.shutdown()


def traced(
    tracer: OtelTracer,
    exporter: InMemorySpanExporter,
    reply: Reply,
    outcome: Outcome,
    delivery: Delivery,
) -> tuple[ReadableSpan, dict[str, Any]]:
    tracer.handed_over(PUSH)
    tracer.replied(PUSH, reply, settlement(delivery, reply, outcome))
    span = exporter.get_finished_spans()[-1]
    assert span.attributes is not None
    return span, dict(span.attributes)


def test_a_push_is_a_span_that_links_to_the_rows_context(
    tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    delivery = row(f'{{"traceparent": "{PARENT}", "tracestate": "a=1"}}')
    span, attributes = traced(tracer, exporter, Answered(200, None, None, None, 0.25), Sent(), delivery)
    assert (span.name, span.kind, span.parent) == ("push com.example.app", SpanKind.CLIENT, None)
    (link,) = span.links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == PARENT[3:52]
    assert span.context is not None
    assert span.context.trace_id != link.context.trace_id
    assert attributes["messaging.message.id"] == PUSH.notification_id
    assert attributes["http.response.status_code"] == 200
    assert (attributes["drain.attempt"], attributes["drain.outcome"]) == (1, "sent")
    assert span.status.status_code == StatusCode.UNSET
    (written,) = span.events
    assert span.end_time is not None
    assert written.timestamp == span.end_time - 250_000_000
    assert DEVICE not in span.to_json()


def test_a_retry_links_to_the_same_context_and_says_which_attempt_it_is(
    tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    headers = f'{{"traceparent": "{PARENT}"}}'
    busy = Answered(503, "ServiceUnavailable", None, None, 0.1)
    first, _ = traced(tracer, exporter, busy, Retry("ServiceUnavailable", 5.0, "app"), row(headers))
    second, attributes = traced(
        tracer, exporter, Answered(200, None, None, None, 0.1), Sent(), row(headers, attempts=2)
    )
    assert first.links[0].context == second.links[0].context
    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_id != second.context.trace_id
    assert attributes["drain.attempt"] == 2


@pytest.mark.parametrize(
    ("reply", "outcome", "error", "described", "events"),
    [
        (Answered(410, "Unregistered", 5, None, 0.1), TokenDead("Unregistered", NOW, False), "token_dead",
         "Unregistered", 1),
        (NotSent("no free stream in time"), GiveBack("no free stream in time", 0.0), "not_sent",
         "no free stream in time", 0),
        (MaybeDelivered("RST_STREAM"), Retry("RST_STREAM", 1.0, "row"), "maybe_delivered", "RST_STREAM", 0),
        (NoAnswer(20.0), Retry("NoAnswer", 1.0, "row"), "no_answer", "NoAnswer", 1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_was_not_accepted_is_an_error_with_its_reason(
    reply: Reply,
    outcome: Outcome,
    error: str,
    described: str,
    events: int,
    tracer: OtelTracer,
    exporter: InMemorySpanExporter,
) -> None:
    span, attributes = traced(tracer, exporter, reply, outcome, row())
    assert attributes["error.type"] == error
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, described)
    assert len(span.events) == events
    assert not span.links


def test_no_endpoint_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracer_from_environment() is None


def test_an_endpoint_without_the_extra_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_ENDPOINT is set, but the extra 'otel'"):
        tracer_from_environment()
