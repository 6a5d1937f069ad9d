"""Drain's loop: claim a lease, push outside of any lock, settle under the fencing token.

The window is continuous: claims refill it as settled rows leave it; nothing waits for the slowest push of a batch.

What a crash leaves: rows in status claimed, whose lease runs out and brings them to another drain with attempts
one higher; at most the pushes that were in flight come twice, with the same apns-id and collapse id.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from common.backoff import Backoff
from common.database import Database, waiting_helps
from common.lifecycle import Lifecycle
from common.logs import Logger
from common.outage import Outage
from drain import events
from drain.app import App
from drain.claim import Claimer, Lease
from drain.decide import before_push, released
from drain.metrics import DrainMetrics
from drain.model import Delivery, Settlement
from drain.settings import DrainSettings
from drain.settle import Settler

LOOP = "claim"


class Loop:
    """Claims for every app that has room, and hands the rows to their apps."""

    def __init__(
        self,
        settings: DrainSettings,
        apps: Mapping[str, App],
        claimer: Claimer,
        settler: Settler,
        database: Database,
        metrics: DrainMetrics,
        lifecycle: Lifecycle,
        logger: Logger,
    ) -> None:
        self.settings = settings
        self.apps = apps
        self.claimer = claimer
        self.settler = settler
        self.database = database
        self.metrics = metrics
        self.lifecycle = lifecycle
        self.logger = logger
        self.room = asyncio.Event()
        """Set when settled rows made room, or an app's gate opened."""

    async def run(self) -> None:
        """Claim until the daemon stops; every failure is counted, said once, and waited out."""
        backoff = Backoff(self.settings.backoff_base, self.settings.backoff_cap)
        outage = Outage(self.logger, events.CLAIM_FAILED, events.CLAIM_RECOVERED)
        while not self.lifecycle.stopping.is_set():
            self.lifecycle.tick(LOOP)
            self.room.clear()
            try:
                delay = await self.step()
            except Exception as error:
                self.metrics.claim_failures.inc()
                outage.failed(error)
                if waiting_helps(error):
                    await self.database.suspect()
                delay = backoff.next()
                await self.lifecycle.idle(LOOP, delay)
            else:
                outage.worked()
                backoff.reset()
                self.lifecycle.succeeded(LOOP)
                await self.lifecycle.idle(LOOP, delay, self.room)
        self.lifecycle.health.ended(LOOP)

    async def step(self) -> float:
        """Claim once for the apps that want rows; return how long to sleep unless there is room before."""
        now = asyncio.get_running_loop().time()
        for app in self.apps.values():
            app.give_back_unreachable()
        slots = {name: count for name, app in self.apps.items() if (count := app.wants(now)) > 0}
        if not slots:
            return self.until_next_poll(now)
        lease = await self.claimer.claim(slots)
        self.metrics.claim_done(lease.deliveries, lease.until, asyncio.get_running_loop().time() - now)
        self.note_reclaimed(lease.deliveries)
        found = Counter(delivery.app for delivery in lease.deliveries)
        for name, count in slots.items():
            self.apps[name].claimed(now, asked=count, found=found[name])
        await self.admit(lease)
        return self.until_next_poll(asyncio.get_running_loop().time())

    async def admit(self, lease: Lease) -> None:
        """Sort out the rows that are not pushed, and hand the others to their app's connection."""
        try:
            superseded, waiting = await self.claimer.check_siblings(lease.deliveries)
        except BaseException:
            for delivery in lease.deliveries:
                self.settler.add(released(delivery, "SiblingsUnknown"))
            raise
        for delivery in lease.deliveries:
            app = self.apps[delivery.app]
            settlement = before_push(
                delivery,
                max_attempts=self.settings.max_attempts,
                superseded=delivery.id in superseded,
                sibling_in_flight=delivery.id in waiting,
            )
            if settlement is None:
                app.push(delivery, lease.until)
            else:
                app.skip(settlement)

    def settled(self, rows: Sequence[Settlement]) -> None:
        """Rows left the window, whether the write matched them or not."""
        for name, count in Counter(row.delivery.app for row in rows).items():
            self.apps[name].left(count)
        self.room.set()

    def until_next_poll(self, now: float) -> float:
        """Seconds until some app wants rows again by the clock alone."""
        poll = self.settings.poll_interval * random.uniform(0.9, 1.1)
        return min((app.wakes_in(now, poll) for app in self.apps.values()), default=poll)

    def note_reclaimed(self, deliveries: Sequence[Delivery]) -> None:
        """Say that leases ran out: the sign of a dead or frozen drain."""
        reclaimed = [delivery for delivery in deliveries if delivery.reclaimed]
        if reclaimed:
            self.logger.emit(events.RECLAIMED, rows=len(reclaimed), ids=[row.id for row in reclaimed[:10]])
