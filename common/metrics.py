"""Metrics of both daemons and the registry they stand in. Names and units by Prometheus' own rules."""

from __future__ import annotations

import os
from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from common.sql import CAP

disable_created_metrics()  # type: ignore[no-untyped-call]

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Buckets in seconds around what a statement, a publish or a push takes, up to its deadline."""


def version() -> str:
    """Version of the installed distribution, or ``unknown`` in a bare checkout."""
    try:
        return metadata.version("relay-drain")
    except metadata.PackageNotFoundError:
        return "unknown"


class WorkerMetrics:
    """What every daemon exports about itself."""

    def __init__(self, registry: CollectorRegistry, loops: tuple[str, ...]) -> None:
        self.registry = registry
        self.tick = Gauge(
            "worker_loop_tick_timestamp_seconds",
            "Last turn of the loop, UNIX time.",
            ["loop"],
            registry=registry,
        )
        self.success = Gauge(
            "worker_last_success_timestamp_seconds",
            "Last turn of the loop that did its work, UNIX time; until the first, the start of the process.",
            ["loop"],
            registry=registry,
        )
        for loop in loops:
            # Not 0: an age since 1970 would make a daemon that has just begun look stalled.
            self.tick.labels(loop).set_to_current_time()
            self.success.labels(loop).set_to_current_time()
        self.loop_lag = Histogram(
            "worker_event_loop_lag_seconds",
            "How late a timer of the event loop fired; pauses endanger a lease.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 120),
            registry=registry,
        )
        self.pool_in_use = Gauge(
            "worker_db_pool_in_use", "Database connections handed out.", registry=registry
        )
        self.pool_open = Gauge("worker_db_pool_size", "Database connections open.", registry=registry)
        self.acquire = Histogram(
            "worker_db_acquire_seconds", "Wait for a database connection.", buckets=FAST, registry=registry
        )
        self.observed = Gauge(
            "worker_db_observation_timestamp_seconds",
            "When the gauges from the database were read, UNIX time; 0: never yet.",
            registry=registry,
        )
        self.observe_failures = Counter(
            "worker_db_observation_failures_total", "Looks at the queue's lag that failed.", registry=registry
        )
        self.oldest_transaction = Gauge(
            "database_oldest_transaction_timestamp_seconds",
            "Start of the oldest transaction that holds a snapshot in this database, UNIX time; absent: none.",
            ["source"],
            registry=registry,
        )
        self.info = Gauge("worker_build_info", "Constant 1.", ["version", "commit"], registry=registry)
        self.info.labels(version(), os.environ.get("BUILD_COMMIT", "unknown")).set(1)
        ProcessCollector(registry=registry)  # memory, CPU time, open files, start; Linux only

    def acquired(self, seconds: float) -> None:
        """A connection was handed out after this wait."""
        self.acquire.observe(seconds)

    def pool_size(self, in_use: int, size: int) -> None:
        """Connections handed out, connections open."""
        self.pool_in_use.set(in_use)
        self.pool_open.set(size)


class OutboxGauges:
    """The outbox's lag, read from the database; every replica exports the same: aggregate with max."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unpublished = Gauge(
            "outbox_unpublished",
            f"Rows not published yet, counted up to {CAP} for each source (fresh, retry, keyed).",
            ["source"],
            registry=registry,
        )
        self.quarantined = Gauge(
            "outbox_quarantined", f"Rows in quarantine, counted up to {CAP}.", ["source"], registry=registry
        )
        self.oldest = Gauge(
            "outbox_oldest_unpublished_timestamp_seconds",
            "created_at of the oldest row that is not published and not in quarantine, UNIX time; absent: none.",
            ["source"],
            registry=registry,
        )

    def clear(self) -> None:
        """Drop the series: a value that is not known is not zero."""
        for gauge in (self.unpublished, self.quarantined, self.oldest):
            gauge.clear()


class DeliveryGauges:
    """The ledger's lag, read from the database; every replica exports the same: aggregate with max."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.due = Gauge(
            "notifications_due", f"Rows claimable now, counted up to {CAP}.", ["app"], registry=registry
        )
        self.leased = Gauge(
            "notifications_leased",
            f"Rows under a live lease, counted up to {CAP}.",
            ["app"],
            registry=registry,
        )
        self.waiting = Gauge(
            "notifications_waiting",
            f"Pending rows that wait for their time, counted up to {CAP}.",
            ["app"],
            registry=registry,
        )
        self.oldest_due = Gauge(
            "notifications_oldest_due_timestamp_seconds",
            "next_attempt_at of the oldest row that is claimable now, UNIX time; absent: none.",
            ["app"],
            registry=registry,
        )
        self.dead = Gauge(
            "notifications_dead",
            f"Rows that ended as failed in the last day, counted up to {CAP}.",
            ["source"],
            registry=registry,
        )

    def clear(self) -> None:
        """Drop the series: a value that is not known is not zero."""
        for gauge in (self.due, self.leased, self.waiting, self.oldest_due, self.dead):
            gauge.clear()
