"""What the dashboard shows: four rows of graphs, each with its queries."""

from __future__ import annotations

from dataclasses import dataclass, field

N = 'namespace=~"$namespace"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: queries by legend, a unit of Grafana, and the alert whose bound is drawn in."""

    title: str
    unit: str
    queries: dict[str, str]
    alert: str | None = None
    description: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row with its panels."""

    title: str
    panels: list[Panel] = field(default_factory=list)


def quantile(q: float, histogram: str, by: str = "") -> str:
    """Quantile of a histogram over all replicas."""
    labels = ", ".join(["le", *([by] if by else [])])
    return f"histogram_quantile({q}, sum by ({labels}) (rate({histogram}_bucket{{{N}}}{RATE})))"


def rate(counter: str, by: str, matchers: str = "") -> str:
    """Rate of a counter by a label, over all replicas."""
    more = f",{matchers}" if matchers else ""
    return f"sum by ({by}) (rate({counter}{{{N}{more}}}{RATE}))"


LATENESS = Row(
    "Lateness",
    [
        Panel(
            "Oldest unpublished event",
            "s",
            {"{{job}}": f"namespace_job:outbox_oldest_unpublished_age_seconds:max{{{N}}}"},
            "OutboxDeliveryLate",
            "No line: nothing waits.",
        ),
        Panel(
            "Oldest due notification",
            "s",
            {"{{app}}": f"namespace_job_app:notifications_oldest_due_age_seconds:max{{{N}}}"},
            "NotificationsLate",
            "Since it could have been claimed. Rows under a lease and rows that back off are not late.",
        ),
        Panel(
            "Since the last successful step",
            "s",
            {
                "{{job}} {{instance}}": "time() - min by (job, instance) "
                f"(worker_last_success_timestamp_seconds{{{N}}})"
            },
            "WorkerStalled",
            "Of each replica its worst loop.",
        ),
        Panel(
            "Event: written to published",
            "s",
            {
                "p50": quantile(0.5, "relay_end_to_end_seconds"),
                "p99": quantile(0.99, "relay_end_to_end_seconds"),
            },
        ),
        Panel(
            "Notification: written to accepted by APNs",
            "s",
            {
                "p50": quantile(0.5, "drain_end_to_end_seconds"),
                "p99": quantile(0.99, "drain_end_to_end_seconds"),
            },
        ),
        Panel(
            "Age of the gauges from the database",
            "s",
            {"{{job}}": f"time() - max by (job) (worker_db_observation_timestamp_seconds{{{N}}})"},
            "DbObservationStale",
        ),
    ],
)

FLOW = Row(
    "Flow",
    [
        Panel(
            "Events published",
            "ops",
            {"{{exchange}}": rate("relay_published_total", "exchange")},
            stacked=True,
        ),
        Panel(
            "Outbox",
            "short",
            {"{{source}}": f"max by (source) (outbox_unpublished{{{N}}})"},
            description="Rows not published, counted up to 10000 for each way of claiming.",
        ),
        Panel(
            "One batch of relay",
            "s",
            {
                "BEGIN to COMMIT, p50": quantile(0.5, "relay_batch_duration_seconds"),
                "BEGIN to COMMIT, p99": quantile(0.99, "relay_batch_duration_seconds"),
                "publish and confirms, p99": quantile(0.99, "relay_publish_duration_seconds"),
            },
        ),
        Panel(
            "Notifications pushed",
            "ops",
            {
                "{{app}}": rate("drain_pushes_total", "app"),
                "{{app}} claimed": rate("drain_claimed_total", "app"),
            },
        ),
        Panel(
            "Ledger",
            "short",
            {
                "{{app}} due": f"max by (app) (notifications_due{{{N}}})",
                "{{app}} leased": f"max by (app) (notifications_leased{{{N}}})",
                "{{app}} waiting": f"max by (app) (notifications_waiting{{{N}}})",
            },
        ),
        Panel(
            "APNs' answers",
            "s",
            {
                "{{app}} p50": quantile(0.5, "drain_push_duration_seconds", "app"),
                "{{app}} p99": quantile(0.99, "drain_push_duration_seconds", "app"),
            },
        ),
    ],
)

OUTCOMES = Row(
    "Outcomes",
    [
        Panel(
            "Events that were not published",
            "ops",
            {"{{verdict}}": rate("relay_rows_total", "verdict", 'verdict!="published"')},
        ),
        Panel(
            "Batches that did not commit",
            "ops",
            {"{{stage}}": rate("relay_batch_failures_total", "stage")},
        ),
        Panel(
            "Quarantine",
            "short",
            {"{{job}}": f"max by (job) (outbox_quarantined{{{N}}})"},
            description="Events that relay gave up on; they wait for a person.",
        ),
        Panel(
            "Notifications by outcome",
            "ops",
            {"{{outcome}}": rate("drain_outcomes_total", "outcome")},
            stacked=True,
        ),
        Panel(
            "Not sent, by class of reason",
            "ops",
            {"{{reason_class}}": rate("drain_outcomes_total", "reason_class", 'outcome!="sent"')},
        ),
        Panel(
            "Share that failed",
            "percentunit",
            {
                "{{app}} notifications": f"namespace_job_app:drain_failed:ratio_increase30m{{{N}}}",
                "events": f"namespace_job:relay_rows_failed:ratio_increase30m{{{N}}}",
            },
            "DeadNotificationsGrowing",
            "Of 30 minutes, dead device tokens not counted.",
        ),
        Panel(
            "Paused apps",
            "bool_on_off",
            {"{{app}}": f"max by (app) (drain_app_paused{{{N}}})"},
            description="A configuration error: wrong key, topic or environment.",
        ),
        Panel("Dead device tokens", "ops", {"{{app}}": rate("drain_device_tokens_dead_total", "app")}),
        Panel(
            "Pushes whose answer never came",
            "ops",
            {"{{app}}": rate("drain_maybe_delivered_total", "app")},
            description="Each may be doubled.",
        ),
    ],
)

INSIDE = Row(
    "Inside",
    [
        Panel(
            "Fence",
            "short",
            {
                "late outcomes dropped": f"sum(increase(drain_stale_outcomes_total{{{N}}}{RATE}))",
                "uncertain outcomes": f"sum(increase(drain_uncertain_outcomes_total{{{N}}}{RATE}))",
            },
            "DrainStaleOutcomes",
        ),
        Panel(
            "Rows claimed again after an expired lease",
            "percentunit",
            {"of the claimed": f"namespace_job:drain_reclaimed:ratio_increase10m{{{N}}}"},
            "DrainReclaims",
        ),
        Panel(
            "Lease left when the outcome was written",
            "s",
            {
                "worst in a hundred": quantile(0.01, "drain_lease_left_seconds"),
                "half": quantile(0.5, "drain_lease_left_seconds"),
            },
        ),
        Panel(
            "Database pool",
            "short",
            {
                "{{instance}} in use": f"worker_db_pool_in_use{{{N}}}",
                "{{instance}} open": f"worker_db_pool_size{{{N}}}",
            },
        ),
        Panel(
            "Wait for a database connection",
            "s",
            {"{{job}} p99": quantile(0.99, "worker_db_acquire_seconds", "job")},
        ),
        Panel(
            "Event loop lag",
            "s",
            {"{{instance}} p99": quantile(0.99, "worker_event_loop_lag_seconds", "instance")},
            description="Pauses of the process; long ones endanger the lease.",
        ),
        Panel(
            "Oldest transaction in the database",
            "s",
            {"age": f"time() - max(database_oldest_transaction_timestamp_seconds{{{N}}})"},
            "DatabaseSnapshotHeld",
        ),
        Panel(
            "Broker",
            "bool_on_off",
            {
                "{{instance}} connected": f"relay_broker_connected{{{N}}}",
                "{{instance}} blocked": f"relay_broker_blocked{{{N}}}",
            },
        ),
        Panel(
            "APNs",
            "short",
            {
                "{{instance}} {{app}} connections": f"drain_apns_connections{{{N}}}",
                "{{instance}} {{app}} free streams": f"drain_apns_free_streams{{{N}}}",
            },
        ),
        Panel(
            "Rows in hand",
            "short",
            {
                "{{instance}} {{app}} claimed": f"drain_in_flight{{{N}}}",
                "{{instance}} outcomes to write": f"drain_unsettled{{{N}}}",
            },
        ),
        Panel(
            "Memory",
            "bytes",
            {"{{job}} {{instance}}": f'process_resident_memory_bytes{{{N},job=~"relay|drain"}}'},
        ),
        Panel(
            "Version",
            "short",
            {"{{job}} {{version}} {{commit}}": f"count by (job, version, commit) (worker_build_info{{{N}}})"},
            description="Replicas of each version: a rollout is done when one is left.",
        ),
    ],
)

ROWS = [LATENESS, FLOW, OUTCOMES, INSIDE]
