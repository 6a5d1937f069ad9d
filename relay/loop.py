"""The relay's loop: claim, publish, mark, in one transaction under one deadline.

A lane is one transaction and one channel at a time. Lanes share the broker's connection and nothing else.

What a crash leaves: before the commit nothing is marked, so the whole batch is claimed again by whoever comes
first, and what the broker already has comes twice with the same event_id. Never the other way round: a row is
marked only when the broker confirmed it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import asyncpg

from common.backoff import Backoff
from common.database import Database, waiting_helps
from common.lifecycle import Lifecycle
from common.logs import Logger
from common.outage import Outage
from relay import events, sql
from relay.claim import Batch, Claimer, Source
from relay.mark import Marker, Marks, RetryPolicy, decide
from relay.metrics import RelayMetrics
from relay.model import Verdict
from relay.publish import Publisher
from relay.settings import MARK_MARGIN, RelaySettings

READY_SECONDS = 1.0
"""Wait for the broker before a batch; short, so that a stop is not held up."""


class CommitLost(Exception):
    """COMMIT ended as a rollback: nothing of the batch is marked."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one lane works with."""

    name: str
    settings: RelaySettings
    database: Database
    publisher: Publisher
    claimer: Claimer
    marker: Marker
    policy: RetryPolicy
    metrics: RelayMetrics
    lifecycle: Lifecycle
    wakeup: asyncio.Event
    logger: Logger
    outage: Outage
    backoff: Backoff

    async def run(self) -> None:
        """Relay until the daemon stops; every failure is counted, said once, and waited out."""
        while not self.lifecycle.stopping.is_set():
            self.lifecycle.tick(self.name)
            self.wakeup.clear()
            try:
                await self.drain_sources()
            except Exception as error:
                self.claimer.forget()
                self.metrics.batch_failed(self.metrics.stage_of(self.name))
                self.outage.failed(error, stage=self.metrics.stage_of(self.name), lane=self.name)
                if waiting_helps(error):
                    await self.database.suspect()
                await self.lifecycle.pause(self.backoff.next())
            else:
                self.outage.worked(lane=self.name)
                self.backoff.reset()
                self.lifecycle.succeeded(self.name)
                await self.lifecycle.pause(self.settings.tick * random.uniform(0.9, 1.1), self.wakeup)
        self.lifecycle.health.ended(self.name)

    async def drain_sources(self) -> None:
        """Take batches from every source that has more; returns when none has."""
        busy = set(Source)
        while busy and not self.lifecycle.stopping.is_set():
            for source in Source:
                if source in busy and not await self.relay_batch(source):
                    busy.discard(source)
            # A backlog of hours is work being done, not a stall.
            self.lifecycle.tick(self.name)
            self.lifecycle.succeeded(self.name)

    async def relay_batch(self, source: Source) -> bool:
        """Claim, publish, mark, commit one batch; say whether the source may have more right now.

        Raises:
            BrokerUnavailable: away, blocked or not ready; no transaction was begun.
            OSError, TimeoutError, asyncpg.PostgresError: the transaction was rolled back.
        """
        self.at("broker")
        await self.publisher.ready(READY_SECONDS)
        began = asyncio.get_running_loop().time()
        deadline = began + self.settings.batch_deadline
        async with asyncio.timeout_at(deadline):
            self.at("connect")
            async with self.database.connection() as connection:
                self.at("claim")
                await connection.execute(self.begin_statement())
                batch = await self.claimer.claim(connection, source)
                if not len(batch):
                    await connection.execute("ROLLBACK")
                    return batch.more
                self.at("publish")
                marks = await self.publish(
                    batch, min(began + self.settings.confirm_timeout, deadline - MARK_MARGIN)
                )
                self.at("mark")
                await self.marker.write(connection, marks)
                self.at("commit")
                await self.commit(connection)
        self.committed(batch, marks, asyncio.get_running_loop().time() - began)
        return batch.more and bool(marks.published or marks.failures)

    async def publish(self, batch: Batch, deadline: float) -> Marks:
        """Publish a batch and sort its rows; suspects go last, one at a time."""
        verdicts: list[Verdict] = []
        if batch.rows:
            verdicts += await self.publisher.publish(batch.rows, deadline)
        if batch.suspects:
            verdicts += await self.publisher.publish(batch.suspects, deadline, one_at_a_time=True)
        return decide([*batch.rows, *batch.suspects], verdicts, self.policy)

    async def commit(self, connection: asyncpg.Connection) -> None:
        """Commit, and believe only the server's word for it: an aborted transaction answers ROLLBACK."""
        answer = await connection.execute("COMMIT")
        if answer != "COMMIT":
            raise CommitLost(f"COMMIT was answered by {answer}")

    def begin_statement(self) -> str:
        """BEGIN with the server's own guards; the server must not be more patient than the deadline."""
        milliseconds = int(self.settings.batch_deadline * 1000)
        return sql.BEGIN.format(idle=milliseconds, statement=milliseconds, lock=milliseconds)

    def committed(self, batch: Batch, marks: Marks, seconds: float) -> None:
        """Count a committed batch, and say what went wrong in it."""
        self.metrics.batch_committed(batch.source, marks, seconds)
        nacked = [failure for failure in marks.failures if not failure.burnt]
        for failure in marks.failures:
            if failure.burnt:
                event = events.ROW_QUARANTINED if failure.quarantine else events.ROW_FAILED
                self.logger.emit(
                    event,
                    id=failure.row.id,
                    event_id=str(failure.row.event_id),
                    event_type=failure.row.event_type,
                    attempts=failure.row.attempts + 1,
                    row_error=failure.error[:200],
                )
        if nacked:
            self.logger.emit(events.ROWS_NACKED, rows=len(nacked), row_error=nacked[0].error[:200])
        if marks.left:
            self.claimer.forget()
            self.logger.emit(events.ROWS_LEFT, rows=len(marks.left), why=marks.left[0][1])

    def at(self, stage: str) -> None:
        """Remember the stage, for the count of failures by stage."""
        self.metrics.enter(self.name, stage)
