"""Decisions about a row: which are not pushed at all, and what is written for each outcome. No I/O.

What APNs' answers mean is the table of drain/apns/answers.py; here its outcomes become settlements.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from drain.apns.answers import (
    ConfigError,
    Failed,
    GiveBack,
    Outcome,
    RefreshToken,
    Retry,
    RetryPolicy,
    RowFacts,
    Sent,
    TokenDead,
    decide,
    reason_class,
)
from drain.apns.model import Answered, Reply
from drain.model import Delivery, Settlement

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SIBLING_WAIT = 0.5
"""Seconds that a row waits for an older sibling in flight before it is looked at again."""

OWN = "drain"
"""Class of reasons that are drain's own and not APNs'."""
DEAD_DEVICE = "token_dead"
"""Class of reasons of dead device tokens, as in drain.apns.answers."""

TOPIC_REASONS = frozenset({"BadTopic", "MissingTopic", "TopicDisallowed"})
"""Configuration errors that may be of one push type alone: a topic has a suffix for each."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The numbers that outcomes depend on."""

    max_attempts: int
    policy: RetryPolicy
    uniform: Callable[[], float] = random.random

    def outcome(self, delivery: Delivery, reply: Reply, *, probe: bool, app_works: bool) -> Outcome:
        """The outcome of one push.

        Args:
            probe: this push tries whether a paused app works again.
            app_works: APNs accepted pushes of this app a moment ago: a refused topic is then the row's fault
                (its push type's), and does not pause the app.
        """
        facts = RowFacts(delivery.attempts, self.max_attempts, delivery.registered_at, probe)
        outcome = decide(reply, facts, self.policy, self.uniform)
        if isinstance(outcome, ConfigError) and outcome.reason in TOPIC_REASONS and app_works and not probe:
            return self.retry(delivery, outcome.reason)
        return outcome

    def retry(self, delivery: Delivery, reason: str) -> Outcome:
        """Count the attempt and try again later, or fail after the last one."""
        if delivery.attempts >= self.max_attempts:
            return Failed(reason)
        step = min(self.policy.cap, self.policy.base * 2.0 ** min(delivery.attempts, 30))
        return Retry(reason, step * self.uniform())


def before_push(
    delivery: Delivery, *, max_attempts: int, superseded: bool, sibling_in_flight: bool
) -> Settlement | None:
    """Settle a claimed row that is not pushed; None when it is to be pushed.

    The order matters: a row that is late or superseded is so whatever its attempts.
    """
    if delivery.token_dead_since is not None:
        # Counted with the tokens that APNs calls dead: no failure that anybody could mend.
        return ended(delivery, "failed", "DeviceTokenDead", give_back=True)._replace(reason_class=DEAD_DEVICE)
    if superseded:
        return ended(delivery, "superseded", "NewerSibling", give_back=True)
    if (left := expiry_seconds(delivery)) is not None and left <= 0:
        return expired(delivery)
    if delivery.attempts > max_attempts:
        # Counted at the claim: the process died with the row in hand as often as it was claimed.
        return ended(delivery, "failed", delivery.last_reason or "AttemptsExhausted", give_back=True)
    if sibling_in_flight:
        return released(delivery, "OlderSiblingInFlight", SIBLING_WAIT)
    return None


def expiry_seconds(delivery: Delivery) -> float | None:
    """Seconds from the claim to the row's expiry, by the database's clock; None when it has none.

    The epoch asks APNs for one attempt without storage; it is no time at which the row expires.
    """
    if delivery.expires_at is None or delivery.expires_at.tzinfo is None or delivery.expires_at <= EPOCH:
        return None
    return (delivery.expires_at - delivery.claimed_at).total_seconds()


def ended(delivery: Delivery, status: str, reason: str, *, give_back: bool = False) -> Settlement:
    """A terminal settlement for a reason of drain's own."""
    assert status in ("failed", "expired", "superseded")
    return Settlement(delivery, status, status, OWN, reason=reason, give_back=give_back)  # type: ignore[arg-type]


def expired(delivery: Delivery) -> Settlement:
    """Past expires_at, and not pushed; a row that was tried before keeps the reason of that."""
    return ended(delivery, "expired", delivery.last_reason or "Expired", give_back=True)


def released(delivery: Delivery, reason: str, delay: float = 0.0) -> Settlement:
    """Give a row back untouched: due again after ``delay`` seconds, its attempt returned."""
    return Settlement(delivery, "pending", "given_back", OWN, reason=reason, delay=delay, give_back=True)


def settlement(delivery: Delivery, reply: Reply, outcome: Outcome) -> Settlement:
    """What is written for an outcome. A config error's row is given back at once; the gate decides the rest."""
    label = reason_class(reply)
    status = reply.status if isinstance(reply, Answered) else None
    match outcome:
        case Sent():
            return Settlement(delivery, "sent", "sent", label, None, status)
        case Failed(reason):
            return Settlement(delivery, "failed", "failed", label, reason, status)
        case TokenDead(reason, since, _):
            return Settlement(
                delivery, "failed", "failed", label, reason, status, token_dead=True, dead_since=since
            )
        case Retry(reason, delay, _):
            return Settlement(delivery, "pending", "retry", label, reason, status, delay=delay)
        case GiveBack(reason, delay):
            return Settlement(
                delivery, "pending", "given_back", label, reason, status, delay=delay, give_back=True
            )
        case ConfigError(reason, _) | RefreshToken(reason):
            return Settlement(
                delivery, "pending", "given_back", label, reason, status, delay=0.0, give_back=True
            )
        case _:
            assert_never(outcome)
