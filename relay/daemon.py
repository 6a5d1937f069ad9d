"""Relay as a process: startup, run, shutdown. The one place where its parts are put together."""

from __future__ import annotations

import asyncio
import ssl

from prometheus_client import CollectorRegistry

from common import events as common_events
from common.backoff import Backoff
from common.database import Database
from common.errors import ConfigurationError, SchemaMismatch
from common.exits import EXIT_FAILED, EXIT_OK, EXIT_SCHEMA, EXIT_SETTINGS
from common.lifecycle import Lifecycle, instance_name, wait_for_schema, within
from common.logs import Logger
from common.metrics import OutboxGauges, WorkerMetrics
from common.observer import Observer, outbox_look
from common.outage import Outage
from common.probes import Health, ProbeServer
from common.prune import DAY, PrunePace, Pruner, Retention, lock_key
from common.schema import qualify
from relay import events, sql
from relay.broker import Broker, BrokerConfig
from relay.claim import Claimer
from relay.loop import Lane
from relay.mark import Marker, RetryPolicy
from relay.message import MessageConfig
from relay.metrics import RelayMetrics
from relay.publish import Publisher
from relay.settings import CLOSE_TIMEOUT, RelaySettings, Settings
from relay.telling import Telling
from relay.tracing import tracer_from_environment
from relay.wakeup import Wakeup

APPLICATION_NAME = "relay"
LEAST_SWEEP_SECONDS = 1.0
"""With a tick of milliseconds, dear sweeps must not follow one another at each of them."""
FLUSH_SECONDS = 1.0
"""For the spans that are not sent yet, when relay leaves."""


def broker_config(relay: RelaySettings) -> BrokerConfig:
    """How to reach the broker.

    Raises:
        ConfigurationError: a certificate file can not be used.
    """
    return BrokerConfig(
        url=relay.amqp_url.get_secret_value(),
        exchange=relay.exchange,
        declare_exchange=relay.declare_exchange,
        connect_timeout=relay.amqp_connect_timeout,
        heartbeat=relay.amqp_heartbeat,
        backoff_base=relay.backoff_base,
        backoff_cap=relay.backoff_cap,
        ssl_context=tls_context(relay),
    )


def tls_context(relay: RelaySettings) -> ssl.SSLContext | None:
    """Build the TLS context of amqps: verified always, with our own CAs and certificate when given."""
    if not relay.amqp_url.get_secret_value().startswith("amqps://"):
        return None
    try:
        context = ssl.create_default_context(cafile=relay.amqp_ca_file)
        if relay.amqp_cert_file is not None:
            context.load_cert_chain(relay.amqp_cert_file, relay.amqp_key_file)
    except (OSError, ssl.SSLError) as error:
        files = [
            str(f) for f in (relay.amqp_ca_file, relay.amqp_cert_file, relay.amqp_key_file) if f is not None
        ]
        raise ConfigurationError(f"RELAY_AMQP_* files {', '.join(files)}: {error}") from None
    return context


def message_config(relay: RelaySettings) -> MessageConfig:
    """What of a message is not the row's own choice."""
    return MessageConfig(
        exchange=relay.exchange,
        app_id=relay.app_id,
        max_body_bytes=relay.max_body_bytes,
        cloud_events=relay.cloud_events,
    )


class Daemon:
    """One relay process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        shared, relay = settings.shared, settings.relay
        self.lanes = [f"lane-{number}" for number in range(1, relay.lanes + 1)]
        self.registry = CollectorRegistry()
        self.worker_metrics = WorkerMetrics(self.registry, tuple(self.lanes))
        self.metrics = RelayMetrics(self.registry, relay.exchange)
        self.gauges = OutboxGauges(self.registry)
        self.health = Health(shared.live_after)
        self.logger = Logger(daemon="relay", instance=instance_name(shared.instance))
        self.telling = Telling(self.logger)
        self.probes = ProbeServer(shared.probe_host, shared.probe_port, self.health, self.registry)

    async def run(self) -> int:
        """Run until a signal; return the exit code."""
        self.lifecycle = Lifecycle(self.health, self.worker_metrics, self.logger)
        self.lifecycle.install_signals()
        self.probes.start()
        try:
            if not await self.startup():
                return self.stopped()
            await self.lifecycle.stopping.wait()
            in_time = await self.shutdown()
        except SchemaMismatch as error:
            self.logger.emit(common_events.SCHEMA_REFUSED, error)
            return EXIT_SCHEMA
        except ConfigurationError as error:
            self.logger.emit(common_events.CONFIGURATION_REFUSED, error)
            return EXIT_SETTINGS
        finally:
            self.probes.stop()
        return self.stopped(in_time)

    async def startup(self) -> bool:
        """Wait for the database, open everything, start the tasks; False when a stop came first."""
        shared, relay, lifecycle = self.settings.shared, self.settings.relay, self.lifecycle
        self.database = Database(shared, APPLICATION_NAME, self.worker_metrics)
        self.broker = Broker(broker_config(relay), self.logger, self.metrics)
        self.tracer = tracer_from_environment(relay.exchange)
        self.health.ready["broker"] = self.broker.problem
        self.health.ready["database"] = self.database_problem
        self.observer = Observer(
            shared,
            APPLICATION_NAME,
            self.worker_metrics,
            outbox_look(self.gauges, shared.database_schema),
            self.gauges.clear,
            self.logger,
        )
        if not await wait_for_schema(shared, APPLICATION_NAME, lifecycle):
            return False
        await self.database.open()
        await self.broker.start()
        wakeups = [asyncio.Event() for _ in self.lanes]
        self.lane_tasks = [
            lifecycle.start(name, self.lane(name, wakeup).run())
            for name, wakeup in zip(self.lanes, wakeups, strict=True)
        ]
        if relay.wakeup:
            wakeup = Wakeup(shared, relay, lifecycle, wakeups, self.logger)
            lifecycle.start("wakeup", wakeup.run())
        lifecycle.start("prune", self.pruner().run())
        lifecycle.start("observer", self.observer.run())
        lifecycle.start("loop-lag", lifecycle.watch_loop_lag())
        lifecycle.start("stall", lifecycle.watch_stall(shared.stalled_exit, self.needs_seen))
        self.health.started = True
        self.logger.emit(
            common_events.STARTED,
            probe_port=self.probes.port,
            schema=shared.database_schema,
            lanes=relay.lanes,
            batch_size=relay.batch_size,
        )
        return True

    def lane(self, name: str, wakeup: asyncio.Event) -> Lane:
        """Put one lane together."""
        relay, schema = self.settings.relay, self.settings.shared.database_schema
        return Lane(
            name=name,
            settings=relay,
            database=self.database,
            publisher=Publisher(
                self.broker,
                message_config(relay),
                unroutable=relay.unroutable,
                observer=self.metrics,
                tracer=self.tracer,
            ),
            claimer=Claimer(schema, relay.batch_size, sweep_interval=max(relay.tick, LEAST_SWEEP_SECONDS)),
            marker=Marker(schema),
            policy=RetryPolicy(relay.max_attempts, relay.retry_base, relay.retry_cap, relay.nack_delay),
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            wakeup=wakeup,
            telling=self.telling,
            outage=Outage(self.logger, events.BATCH_FAILED, events.BATCH_RECOVERED),
            backoff=Backoff(relay.backoff_base, relay.backoff_cap),
        )

    def pruner(self) -> Pruner:
        """Put the pruning of published rows and of the inbox together; days below zero keep for ever."""
        relay, schema = self.settings.relay, self.settings.shared.database_schema
        return Pruner(
            [
                Retention(table, qualify(statement, schema), days * DAY)
                for table, statement, days in (
                    ("outbox", sql.PRUNE_PUBLISHED, relay.retention_days),
                    ("inbox", sql.PRUNE_INBOX, relay.inbox_retention_days),
                )
                if days >= 0
            ],
            PrunePace(relay.prune_batch, relay.prune_interval, relay.prune_budget),
            lock_key("outbox", schema),
            self.database,
            self.metrics.pruned,
            self.lifecycle,
            self.logger,
        )

    def database_problem(self) -> str | None:
        """Readiness: the database answered within the last three looks."""
        seen = self.observer.last_contact
        bound = 3 * self.settings.shared.observe_interval
        if seen is None or self.observer.now() - seen > bound:
            return f"no answer within {bound:g} s"
        return None

    def needs_seen(self) -> float | None:
        """Monotonic time of the database's last sign of life; None while the broker is away or blocked."""
        return self.observer.last_contact if self.broker.problem() is None else None

    async def shutdown(self) -> bool:
        """Let the batches in flight finish, or roll them back; close everything; say whether it was in time."""
        done = await self.lifecycle.finished(self.lane_tasks, self.settings.relay.stop_deadline)
        await (
            self.lifecycle.cancel_tasks()
        )  # a lane that is cancelled cuts its connection: the server rolls back
        closed = await within(CLOSE_TIMEOUT, self.broker.close(CLOSE_TIMEOUT / 2))
        await asyncio.gather(self.database.close(CLOSE_TIMEOUT / 2), self.flush_spans())
        if not done and not self.lifecycle.aborting.is_set():
            self.logger.emit(common_events.STOP_OVERDUE, deadline=self.settings.relay.stop_deadline)
        return (done or self.lifecycle.aborting.is_set()) and closed

    async def flush_spans(self) -> None:
        """Send the spans that are not sent yet, if there are any, within a bound."""
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, FLUSH_SECONDS)

    def stopped(self, in_time: bool = True) -> int:
        """Write the last line; return the exit code."""
        published = sum(
            sample.value
            for metric in self.metrics.published.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        self.logger.emit(common_events.STOPPED, published=int(published), failure=self.lifecycle.failure)
        return EXIT_OK if in_time and self.lifecycle.failure is None else EXIT_FAILED
