"""One app of drain: its window, its gate, its connection to APNs, and what its answers mean for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from prometheus_client import Counter, Histogram

from common.logs import Logger, fingerprint
from drain import events
from drain.apns.answers import (
    ConfigError,
    Failed,
    GiveBack,
    Outcome,
    RefreshToken,
    Retry,
    Sent,
    TokenDead,
)
from drain.apns.content import InvalidDelivery, make_push
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Push, Reply
from drain.apns.session import ApnsSession
from drain.decide import Decision, ended, expired, expiry_seconds, released, settlement
from drain.gate import Change, Gate
from drain.metrics import DrainMetrics
from drain.model import Delivery, Settlement

if TYPE_CHECKING:
    from drain.tracing import OtelTracer

BUSY_REST = 2.0
"""Seconds without new claims after APNs said that it is busy (503): the whole app goes slower."""
CONNECTING_LOOK = 0.05
"""Seconds between two looks at a connection that is being made."""
THROTTLED_DEVICES = 10_000
"""Devices that are remembered as throttled at most."""


@dataclass(slots=True)
class App:
    """State of one app in this process. Times are of the loop's clock, in seconds.

    ``window`` bounds the rows claimed and not settled; ``start_margin`` is the part of the lease that must be
    left when a push starts: push timeout and write-back. ``lease`` is the whole of it.
    """

    name: str
    topic: str
    window: int
    claim_size: int
    poll_interval: float
    lease: float
    start_margin: float
    session: ApnsSession
    gate: Gate
    settle: Callable[[Settlement], None]
    decision: Decision
    metrics: DrainMetrics
    logger: Logger
    wake: Callable[[], None]
    tracer: OtelTracer | None = None
    unsettled: int = 0
    hungry: bool = True
    next_poll: float = 0.0
    rest_until: float = 0.0
    pushing: dict[str, Delivery] = field(default_factory=dict)
    expiring: dict[str, float] = field(default_factory=dict)
    """When those of them expire that have an expires_at."""
    throttled: dict[str, float] = field(default_factory=dict)
    pushes: Counter = field(init=False)
    push_duration: Histogram = field(init=False)

    def __post_init__(self) -> None:
        # Once for each app: looking a label up costs as much as counting.
        self.pushes = self.metrics.pushes.labels(self.name)
        self.push_duration = self.metrics.push_duration.labels(self.name)

    def wants(self, now: float) -> int:
        """Rows to claim now. A hungry app waits for room for a whole claim, so that claims stay few."""
        if now < self.rest_until or not self.session.connected:
            return 0
        slots = min(self.claim_size, self.gate.slots(now, self.window - self.unsettled))
        if slots <= 0:
            return 0
        whole = slots >= min(self.claim_size, self.window) or self.gate.reason is not None
        return slots if now >= self.next_poll or (self.hungry and whole) else 0

    def wakes_in(self, now: float, poll: float) -> float:
        """Seconds until the clock alone can make this app want rows."""
        if self.wants(now) > 0:
            return 0.0
        if not self.session.connected and self.session.problem is None:
            return min(poll, CONNECTING_LOOK)
        paused_until = self.gate.until if self.gate.reason is not None else 0.0
        due = max(self.next_poll, paused_until, self.rest_until)
        return min(poll, due - now) if due > now else poll

    def give_back_unreachable(self) -> None:
        """APNs can not be reached: rows that wait for a connection are given back instead of kept to their lease."""
        if (
            self.session.queued
            and not self.session.connected
            and (problem := self.session.problem) is not None
        ):
            self.session.recall(problem)

    def claimed(self, now: float, asked: int, found: int) -> None:
        """A claim asked for rows and found some."""
        self.unsettled += found
        self.hungry = found == asked
        self.next_poll = now + self.poll_interval
        if found:
            self.gate.probe_sent()
        self.metrics.in_flight.labels(self.name).set(self.unsettled)

    def left(self, count: int) -> None:
        """Rows were settled."""
        self.unsettled -= count
        self.metrics.in_flight.labels(self.name).set(self.unsettled)

    def skip(self, what: Settlement) -> None:
        """Settle a row without a push."""
        self.gate.probe_undecided()
        self.settle(what)

    def push(self, delivery: Delivery, lease_until: float) -> None:
        """Hand a row to the connection; its answer comes to :meth:`replied`."""
        now = asyncio.get_running_loop().time()
        if (wait := self.throttled.get(delivery.device_token, 0.0) - now) > 0:
            self.skip(released(delivery, "DeviceThrottled", wait))
            return
        push = make_push(delivery, self.topic)
        if isinstance(push, InvalidDelivery):
            self.skip(ended(delivery, "failed", push.reason))
            self.failed(delivery, push.reason)
            return
        start_by = lease_until - self.start_margin
        if (left := expiry_seconds(delivery)) is not None:
            # Counted from before the claim was sent, as the lease is: a push is never late, and a row may expire
            # sooner than by the database's clock by what the claim took.
            expires = lease_until - self.lease + left
            if expires <= now:
                self.skip(expired(delivery))
                return
            start_by = min(start_by, expires)
            self.expiring[push.notification_id] = expires
        self.pushing[push.notification_id] = delivery
        self.pushes.inc()
        if self.tracer is not None:
            self.tracer.handed_over(push)
        self.session.submit(push, start_by, self.replied)

    def replied(self, push: Push, reply: Reply) -> None:
        """Turn a reply into a settlement, and tell the gate what it says about the app."""
        delivery = self.pushing.pop(push.notification_id)
        expires = self.expiring.pop(push.notification_id, math.inf)
        match reply:
            case Answered():
                self.push_duration.observe(reply.seconds)
            case MaybeDelivered() | NoAnswer():
                self.metrics.maybe.labels(self.name).inc()
            case _:
                pass
        now = asyncio.get_running_loop().time()
        outcome = self.decision.outcome(
            delivery, reply, probe=self.gate.probing, app_works=self.gate.works(now)
        )
        outcome = self.weigh(delivery, outcome, now)
        what = settlement(delivery, reply, outcome)
        if isinstance(outcome, ConfigError):
            # The probe's row comes back with the next probe; behind it, so that another row is tried first.
            what = what._replace(delay=max(0.0, self.gate.until - now))
        if isinstance(reply, NotSent) and now >= expires:
            what = expired(delivery)
        self.settle(what)
        if self.tracer is not None:
            self.tracer.replied(push, reply, what)

    def weigh(self, delivery: Delivery, outcome: Outcome, now: float) -> Outcome:
        """Tell the gate; a token that is called bad among many such is given back instead of marked dead."""
        match outcome:
            case Sent():
                self.announce(self.gate.accepted(now))
            case Failed(reason):
                self.gate.probe_undecided()
                self.failed(delivery, reason)
            case TokenDead(reason, _, suspect):
                if suspect and (self.gate.reason is not None or self.gate.bad_token(delivery.device_token)):
                    self.announce(self.gate.refused(f"many device tokens at once: {reason}", now))
                    return GiveBack(reason, 0.0)
                self.token_dead(delivery, reason)
                if not suspect:
                    self.announce(self.gate.accepted(now))
            case ConfigError(reason, _):
                self.announce(self.gate.refused(reason, now))
            case Retry(_, delay, scope):
                self.gate.probe_undecided()
                if scope == "app":
                    self.rest_until = now + min(delay, BUSY_REST)
                elif scope == "device":
                    self.throttle(delivery.device_token, now, now + delay)
            case GiveBack() | RefreshToken():
                self.gate.probe_undecided()
            case _:
                assert_never(outcome)
        return outcome

    def throttle(self, device_token: str, now: float, until: float) -> None:
        """APNs has too much for this device: its other rows wait as well, other devices go on."""
        if len(self.throttled) >= THROTTLED_DEVICES:
            self.throttled = {token: end for token, end in self.throttled.items() if end > now}
        if len(self.throttled) < THROTTLED_DEVICES:
            self.throttled[device_token] = until

    def announce(self, change: Change) -> None:
        """Say what happened to the gate."""
        match change:
            case Change.PAUSED:
                self.metrics.paused.labels(self.name).set(1)
                self.session.recall(f"app paused: {self.gate.reason}")
                self.logger.emit(events.APP_PAUSED, app=self.name, reason=self.gate.reason)
            case Change.STILL_PAUSED:
                self.logger.emit(events.APP_STILL_PAUSED, app=self.name, reason=self.gate.reason)
            case Change.RESUMED:
                self.metrics.paused.labels(self.name).set(0)
                self.logger.emit(events.APP_RESUMED, app=self.name)
                self.wake()
            case Change.NONE:
                pass

    def failed(self, delivery: Delivery, reason: str) -> None:
        """Say that a row failed for good."""
        self.logger.emit(
            events.DELIVERY_FAILED,
            app=self.name,
            id=delivery.id,
            notification_id=str(delivery.notification_id),
            device=fingerprint(delivery.device_token),
            reason=reason,
        )

    def token_dead(self, delivery: Delivery, reason: str) -> None:
        """Say that a device token died."""
        self.logger.emit(
            events.TOKEN_DEAD,
            app=self.name,
            id=delivery.id,
            device=fingerprint(delivery.device_token),
            reason=reason,
        )
