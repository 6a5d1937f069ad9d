"""What the publish side tells about itself: metrics and traces hang on here, the core knows neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relay.model import OutboxRow, Verdict


class PublishObserver:
    """Hears what happens; each method does nothing unless overridden. Called from the loop, must not wait."""

    def connection_opened(self) -> None:
        """A connection is open, its exchange declared, and the broker takes publishes or is blocked."""

    def connection_lost(self) -> None:
        """That connection is gone."""

    def blocked(self, blocked: bool) -> None:
        """The broker takes no publishes (memory or disk alarm), or takes them again."""

    def channel_opened(self) -> None:
        """A lane opened a channel: the first one of a connection, or a fresh one after a doubt."""

    def flight(self, messages: int, seconds: float) -> None:
        """One write of so many messages was settled, or given up, after this time."""

    def unroutable(self, exchange: str, accepted: bool) -> None:
        """A message came back; accepted: counted as published by the setting."""


class Tracer(Protocol):
    """Makes a span of each publish, linked to the producer's `traceparent`, which the message keeps."""

    def publishes(
        self, rows: Sequence[OutboxRow], verdicts: Sequence[Verdict], started_ns: int, ended_ns: int
    ) -> None:
        """One batch; times are UNIX nanoseconds. Must not raise."""
