"""What the publish side tells about itself: metrics and traces hang on here, the core knows neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from relay.model import OutboxRow, Verdict


class PublishObserver(Protocol):
    """Hears what happens. Called from the loop; must not wait and must not raise."""

    def broker_connected(self, connected: bool) -> None:
        """A connection is open and its exchange is there; or that connection is gone."""

    def broker_blocked(self, blocked: bool) -> None:
        """The broker takes no publishes (memory or disk alarm); or takes them again."""

    def channel_opened(self) -> None:
        """A lane opened a channel: the first one on a connection, or a fresh one after a doubt."""

    def flight_settled(self, messages: int, seconds: float) -> None:
        """One write of so many messages was settled, or given up, after this time."""

    def message_unroutable(self, exchange: str, accepted: bool) -> None:
        """No queue took a message; accepted: the setting counts it as published."""


class Silent:
    """An observer that does nothing."""

    def broker_connected(self, connected: bool) -> None: ...
    def broker_blocked(self, blocked: bool) -> None: ...
    def channel_opened(self) -> None: ...
    def flight_settled(self, messages: int, seconds: float) -> None: ...
    def message_unroutable(self, exchange: str, accepted: bool) -> None: ...


class Tracer(Protocol):
    """Makes a span of each publish, linked to the producer's `traceparent`, which the message keeps."""

    def publishes(
        self, rows: Sequence[OutboxRow], verdicts: Sequence[Verdict], started_ns: int, ended_ns: int
    ) -> None:
        """One batch was published; times are UNIX nanoseconds. Must not wait and must not raise."""
