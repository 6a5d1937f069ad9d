"""Relay as a process: startup, run, shutdown. The one place where its parts are put together."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from common import events as common_events
from common.backoff import Backoff
from common.database import Database
from common.errors import SchemaMismatch
from common.lifecycle import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_SCHEMA,
    Lifecycle,
    instance_name,
    wait_for_schema,
    within,
)
from common.logs import Logger
from common.metrics import OutboxGauges, WorkerMetrics
from common.observer import Observer, outbox_look
from common.outage import Outage
from common.probes import Health, ProbeServer
from relay import events
from relay.broker import Broker
from relay.claim import Claimer
from relay.loop import Lane
from relay.mark import Marker, RetryPolicy
from relay.metrics import RelayMetrics
from relay.prune import Pruner
from relay.publish import Publisher
from relay.settings import CLOSE_TIMEOUT, Settings
from relay.wakeup import Wakeup
from relay.wiring import broker_config, message_config

APPLICATION_NAME = "relay"


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
        finally:
            self.probes.stop()
        return self.stopped(in_time)

    async def startup(self) -> bool:
        """Wait for the database, open everything, start the tasks; False when a stop came first."""
        shared, relay, lifecycle = self.settings.shared, self.settings.relay, self.lifecycle
        self.database = Database(shared, APPLICATION_NAME, self.worker_metrics)
        self.broker = Broker(broker_config(relay), self.logger, self.metrics)
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
        if relay.retention_days >= 0 or relay.inbox_retention_days >= 0:
            pruner = Pruner(
                relay, shared.database_schema, self.database, self.metrics, lifecycle, self.logger
            )
            lifecycle.start("prune", pruner.run())
        lifecycle.start("observer", self.observer.run())
        lifecycle.start("loop-lag", lifecycle.watch_loop_lag())
        lifecycle.start(
            "stall", lifecycle.watch_stall(shared.stalled_exit, lambda: self.observer.last_contact)
        )
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
            broker=self.broker,
            publisher=Publisher(self.broker, message_config(relay), relay.unroutable, self.metrics),
            claimer=Claimer(schema, relay.batch_size, sweep_interval=relay.tick),
            marker=Marker(schema),
            policy=RetryPolicy(relay.max_attempts, relay.retry_base, relay.retry_cap, relay.nack_delay),
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            wakeup=wakeup,
            logger=self.logger,
            outage=Outage(self.logger, events.BATCH_FAILED, events.BATCH_RECOVERED),
            backoff=Backoff(relay.backoff_base, relay.backoff_cap),
        )

    def database_problem(self) -> str | None:
        """Readiness: the database answered within the last three looks."""
        seen = self.observer.last_contact
        bound = 3 * self.settings.shared.observe_interval
        if seen is None or self.observer.now() - seen > bound:
            return f"no answer within {bound:g} s"
        return None

    async def shutdown(self) -> bool:
        """Let the batches in flight finish, or roll them back; close everything; say whether it was in time."""
        lanes = asyncio.gather(*self.lane_tasks, return_exceptions=True)
        aborting = asyncio.ensure_future(self.lifecycle.aborting.wait())
        done, _ = await asyncio.wait(
            {lanes, aborting}, timeout=self.settings.relay.stop_deadline, return_when=asyncio.FIRST_COMPLETED
        )
        aborting.cancel()
        await (
            self.lifecycle.cancel_tasks()
        )  # a lane that is cancelled cuts its connection: the server rolls back
        closed = await within(CLOSE_TIMEOUT, self.broker.close(CLOSE_TIMEOUT / 2))
        await self.database.close(CLOSE_TIMEOUT / 2)
        if not done:
            self.logger.emit(common_events.STOP_OVERDUE, deadline=self.settings.relay.stop_deadline)
        return bool(done) and closed

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
