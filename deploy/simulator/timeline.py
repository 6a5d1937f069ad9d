"""What is due later, under one timer: thousands of answers in flight cost one wake-up per moment, not one each."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

_TOGETHER_SECONDS: Final = 0.0005


class Timeline:
    """Calls back in order of due time; everything due within half a millisecond goes in one turn of the loop."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        heapq.heappush(self._due, (at, next(self._tie), call))
        if self._timer is None or at < self._timer_at:
            self._set(loop)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._due[0][0]
        self._timer = loop.call_at(self._timer_at, self._ring)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        until = loop.time() + _TOGETHER_SECONDS
        while self._due and self._due[0][0] <= until:
            heapq.heappop(self._due)[2]()
        if self._due and self._timer is None:
            self._set(loop)
