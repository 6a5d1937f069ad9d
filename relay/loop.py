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
from common.outage import Outage
from relay import events, sql
from relay.broker import BrokerUnavailable
from relay.claim import Batch, Claimer, Source
from relay.mark import Marker, Marks, RetryPolicy, decide
from relay.metrics import RelayMetrics
from relay.model import Verdict
from relay.publish import Publisher
from relay.settings import MARK_MARGIN, RelaySettings
from relay.telling import Telling

READY_SECONDS = 1.0
"""Wait for the broker before a batch; short, so that a stop is not held up."""


class CommitLost(Exception):
    """COMMIT ended as a rollback: nothing of the batch is marked."""


class NothingConfirmed(Exception):
    """The broker answered for no row of a batch; each further try may be one more duplicate of all of them."""


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
    telling: Telling
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
                await self.lifecycle.idle(self.name, await self.failed(error))
            else:
                self.outage.worked(lane=self.name)
                self.backoff.reset()
                self.lifecycle.succeeded(self.name)
                await self.lifecycle.idle(self.name, self.rest(), self.wakeup)
        self.lifecycle.health.ended(self.name)

    async def drain_sources(self) -> None:
        """Take batches from every source that has more; returns when none has.

        Raises:
            NothingConfirmed: by some source, after the others had their turn.
            Exception: as of relay_batch, at once.
        """
        busy, silent = set(Source), None
        while busy and not self.lifecycle.stopping.is_set():
            for source in [source for source in Source if source in busy]:
                try:
                    more = await self.relay_batch(source)
                except NothingConfirmed as error:
                    more, silent = False, error
                if not more:
                    busy.discard(source)
                # A backlog of hours is work being done, not a stall.
                self.lifecycle.tick(self.name)
            if silent is None:
                self.lifecycle.succeeded(self.name)
        if silent is not None:
            raise silent

    async def relay_batch(self, source: Source) -> bool:
        """Claim, publish, mark, commit one batch; say whether the source may have more right now.

        Raises:
            BrokerUnavailable: away, blocked or not ready; no transaction was begun.
            NothingConfirmed: the batch ended without a word from the broker; its rows are untouched.
            OSError, TimeoutError, asyncpg.PostgresError: the transaction was rolled back.
        """
        loop = asyncio.get_running_loop()
        self.at("broker")
        await self.publisher.ready(READY_SECONDS)
        began = loop.time()
        deadline = began + self.settings.batch_deadline
        confirms_by = min(began + self.settings.confirm_timeout, deadline - MARK_MARGIN)
        async with asyncio.timeout_at(deadline):
            self.at("connect")
            async with self.database.connection() as connection:
                self.at("claim")
                await connection.execute(self.begin_statement(connection))
                # Asked here, after the last wait before the claim: nothing is claimed after the stop.
                stopping = self.lifecycle.stopping.is_set()
                batch = Batch(source) if stopping else await self.claimer.claim(connection, source)
                if not len(batch):
                    await connection.execute("ROLLBACK")
                    return batch.more
                self.at("publish")
                marks = await self.publish(batch, confirms_by)
                late = loop.time() >= confirms_by
                if late and source is Source.RETRY:
                    marks.defer(self.policy)
                self.at("mark")
                await self.marker.write(connection, marks)
                self.at("commit")
                await self.commit(connection)
        self.committed(batch, marks, loop.time() - began, late)
        if marks.left and source is Source.FRESH:
            # Rows that a silent queue left come again at the next tick: those behind them go first.
            self.claimer.put_off() if late else self.claimer.forget()
        if not marks.published and not marks.failures:
            self.at("publish")
            raise NothingConfirmed(marks.left[0][1])
        return batch.more

    async def publish(self, batch: Batch, deadline: float) -> Marks:
        """Publish a batch and sort its rows; suspects go last, one at a time."""
        verdicts: list[Verdict] = []
        if batch.rows:
            verdicts += await self.publisher.publish(batch.rows, deadline)
        if batch.suspects:
            verdicts += await self.publisher.publish(batch.suspects, deadline, one_at_a_time=True)
        return decide([*batch.rows, *batch.suspects], verdicts, self.policy)

    async def failed(self, error: Exception) -> float:
        """Count a failure and say it, unless it was said; return how long to wait."""
        stage = self.metrics.stage_of(self.name)
        self.metrics.batch_failed(stage)
        self.outage.failed(error, stage=stage, lane=self.name)
        if isinstance(error, BrokerUnavailable):
            # The wait for the broker ends when it comes, and its connection has a backoff of its own.
            return self.settings.backoff_base * random.uniform(0.5, 1.0)
        if not isinstance(error, NothingConfirmed):
            self.claimer.forget()
        if waiting_helps(error):
            await self.database.suspect()
        return self.backoff.next()

    def rest(self) -> float:
        """Seconds until the next look, unless a wake-up comes: a tick at most, less when a sweep is owed."""
        return min(self.settings.tick * random.uniform(0.8, 1.0), self.claimer.sweep_owed_in())

    async def commit(self, connection: asyncpg.Connection) -> None:
        """Commit, and believe only the server's word for it: an aborted transaction answers ROLLBACK."""
        answer = await connection.execute("COMMIT")
        if answer != "COMMIT":
            raise CommitLost(f"COMMIT was answered by {answer}")

    def begin_statement(self, connection: asyncpg.Connection) -> str:
        """BEGIN with the server's own guards; the server must not be more patient than the deadline."""
        milliseconds = int(self.settings.batch_deadline * 1000)
        begin = sql.BEGIN.format(idle=milliseconds, statement=milliseconds, lock=milliseconds)
        if connection.get_server_version().major >= sql.TRANSACTION_TIMEOUT_SINCE:
            begin += sql.BEGIN_TRANSACTION_TIMEOUT.format(transaction=milliseconds)
        return begin

    def committed(self, batch: Batch, marks: Marks, seconds: float, late: bool) -> None:
        """Count a committed batch, and say what went wrong in it."""
        self.metrics.batch_committed(batch.source, marks, seconds)
        nacked = [failure for failure in marks.failures if not failure.burnt]
        for failure in marks.failures:
            if failure.burnt:
                self.telling.emit(
                    events.ROW_QUARANTINED if failure.quarantine else events.ROW_FAILED,
                    id=failure.row.id,
                    event_id=str(failure.row.event_id),
                    event_type=failure.row.event_type,
                    attempts=failure.row.attempts + 1,
                    row_error=failure.error[:200],
                )
        if nacked:
            self.telling.emit(events.ROWS_NACKED, rows=len(nacked), row_error=nacked[0].error[:200])
        # Rows of a key that wait behind a failed one are no fault of the broker.
        if marks.left and marks.published and (late or batch.source is not Source.KEYED):
            self.telling.emit(events.ROWS_LEFT, rows=len(marks.left), why=marks.left[0][1])

    def at(self, stage: str) -> None:
        """Remember the stage, for the count of failures by stage."""
        self.metrics.enter(self.name, stage)
