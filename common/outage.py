"""Says an outage once: the first failure, a reminder each minute, and the recovery with its length.

graphile/worker#224 had 30,000 lines in 20 s of a database's standby.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from common.logs import LogEvent, Logger

REMIND_SECONDS = 60.0
QUIET_SECONDS = 5.0
"""Kinds change during one outage (refused, then starting up), and what comes back may be gone again at once: after a
line about a failure there is none about another one for so long."""


class Outage:
    """The failures of one dependency, as few log lines."""

    def __init__(
        self,
        logger: Logger,
        failing: LogEvent,
        recovered: LogEvent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._failing = failing
        self._recovered = recovered
        self._clock = clock
        self._since: float | None = None
        self._said = -math.inf
        self._told = False
        self._kind: tuple[str, ...] = ()
        self._count = 0
        self._unsaid = 0

    @property
    def lasting(self) -> bool:
        """Whether the last step failed."""
        return self._since is not None

    def failed(self, error: BaseException, **fields: Any) -> None:
        """Count a failure; log it when it is the first, of a new kind, or a minute after the last line."""
        now = self._clock()
        self._count += 1
        if self._since is None:
            self._since = now
        kind = (type(error).__name__, str(getattr(error, "sqlstate", "")))
        quiet = QUIET_SECONDS if not self._told or kind != self._kind else REMIND_SECONDS
        if now - self._said < quiet:
            return
        if self._unsaid:
            fields["unsaid"], self._unsaid = self._unsaid, 0
        self._said, self._kind, self._told = now, kind, True
        self._logger.emit(
            self._failing, error, failures=self._count, seconds=round(now - self._since, 1), **fields
        )

    def worked(self, **fields: Any) -> None:
        """Say that the dependency works; logs only when it was said that it had failed."""
        if self._since is not None and self._told:
            self._logger.emit(
                self._recovered, failures=self._count, seconds=round(self._clock() - self._since, 1), **fields
            )
        elif self._since is not None:
            self._unsaid += 1
        self._since, self._count, self._kind, self._told = None, 0, (), False
