"""Ctrl-C and SIGTERM of the run itself: the first asks for an orderly end, the second for an end at once."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AtOnce(BaseException):
    """The second signal: whatever the main thread does is left there and then."""


class Interrupted(Exception):
    """The first signal came while something was waited for."""


class Signals:
    """A signal wakes :meth:`wait` through a pipe: an Event must not be set from a handler that interrupts its wait."""

    def __init__(self) -> None:
        self.count = 0
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    @property
    def requested(self) -> bool:
        """Whether an end was asked for."""
        return self.count > 0

    def install(self) -> None:
        """Take the signals over; in the main thread."""
        for number in ENDING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, self._came)

    def ignore(self) -> None:
        """Hear no more of them: the end has begun, and is quick."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def request(self) -> None:
        """Ask for an orderly end, as the first signal does."""
        self.count = max(self.count, 1)
        os.write(self._writing, b".")

    def wait(self, seconds: float) -> bool:
        """Sleep; return at once, and True, when an end is asked for."""
        if not self.requested and seconds > 0:
            select.select([self._reading], [], [], seconds)
        return self.requested

    def until(self, ready: Callable[[], bool], timeout: float, interval: float = 0.1) -> bool:
        """Ask ``ready`` until it says yes; False after ``timeout`` seconds.

        Raises:
            Interrupted: an end is asked for.
        """
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() >= deadline:
                return False
            if self.wait(interval):
                raise Interrupted
        return True

    def _came(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        if self.count > 1:
            raise AtOnce
        os.write(self._writing, b".")
