"""Metrics of drain. The core calls these methods; it knows no metric."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import FAST
from drain.apns.answers import REASON_CLASSES as APNS_CLASSES
from drain.decide import OWN
from drain.model import Delivery, Settlement

OUTCOMES = ("sent", "failed", "expired", "superseded", "retry", "given_back")
REASON_CLASSES = (*APNS_CLASSES, OWN)
AGE = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 3600)


class DrainMetrics:
    """What drain counts."""

    def __init__(self, registry: CollectorRegistry, apps: Iterable[str]) -> None:
        names = list(apps)
        self._leases: dict[tuple[int, int], float] = {}
        """End of the lease of each row in the window; a row leaves it when it is settled."""
        self.claims = Counter("drain_claims_total", "Claim statements.", registry=registry)
        self.claim_failures = Counter(
            "drain_claim_failures_total", "Claim statements that failed.", registry=registry
        )
        self.claimed = Counter("drain_claimed_total", "Rows claimed.", ["app"], registry=registry)
        self.reclaimed = Counter(
            "drain_reclaimed_total", "Rows claimed whose earlier lease ran out.", ["app"], registry=registry
        )
        self.claim_duration = Histogram(
            "drain_claim_duration_seconds", "One claim statement.", buckets=FAST, registry=registry
        )
        self.settles = Counter("drain_settles_total", "Settle statements.", registry=registry)
        self.outcomes = Counter(
            "drain_outcomes_total",
            "Settled rows by outcome and class of reason.",
            ["app", "outcome", "reason_class"],
            registry=registry,
        )
        self.stale = Counter(
            "drain_stale_outcomes_total",
            "Outcomes that matched no row because the fencing token had moved on.",
            registry=registry,
        )
        self.uncertain = Counter(
            "drain_uncertain_outcomes_total",
            "Outcomes that matched no row after a write whose commit was uncertain.",
            registry=registry,
        )
        self.maybe = Counter(
            "drain_maybe_delivered_total",
            "Pushes written whose answer never came: each may be doubled.",
            ["app"],
            registry=registry,
        )
        self.pushes = Counter(
            "drain_pushes_total", "Pushes handed to the connection.", ["app"], registry=registry
        )
        self.push_duration = Histogram(
            "drain_push_duration_seconds",
            "Write of a push to APNs' answer.",
            ["app"],
            buckets=FAST,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "drain_end_to_end_seconds",
            "created_at to the written outcome, of the oldest sent row of each settle.",
            buckets=AGE,
            registry=registry,
        )
        self.lease_left = Histogram(
            "drain_lease_left_seconds",
            "Rest of the lease when outcomes were settled: the least of each settle.",
            buckets=(0, 1, 5, 10, 20, 30, 60, 90, 110, 120),
            registry=registry,
        )
        self.tokens_dead = Counter(
            "drain_device_tokens_dead_total",
            "Rows whose device token APNs called dead.",
            ["app"],
            registry=registry,
        )
        self.in_flight = Gauge("drain_in_flight", "Rows claimed and not settled.", ["app"], registry=registry)
        self.unsettled = Gauge("drain_unsettled", "Outcomes that wait to be written.", registry=registry)
        self.paused = Gauge(
            "drain_app_paused", "1 while a configuration error pauses the app.", ["app"], registry=registry
        )
        self.connections = Gauge(
            "drain_apns_connections", "Open connections to APNs.", ["app"], registry=registry
        )
        self.free_streams = Gauge(
            "drain_apns_free_streams", "Free streams on them.", ["app"], registry=registry
        )
        self.pruned = Counter(
            "drain_pruned_total", "Rows deleted past their retention.", ["table"], registry=registry
        )
        self.pruned.labels("notification_deliveries")
        for name in names:
            for metric in (
                self.claimed,
                self.reclaimed,
                self.maybe,
                self.pushes,
                self.push_duration,
                self.tokens_dead,
                self.in_flight,
                self.paused,
                self.connections,
                self.free_streams,
            ):
                metric.labels(name)
            for outcome in OUTCOMES:
                for reason_class in REASON_CLASSES:
                    self.outcomes.labels(name, outcome, reason_class)

    def claim_done(self, deliveries: Sequence[Delivery], lease_until: float, seconds: float) -> None:
        """One claim statement returned these rows; their lease ends at this loop time."""
        self.claims.inc()
        self.claim_duration.observe(seconds)
        for delivery in deliveries:
            self._leases[delivery.id, delivery.claim_version] = lease_until
        for app, count in Tally(delivery.app for delivery in deliveries).items():
            self.claimed.labels(app).inc(count)
        for app, count in Tally(delivery.app for delivery in deliveries if delivery.reclaimed).items():
            self.reclaimed.labels(app).inc(count)

    def settled(self, rows: Sequence[Settlement], stale: Sequence[Settlement], uncertain: bool) -> None:
        """One settle statement was answered; ``stale`` are the rows it did not match."""
        self.settles.inc()
        (self.uncertain if uncertain else self.stale).inc(len(stale))
        unmatched = {id(settlement) for settlement in stale}
        matched = [row for row in rows if id(row) not in unmatched]
        monotonic = asyncio.get_running_loop().time()
        ends = [self._leases.pop((row.delivery.id, row.delivery.claim_version), None) for row in rows]
        if known := [until for until in ends if until is not None]:
            self.lease_left.observe(max(0.0, min(known) - monotonic))
        for key, count in Tally((row.delivery.app, row.label, row.reason_class) for row in matched).items():
            self.outcomes.labels(*key).inc(count)
        for row in matched:
            if row.token_dead:
                self.tokens_dead.labels(row.delivery.app).inc()
        if sent := [row.delivery.created_at for row in matched if row.status == "sent"]:
            self.end_to_end.observe(max(0.0, time.time() - min(sent).timestamp()))
