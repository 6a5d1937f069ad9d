"""What the drills share: telling, waiting, expecting, and orders for which nobody else writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import asyncpg

from deploy.demo.producer import place_order
from deploy.live import sql
from deploy.live.account import is_empty, run_empty
from deploy.live.figures import Sampler
from deploy.live.signals import Interrupted, Signals
from deploy.live.stack import SCHEMA, Stack

PATIENCE = 60.0
"""Seconds for one step of a drill; most take less than one."""


class NotAsPromised(Exception):
    """A step did not come true in time; the drill can not go on."""


class Drill:
    """One trace that is played.

    Every figure that :meth:`expect` gets was measured; ``good`` is false once one was not as promised.
    """

    def __init__(self, stack: Stack, sampler: Sampler, signals: Signals, say: Callable[[str], None]) -> None:
        self.stack, self.sampler = stack, sampler
        self.signals = signals
        self.good = True
        self._say = say
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        """One line of the story, with the seconds since its beginning."""
        self._say(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def expect(self, what: str, promised: object, found: object) -> None:
        """Tell a figure, and whether it is the promised one."""
        if found == promised:
            self.tell(f"{what}: {found}, as promised")
        else:
            self.good = False
            self.tell(f"{what}: {found}, NOT AS PROMISED: {promised}")

    def until(self, what: str, ready: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait until something is true.

        Raises:
            NotAsPromised: it was not in time.
            Interrupted: an end is asked for.
        """
        if not self.signals.until(ready, timeout, 0.05):
            raise NotAsPromised(f"not within {timeout:g} s: {what}")

    def rest(self, seconds: float) -> None:
        """Let time pass. Raises Interrupted."""
        if self.signals.wait(seconds):
            raise Interrupted

    def count(self, statement: str, *arguments: object) -> int:
        """The number that a statement of one row and one column returns."""
        return int(self.sampler.rows(statement, *arguments)[0][0])

    def quiet(self) -> None:
        """Stop the producer and wait until nothing is on its way: what is counted from here on is the drill's own.

        Raises:
            NotAsPromised: it did not run empty.
        """
        self.stack.producer.stop()
        figures = run_empty(self.sampler, self.tell)
        if not is_empty(figures):
            raise NotAsPromised(f"the chain did not run empty: {figures.tables} {figures.problem}")
        tables = figures.tables
        self.tell(
            f"the producer is stopped, and all that it wrote has arrived: {tables.written} events written and "
            f"published, {tables.accepted} applied, {tables.sent} deliveries sent"
        )

    def place_orders(self, count: int) -> list[str]:
        """Place orders of the customers 1 to ``count`` in one transaction; return the ids of their events."""

        async def place() -> list[int]:
            connection = await asyncpg.connect(self.stack.database_url, timeout=10, command_timeout=30)
            try:
                async with connection.transaction():
                    return [
                        await place_order(connection, SCHEMA, customer) for customer in range(1, count + 1)
                    ]
            finally:
                connection.terminate()

        orders = asyncio.run(place())
        return self.sampler.ids(sql.EVENTS_OF_ORDERS, [str(order) for order in orders])
