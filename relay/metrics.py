"""Metrics of relay. The core calls these methods; it knows no metric."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import FAST
from relay.claim import Source
from relay.mark import Marks
from relay.observer import PublishObserver

STAGES = ("broker", "connect", "claim", "publish", "mark", "commit")
VERDICTS = ("published", "unroutable", "failed", "rejected", "nacked", "left")
AGE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)


class RelayMetrics(PublishObserver):
    """What relay counts."""

    def __init__(self, registry: CollectorRegistry, exchange: str) -> None:
        self._exchange = exchange
        self._stages: dict[str, str] = {}
        self.batches = Counter(
            "relay_batches_total",
            "Batches that committed, with at least one row.",
            ["source"],
            registry=registry,
        )
        self.failures = Counter(
            "relay_batch_failures_total",
            "Batches that did not commit, by stage.",
            ["stage"],
            registry=registry,
        )
        self.published = Counter(
            "relay_published_total",
            "Rows confirmed by the broker and committed; exchange is the configured one or other.",
            ["exchange"],
            registry=registry,
        )
        self.rows = Counter(
            "relay_rows_total",
            "Rows of committed batches by what became of them.",
            ["verdict"],
            registry=registry,
        )
        self.quarantined = Counter("relay_quarantined_total", "Rows put into quarantine.", registry=registry)
        self.returned = Counter(
            "relay_unroutable_total", "Messages that no queue took, whatever the setting.", registry=registry
        )
        self.batch_duration = Histogram(
            "relay_batch_duration_seconds", "BEGIN to COMMIT of a batch.", buckets=FAST, registry=registry
        )
        self.publish_duration = Histogram(
            "relay_publish_duration_seconds",
            "One write and the wait for its confirms.",
            buckets=FAST,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "relay_end_to_end_seconds",
            "created_at to commit, of the oldest row of each batch.",
            buckets=AGE,
            registry=registry,
        )
        self.pruned = Counter(
            "relay_pruned_total", "Rows deleted past their retention.", ["table"], registry=registry
        )
        self.connected = Gauge(
            "relay_broker_connected", "1 while the broker's connection is open.", registry=registry
        )
        self.blocked = Gauge(
            "relay_broker_blocked",
            "1 while the broker blocks publishers (memory or disk alarm).",
            registry=registry,
        )
        self.connections = Counter("relay_broker_connections_total", "Connections opened.", registry=registry)
        self.channels = Counter("relay_broker_channels_total", "Channels opened.", registry=registry)
        for counter, values in (
            (self.batches, [source.value for source in Source]),
            (self.failures, STAGES),
            (self.published, (exchange, "other")),
            (self.rows, VERDICTS),
            (self.pruned, ("outbox", "inbox")),
        ):
            for value in values:
                counter.labels(value)

    def enter(self, lane: str, stage: str) -> None:
        """A lane entered a stage of its batch."""
        self._stages[lane] = stage

    def stage_of(self, lane: str) -> str:
        """The stage a lane is in."""
        return self._stages.get(lane, "broker")

    def batch_failed(self, stage: str) -> None:
        """A batch did not commit."""
        self.failures.labels(stage).inc()

    def batch_committed(self, source: Source, marks: Marks, seconds: float) -> None:
        """A batch committed after this many seconds."""
        self.batches.labels(source.value).inc()
        self.batch_duration.observe(seconds)
        for verdict, count in marks.verdicts.items():
            self.rows.labels(verdict).inc(count)
        self.quarantined.inc(sum(failure.quarantine for failure in marks.failures))
        own = sum(row.exchange is None or row.exchange == self._exchange for row in marks.published)
        self.published.labels(self._exchange).inc(own)
        self.published.labels("other").inc(len(marks.published) - own)
        if marks.published:
            oldest = min(row.created_at for row in marks.published)
            self.end_to_end.observe(max(0.0, time.time() - oldest.timestamp()))

    def broker_connected(self, connected: bool) -> None:
        """A connection is open and its exchange is there; or it is gone."""
        self.connections.inc(int(connected))
        self.connected.set(int(connected))

    def broker_blocked(self, blocked: bool) -> None:
        """The broker blocks publishers, or takes messages again."""
        self.blocked.set(int(blocked))

    def channel_opened(self) -> None:
        """A lane opened a channel."""
        self.channels.inc()

    def flight_settled(self, messages: int, seconds: float) -> None:
        """One write was settled, or given up."""
        self.publish_duration.observe(seconds)

    def message_unroutable(self, exchange: str, accepted: bool) -> None:
        """A message came back."""
        self.returned.inc()
