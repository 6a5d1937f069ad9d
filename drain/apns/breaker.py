"""When may the session connect again? One answer for all of its pushes, without I/O."""

from __future__ import annotations

import random
from collections.abc import Callable

from common.backoff import Backoff

SHORT_LIFE = 5.0
"""Seconds. APNs takes fast reconnecting for an attack, so a connection that ended sooner delays the next one,
even if it did answer."""
IDLE_LIFE = 60.0
"""A connection that stood this long without giving a good answer had nothing to do; its end is no failure."""
SHORT_LIFE_STEPS = 8
"""Such delays grow to this many times the base only: after a few dropped connections work goes on in seconds."""


class Breaker:
    """Jittered backoff between attempts to connect. Times are the monotonic clock's."""

    def __init__(
        self, base: float, cap: float, calm: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._base = base
        self._calm = calm
        self._uniform = uniform
        self._useless = Backoff(base, cap, uniform)
        self._short = Backoff(base, min(cap, base * SHORT_LIFE_STEPS), uniform)
        self.ready_at = 0.0

    @property
    def failures(self) -> int:
        """Attempts and connections in a row that came to nothing."""
        return self._useless.failures

    def failed(self, now: float) -> None:
        """An attempt to connect failed, or its connection ended before it gave a good answer."""
        self._wait(now + self._useless.next())

    def proven(self) -> None:
        """A connection gave an answer that says: token and server are sound."""
        self._useless.reset()

    def ended(self, now: float, *, proven: bool, age: float, abruptly: bool) -> None:
        """A connection ended after `age` seconds, by us or by the peer."""
        if not proven and age < IDLE_LIFE:
            self.failed(now)
        elif age < SHORT_LIFE:
            self._wait(now + self._short.next())
        else:
            self._short.reset()
            if abruptly:  # Perhaps a whole fleet lost its connections at this moment.
                self._wait(now + self._uniform(0, self._base))

    def calm(self, now: float) -> None:
        """The peer said ENHANCE_YOUR_CALM."""
        self._wait(now + self._uniform(self._calm, 2 * self._calm))

    def _wait(self, until: float) -> None:
        self.ready_at = max(self.ready_at, until)
