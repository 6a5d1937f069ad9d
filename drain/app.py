"""One app of drain: its window, its gate, its connection to APNs, and what its answers mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from common.logs import Logger, fingerprint
from drain import events
from drain.apns.content import InvalidDelivery, build_push
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, Push, Reply
from drain.apns.session import ApnsSession
from drain.decide import Decision, decide, expiry_seconds, invalid
from drain.gate import Change, Gate
from drain.metrics import DrainMetrics
from drain.model import Delivery, Settlement


@dataclass(slots=True)
class App:
    """State of one app in this process. Times are of the loop's clock, in seconds.

    ``window`` bounds the rows claimed and not settled; ``start_margin`` is the part of the lease that must be
    left when a push starts: push timeout and write-back.
    """

    name: str
    topic: str
    window: int
    claim_size: int
    poll_interval: float
    start_margin: float
    session: ApnsSession
    gate: Gate
    settle: Callable[[Settlement], None]
    decision: Decision
    metrics: DrainMetrics
    logger: Logger
    wake: Callable[[], None]
    unsettled: int = 0
    hungry: bool = True
    next_poll: float = 0.0
    pushing: dict[str, Delivery] = field(default_factory=dict)

    def wants(self, now: float) -> int:
        """Rows to claim now. A hungry app waits for room for a whole claim, so that claims stay few."""
        free = self.window - self.unsettled
        slots = min(self.claim_size, self.gate.slots(now, free))
        if slots <= 0:
            return 0
        whole = min(self.claim_size, self.window)
        if now >= self.next_poll or (self.hungry and (slots >= whole or self.gate.reason is not None)):
            return slots
        return 0

    def wakes_in(self, now: float, poll: float) -> float:
        """Seconds until the clock alone makes this app want rows."""
        due = max(self.next_poll, self.gate.until if self.gate.reason is not None else 0.0)
        if self.wants(now) > 0:
            return 0.0
        return min(poll, due - now) if due > now else poll

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

    def skip(self, settlement: Settlement) -> None:
        """Settle a row without a push."""
        self.gate.probe_undecided()
        self.settle(settlement)

    def push(self, delivery: Delivery, lease_until: float) -> None:
        """Hand a row to the connection; its answer comes to :meth:`replied`."""
        try:
            push = build_push(delivery, self.topic)
        except InvalidDelivery as error:
            self.skip(invalid(delivery, str(error)))
            return
        start_by = lease_until - self.start_margin
        if (left := expiry_seconds(delivery)) is not None:
            start_by = min(start_by, asyncio.get_running_loop().time() + left)
        self.pushing[push.notification_id] = delivery
        self.metrics.pushes.labels(self.name).inc()
        self.session.submit(push, start_by, self.replied)

    def replied(self, push: Push, reply: Reply) -> None:
        """Turn APNs' answer into a settlement, and tell the gate."""
        delivery = self.pushing.pop(push.notification_id)
        match reply:
            case Answered():
                self.metrics.push_duration.labels(self.name).observe(reply.seconds)
            case MaybeDelivered() | NoAnswer():
                self.metrics.maybe.labels(self.name).inc()
            case _:
                pass
        self.settle(decide(delivery, reply, self.decision, self))

    def paused_by(self, reason: str, rest: float | None = None) -> None:
        """The configuration was refused."""
        now = asyncio.get_running_loop().time()
        self.announce(self.gate.refused(reason, now, rest))

    def accepted(self) -> None:
        """The configuration was accepted."""
        self.announce(self.gate.accepted())

    def announce(self, change: Change) -> None:
        """Say what happened to the gate."""
        self.metrics.paused.labels(self.name).set(int(self.gate.reason is not None))
        match change:
            case Change.PAUSED:
                self.session.recall(f"app paused: {self.gate.reason}")
                self.logger.emit(events.APP_PAUSED, app=self.name, reason=self.gate.reason)
            case Change.STILL_PAUSED:
                self.logger.emit(events.APP_STILL_PAUSED, app=self.name, reason=self.gate.reason)
            case Change.RESUMED:
                self.logger.emit(events.APP_RESUMED, app=self.name)
                self.wake()
            case Change.NONE:
                pass


def token_hash(delivery: Delivery) -> str:
    """A device token for the logs."""
    return fingerprint(delivery.device_token)
