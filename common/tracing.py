"""What both daemons' spans have in common. Needs the extra `otel`; the daemons do without it.

A daemon's span is no part of the producer's trace: it stands for itself and links to the context that the row
carries, and the poll is nobody's parent (OpenTelemetry semantic conventions, docs/messaging/messaging-spans.md).

Names and exporter come from the SDK's own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and so on. A span costs several times what its work costs: sample under load.
"""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def provider_from_environment(service: str) -> TracerProvider | None:
    """Return a provider that exports when the environment names an OTLP endpoint, else None.

    Args:
        service: the name of the service, unless OTEL_SERVICE_NAME says another.

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
    resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` is bounded, atexit is not
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Spans:
    """A daemon's spans: roots, each linked to the context of its row."""

    def __init__(self, provider: TracerProvider, name: str) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._name = name
        self.tracer = provider.get_tracer(name)
        self.root = Context()
        """For `start_span`: never a child of whatever happens to be current."""
        self._propagator = TraceContextTextMapPropagator()

    def links(self, headers: str) -> list[Link]:
        """The link to the context in a row's headers (JSON text); none when there is none that is usable."""
        from opentelemetry.trace import Link, get_current_span

        if '"traceparent"' not in headers:
            return []
        try:
            values: Any = json.loads(headers)
        except ValueError:
            return []
        if not isinstance(values, dict):
            return []
        carrier = {name: str(values[name]) for name in ("traceparent", "tracestate") if name in values}
        context = get_current_span(self._propagator.extract(carrier, self.root)).get_span_context()
        return [Link(context)] if context.is_valid else []

    def close(self, timeout: float) -> None:
        """Send what is not sent yet, for at most so many seconds, whatever the collector does. Blocks."""
        # A daemon thread: the exporter retries beyond any timeout, and must not hold up the process's end.
        flushing = threading.Thread(
            target=self._provider.force_flush,
            args=(int(timeout * 1000),),
            name=f"{self._name}-spans",
            daemon=True,
        )
        flushing.start()
        flushing.join(timeout)
