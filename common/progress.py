"""How far a long command is."""

from __future__ import annotations

import sys
import time

from common.text import number


class Progress:
    """How far a write is: one line that changes on a terminal, else a line every few seconds."""

    INTERVAL = 5.0

    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total = verb, total
        self._live = sys.stderr.isatty()
        self._said = time.monotonic()
        self._shown = False

    def show(self, done: int) -> None:
        """Say how many rows are done."""
        now = time.monotonic()
        if now - self._said < (0.1 if self._live else self.INTERVAL):
            return
        self._said, self._shown = now, True
        percent = min(100, 100 * done // self._total) if self._total else 100
        text = f"{self._verb} {number(done)} of {number(self._total)} ({percent} %)"
        sys.stderr.write(f"\r\x1b[K{text}" if self._live else text + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._live and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
