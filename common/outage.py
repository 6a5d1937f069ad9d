"""Says an outage once: the first failure, a reminder each minute, and the recovery with its length.

graphile/worker#224 had 30,000 lines in 20 s of a database's standby.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common.logs import LogEvent, Logger

REMIND_SECONDS = 60.0


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
        self._said = 0.0
        self._kind: tuple[str, ...] = ()
        self._count = 0

    @property
    def lasting(self) -> bool:
        """Whether the last step failed."""
        return self._since is not None

    def failed(self, error: BaseException, **fields: Any) -> None:
        """Count a failure; log it when it is the first, of a new kind, or a minute after the last line."""
        now = self._clock()
        self._count += 1
        kind = (type(error).__name__, str(getattr(error, "sqlstate", "")))
        fresh = self._since is None
        if self._since is None:
            self._since = now
        # Kinds change during one outage (refused, then starting up): a new kind at most every five seconds.
        new_kind = kind not in {self._kind} and now - self._said >= 5.0
        if fresh or new_kind or now - self._said >= REMIND_SECONDS:
            self._said, self._kind = now, kind
            self._logger.emit(
                self._failing, error, failures=self._count, seconds=round(now - self._since, 1), **fields
            )

    def worked(self, **fields: Any) -> None:
        """Say that the dependency works; logs only when it had failed."""
        if self._since is not None:
            self._logger.emit(
                self._recovered, failures=self._count, seconds=round(self._clock() - self._since, 1), **fields
            )
        self._since, self._count, self._kind = None, 0, ()
