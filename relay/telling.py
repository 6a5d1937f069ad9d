"""Says what happens to rows, in few lines: a fault that has one row often has ten thousand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common.logs import LogEvent, Logger

LINES = 5
WINDOW_SECONDS = 60.0


class Telling:
    """Writes at most ``lines`` lines of one event in a window; the first of the next says how many were left out.

    One serves all lanes of a process.
    Every row is counted in the metrics and has its error in the table; a line is for the eye.
    """

    def __init__(
        self,
        logger: Logger,
        lines: int = LINES,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._lines = lines
        self._window = window
        self._clock = clock
        self._ends: dict[LogEvent, float] = {}
        self._seen: dict[LogEvent, int] = {}

    def emit(self, event: LogEvent, **fields: Any) -> None:
        """Write a line, or count it as left out."""
        now = self._clock()
        if now >= self._ends.get(event, 0.0):
            unsaid = self._seen.get(event, 0) - self._lines
            if unsaid > 0:
                fields["unsaid"] = unsaid
            self._ends[event], self._seen[event] = now + self._window, 0
        self._seen[event] += 1
        if self._seen[event] <= self._lines:
            self._logger.emit(event, **fields)
