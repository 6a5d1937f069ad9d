"""Counts the messages that the exchange hands out, on a queue of its own beside the consumer's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import aiormq
import aiormq.abc

REMEMBERED = 200_000
"""Ids of the newest messages; a duplicate comes soon after its original."""
START_TIMEOUT = 30.0


class Tap:
    """A thread with a connection of its own. What is published while it has none is not counted."""

    def __init__(self, url: str, exchange: str, patterns: Sequence[str]) -> None:
        self.messages = 0
        self.repeated = 0
        """Messages whose id had come before."""
        self.watched: Counter[str] = Counter()
        """Messages of each id that :meth:`watch` named."""
        self._url, self._exchange, self._patterns = url, exchange, patterns
        self._ids: set[str] = set()
        self._order: deque[str] = deque()
        self._watch: frozenset[str] = frozenset()
        self._bound = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="tap", daemon=True)

    def start(self) -> bool:
        """Return when the queue is bound; False when that took too long."""
        self._thread.start()
        return self._bound.wait(START_TIMEOUT)

    def close(self, wait: float = 10.0) -> None:
        """End the thread; the queue goes with its connection."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(wait)

    def watch(self, ids: Iterable[str]) -> None:
        """Count the messages of these ids from now on, those of others no more."""
        self.watched = Counter()
        self._watch = frozenset(ids)

    def _main(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._run())

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError, aiormq.exceptions.AMQPError, TimeoutError):
                await self._listen()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    async def _listen(self) -> None:
        connection = await asyncio.wait_for(aiormq.connect(self._url), 10)
        try:
            channel = await connection.channel()
            await channel.exchange_declare(self._exchange, exchange_type="topic", durable=True)
            declared = await channel.queue_declare(exclusive=True, auto_delete=True)
            queue = declared.queue or ""
            for pattern in self._patterns:
                await channel.queue_bind(queue, self._exchange, pattern)
            await channel.basic_consume(queue, self._on_message, no_ack=True)
            self._bound.set()
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({stop, connection.closing}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        finally:
            await asyncio.wait_for(connection.close(), 5)

    async def _on_message(self, message: aiormq.abc.DeliveredMessage) -> None:
        event_id = str(message.header.properties.message_id)
        self.messages += 1
        if event_id in self._watch:
            self.watched[event_id] += 1
        if event_id in self._ids:
            self.repeated += 1
            return
        self._ids.add(event_id)
        self._order.append(event_id)
        if len(self._order) > REMEMBERED:
            self._ids.discard(self._order.popleft())
