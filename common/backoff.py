"""Exponential backoff with full jitter, the one shape of waiting after a failure."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Delays that grow from ``base`` to ``cap`` and start again after a success.

    Full jitter between a quarter and the whole of the step: replicas that failed together do not come back
    together, and none comes back at once.
    """

    __slots__ = ("_base", "_cap", "_failures", "_random")

    def __init__(
        self, base: float, cap: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._base = base
        self._cap = cap
        self._failures = 0
        self._random = uniform

    @property
    def failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def next(self) -> float:
        """Return the delay in seconds after one more failure."""
        step = min(self._cap, self._base * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return self._random(step / 4, step)

    def reset(self) -> None:
        """Say that it worked."""
        self._failures = 0
