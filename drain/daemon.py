"""Drain as a process: startup, run, shutdown. The one place where its parts are put together."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from common import events as common_events
from common.backoff import Backoff
from common.database import Database
from common.errors import ConfigurationError, SchemaMismatch
from common.exits import EXIT_FAILED, EXIT_OK, EXIT_SCHEMA, EXIT_SETTINGS
from common.lifecycle import Lifecycle, instance_name, wait_for_schema, within
from common.logs import Logger
from common.metrics import DeliveryGauges, WorkerMetrics
from common.observer import Observer, deliveries_look
from common.probes import Health, ProbeServer
from common.prune import DAY, PrunePace, Pruner, Retention, lock_key
from common.schema import qualify
from drain import events, sql
from drain.apns.answers import RetryPolicy
from drain.apns.model import PRODUCTION_HOST, SANDBOX_HOST, ApnsTarget, SessionLimits
from drain.apns.session import ApnsSession
from drain.apns.token import ProviderTokens
from drain.app import App
from drain.claim import Claimer
from drain.decide import Decision
from drain.gate import Gate
from drain.loop import LOOP, Loop
from drain.metrics import DrainMetrics
from drain.settings import CLOSE_TIMEOUT, AppSettings, DrainSettings, Settings
from drain.settle import Settler
from drain.tracing import tracer_from_environment

APPLICATION_NAME = "drain"
SAMPLE_SECONDS = 1.0
FLUSH_SECONDS = 1.0
"""For the spans that are not sent yet, when drain leaves."""


def target(app: AppSettings) -> ApnsTarget:
    """Where one app's pushes go and as whom."""
    host = app.host or (PRODUCTION_HOST if app.environment == "production" else SANDBOX_HOST)
    return ApnsTarget(
        topic=app.topic,
        host=host,
        port=app.port,
        team_id=app.team_id,
        key_id=app.key_id,
        key_file=app.key_file,
        certificate_file=app.certificate_file,
        certificate_key_file=app.certificate_key_file,
        ca_file=app.ca_file,
        proxy_url=app.proxy_url.get_secret_value() if app.proxy_url is not None else None,
    )


def limits(drain: DrainSettings) -> SessionLimits:
    """Bounds of each app's connections."""
    return SessionLimits(
        push_timeout=drain.push_timeout,
        max_connections=drain.connections,
        streams_per_connection=drain.streams,
        connect_timeout=drain.connect_timeout,
        handshake_timeout=drain.connect_timeout,
    )


class Daemon:
    """One drain process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        shared, drain = settings.shared, settings.drain
        self.registry = CollectorRegistry()
        self.worker_metrics = WorkerMetrics(self.registry, (LOOP,))
        self.metrics = DrainMetrics(self.registry, drain.apps)
        self.gauges = DeliveryGauges(self.registry)
        self.health = Health(shared.live_after)
        self.name = instance_name(shared.instance)
        self.logger = Logger(daemon="drain", instance=self.name)
        self.probes = ProbeServer(shared.probe_host, shared.probe_port, self.health, self.registry)

    async def run(self) -> int:
        """Run until a signal; return the exit code."""
        self.lifecycle = Lifecycle(self.health, self.worker_metrics, self.logger)
        self.lifecycle.install_signals()
        self.probes.start()
        try:
            if not await self.startup():
                return self.stopped([])
            await self.lifecycle.stopping.wait()
            left = await self.shutdown()
        except SchemaMismatch as error:
            self.logger.emit(common_events.SCHEMA_REFUSED, error)
            return EXIT_SCHEMA
        except ConfigurationError as error:
            self.logger.emit(common_events.CONFIGURATION_REFUSED, error)
            return EXIT_SETTINGS
        finally:
            self.probes.stop()
        return self.stopped(left)

    async def startup(self) -> bool:
        """Wait for the database, open everything, start the tasks; False when a stop came first.

        Raises:
            SchemaMismatch: the schema does not fit.
            ConfigurationError: a key or certificate file can not be used.
        """
        shared, drain, lifecycle = self.settings.shared, self.settings.drain, self.lifecycle
        self.observer = Observer(
            shared,
            APPLICATION_NAME,
            self.worker_metrics,
            deliveries_look(self.gauges, shared.database_schema, lambda: list(drain.apps)),
            self.gauges.clear,
            self.logger,
        )
        self.health.ready["database"] = self.database_problem
        self.database = Database(shared, APPLICATION_NAME, self.worker_metrics)
        self.put_together()
        self.health.ready["apns"] = self.apns_problem
        if not await wait_for_schema(shared, APPLICATION_NAME, lifecycle):
            return False
        await self.database.open()
        for app in self.apps.values():
            await app.session.start()
        self.settle_task = asyncio.create_task(self.settler.run(), name="settle")
        self.settle_task.add_done_callback(self.settler_ended)
        self.claim_task = lifecycle.start(LOOP, self.loop.run())
        lifecycle.start("prune", self.pruner().run())
        lifecycle.start("observer", self.observer.run())
        lifecycle.start("loop-lag", lifecycle.watch_loop_lag())
        lifecycle.start("sample", self.sample())
        lifecycle.start(
            "stall", lifecycle.watch_stall(shared.stalled_exit, lambda: self.observer.last_contact)
        )
        self.health.started = True
        self.logger.emit(
            common_events.STARTED,
            probe_port=self.probes.port,
            schema=shared.database_schema,
            apps=list(drain.apps),
            claim_size=drain.claim_size,
            lease=drain.lease,
        )
        return True

    def put_together(self) -> None:
        """Make the apps, the claimer, the settler and the loop."""
        shared, drain = self.settings.shared, self.settings.drain
        tokens = ProviderTokens()
        self.tracer = tracer_from_environment()
        claimer = Claimer(self.database, shared.database_schema, drain.lease, self.name, drain.poll_interval)
        self.settler = Settler(
            self.database,
            shared.database_schema,
            drain.settle_size,
            drain.settle_age,
            lambda rows: self.loop.settled(rows),
            self.metrics,
            self.logger,
        )
        decision = Decision(drain.max_attempts, RetryPolicy(base=drain.retry_base, cap=drain.retry_cap))
        self.apps: dict[str, App] = {}
        for name, app in drain.apps.items():
            try:
                session = ApnsSession(target(app), limits(drain), tokens)
            except (ValueError, OSError) as error:
                raise ConfigurationError(f"DRAIN_APPS, app {name!r}: {error}") from None
            self.apps[name] = App(
                name=name,
                topic=app.topic,
                window=self.settings.app_window(name),
                claim_size=drain.claim_size,
                poll_interval=drain.poll_interval,
                lease=drain.lease,
                start_margin=drain.push_timeout + drain.settle_margin,
                session=session,
                gate=Gate(Backoff(drain.pause_base, drain.pause_cap), drain.mass_failure),
                settle=self.settler.add,
                decision=decision,
                metrics=self.metrics,
                logger=self.logger,
                wake=lambda: self.loop.room.set(),
                tracer=self.tracer,
            )
        self.loop = Loop(
            drain, self.apps, claimer, self.settler, self.database, self.metrics, self.lifecycle, self.logger
        )

    def pruner(self) -> Pruner:
        """Put the pruning of terminal rows together; days below zero keep for ever."""
        drain, schema = self.settings.drain, self.settings.shared.database_schema
        retentions = [
            Retention("notification_deliveries", qualify(sql.PRUNE, schema), drain.retention_days * DAY)
        ]
        return Pruner(
            retentions if drain.retention_days >= 0 else [],
            PrunePace(drain.prune_batch, drain.prune_interval, drain.prune_budget),
            lock_key("notification_deliveries", schema),
            self.database,
            self.metrics.pruned,
            self.lifecycle,
            self.logger,
        )

    def settler_ended(self, task: asyncio.Task[None]) -> None:
        """The settler outlives the stop; before it, its end is a fault."""
        if not self.lifecycle.stopping.is_set() or (not task.cancelled() and task.exception() is not None):
            self.lifecycle.report_death("settle", None if task.cancelled() else task.exception())

    async def sample(self) -> None:
        """Keep the gauges of the connections fresh, and notice a connection keeper that died."""
        while True:
            for name, app in self.apps.items():
                app.session.raise_if_broken()
                self.metrics.connections.labels(name).set(app.session.open_connections)
                self.metrics.free_streams.labels(name).set(app.session.free_streams)
            self.metrics.unsettled.set(len(self.settler))
            await asyncio.sleep(SAMPLE_SECONDS)

    def database_problem(self) -> str | None:
        """Readiness: the database answered within the last three looks."""
        seen = self.observer.last_contact
        bound = 3 * self.settings.shared.observe_interval
        if seen is None or time.monotonic() - seen > bound:
            return f"no answer within {bound:g} s"
        return None

    def apns_problem(self) -> str | None:
        """Readiness: some app has a connection; one app that is broken does not hold a rollout for all."""
        if any(app.session.connected for app in self.apps.values()):
            return None
        problems = {name: app.session.problem or "not connected" for name, app in self.apps.items()}
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items())

    async def shutdown(self) -> list[int]:
        """Stop claiming, finish or give back, write outcomes, close; return ids whose outcome is not written."""
        drain, lifecycle = self.settings.drain, self.lifecycle
        await lifecycle.finished([self.claim_task], self.settings.shared.database_command_timeout)
        if not self.claim_task.done():
            await lifecycle.cancel_tasks(self.claim_task)
        closing = [
            asyncio.create_task(app.session.close(drain.drain_deadline), name=f"close-{name}")
            for name, app in self.apps.items()
        ]
        if not await lifecycle.finished(closing, drain.drain_deadline + 2.0):
            # A second signal: what is in flight is maybe delivered, its lease brings it back.
            await lifecycle.cancel_tasks(*(task for task in closing if not task.done()))
        self.settler.finish()
        await within(drain.flush_deadline, asyncio.shield(self.settle_task))
        left = self.settler.waiting_ids + [
            delivery.id for app in self.apps.values() for delivery in app.pushing.values()
        ]
        self.settle_task.cancel()
        await lifecycle.cancel_tasks()
        await asyncio.gather(self.database.close(CLOSE_TIMEOUT), self.flush_spans())
        return left

    async def flush_spans(self) -> None:
        """Send the spans that are not sent yet, if there are any, within a bound."""
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, FLUSH_SECONDS)

    def stopped(self, left: list[int]) -> int:
        """Write the last lines; return the exit code."""
        if left:
            self.logger.emit(events.LEFT_BEHIND, rows=len(left), ids=left[:20])
        sent = sum(
            sample.value
            for metric in self.metrics.outcomes.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["outcome"] == "sent"
        )
        self.logger.emit(
            common_events.STOPPED, sent=int(sent), left=len(left), failure=self.lifecycle.failure
        )
        return EXIT_FAILED if left or self.lifecycle.failure is not None else EXIT_OK


__all__ = ["Daemon"]
