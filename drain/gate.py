"""The gate of one app: open, or paused by a configuration error with a single probe now and then. No I/O.

A wrong key, topic or environment is no row's fault: claims for the app stop, its rows are given back, other apps
go on. Many different device tokens that are called bad one after the other, with no success between, are taken
for the same: the wrong environment or topic, before thousands of tokens are marked dead (forum/807380).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from common.backoff import Backoff

WORKING_SECONDS = 60.0
"""After an accepted push an app counts as rightly configured for this long."""


class Change(enum.Enum):
    """What an answer did to the gate."""

    NONE = "none"
    PAUSED = "paused"
    STILL_PAUSED = "still_paused"
    RESUMED = "resumed"


@dataclass(slots=True)
class Gate:
    """Times are of the loop's clock, in seconds.

    Args:
        backoff: rests between probes.
        mass_failure: as many different bad tokens in a row pause the app.
    """

    backoff: Backoff
    mass_failure: int
    reason: str | None = None
    """Why the app is paused, or None."""
    until: float = 0.0
    probing: bool = False
    accepted_at: float | None = None
    bad_tokens: set[str] = field(default_factory=set)

    def works(self, now: float) -> bool:
        """APNs accepted a push of this app a moment ago."""
        return (
            self.reason is None and self.accepted_at is not None and now - self.accepted_at < WORKING_SECONDS
        )

    def slots(self, now: float, free: int) -> int:
        """Rows that may be claimed now: all that is free, one probe, or none."""
        if self.reason is None:
            return free
        if self.probing or now < self.until:
            return 0
        return min(1, free)

    def probe_sent(self) -> None:
        """A row was claimed while paused."""
        if self.reason is not None:
            self.probing = True

    def probe_undecided(self) -> None:
        """The probe's row said nothing about the configuration (given back, expired, no answer)."""
        self.probing = False

    def accepted(self, now: float) -> Change:
        """APNs took a push, or answered what only a right configuration gets."""
        self.accepted_at = now
        self.bad_tokens.clear()
        self.probing = False
        if self.reason is None:
            return Change.NONE
        self.reason = None
        self.backoff.reset()
        return Change.RESUMED

    def refused(self, reason: str, now: float) -> Change:
        """APNs refused the configuration: rest, longer each time the probe is refused again."""
        if self.reason is not None and not self.probing:
            return Change.NONE  # pushes that were in flight when the pause began
        change = Change.PAUSED if self.reason is None else Change.STILL_PAUSED
        self.reason = reason
        self.probing = False
        self.bad_tokens.clear()
        self.until = now + self.backoff.next()
        return change

    def bad_token(self, token: str) -> bool:
        """A token was called bad; True when so many were, with no success between, that none is believed."""
        self.bad_tokens.add(token)
        return len(self.bad_tokens) >= self.mass_failure
