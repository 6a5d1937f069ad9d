"""When may the session connect again? One answer for all of its pushes, without I/O."""

from __future__ import annotations

from collections.abc import Callable

SHORT_LIFE = 5.0
"""Seconds. A connection lost sooner counts as a failure even if it did answer: APNs takes fast reconnecting
for an attack."""
SHORT_LIFE_FAILURES = 3
"""How far such losses alone drive the backoff: recovery after a few dropped connections stays within seconds."""


class Breaker:
    """Full-jitter exponential backoff between attempts to connect. Times are those of the monotonic clock.

    `failures` counts attempts that came to nothing and connections that ended without one good answer; a
    connection that gives one resets it.
    """

    def __init__(self, base: float, cap: float, calm: float, random: Callable[[], float]) -> None:
        self._base = base
        self._cap = cap
        self._calm = calm
        self._random = random
        self.failures = 0
        self.ready_at = 0.0

    def failed(self, now: float) -> None:
        """An attempt to connect failed, or its connection ended before it was of any use."""
        self.failures += 1
        self._wait(now)

    def lost(self, now: float, *, proven: bool, age: float, abruptly: bool) -> None:
        """A connection ended. `proven`: it gave an answer that says that token and server are sound."""
        if not proven:
            self.failed(now)
        elif age < SHORT_LIFE:
            self.failures = max(self.failures, min(self.failures + 1, SHORT_LIFE_FAILURES))
            self._wait(now)
        elif abruptly:
            self._wait(now)  # A whole fleet lost its connections at this moment, perhaps.

    def proven(self) -> None:
        """A connection lived long enough and gave a good answer."""
        self.failures = 0

    def calm(self, now: float) -> None:
        """The peer said ENHANCE_YOUR_CALM."""
        self.ready_at = max(self.ready_at, now + self._calm * (1 + self._random()))

    def _wait(self, now: float) -> None:
        # 2 ** 30 is beyond any cap; more would overflow a float after hours of outage.
        ceiling = min(self._cap, self._base * 2.0 ** min(self.failures, 30))
        self.ready_at = max(self.ready_at, now + self._random() * ceiling)
