"""The final account: what was written, what became of it, and what was lost, each figure asked for and not assumed.

Nothing is lost when every order has its event, every event that relay marked was applied by the consumer, every
applied event has its delivery, and the devices got at least as many notifications as the ledger calls sent. What
is still open is not lost, and is counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.live import sql
from deploy.live.figures import Figures, Sampler
from deploy.live.stack import CONSUMER, Stack

PATIENCE = 60.0
"""Seconds without any progress until the wait for an empty pipeline ends; longer than a lease."""
TELL_AFTER, TELL_EVERY = 5.0, 10.0
QUIET = 0.5
"""Seconds that nothing may come any more before the pipeline counts as empty."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What went missing between two steps; ``ids`` of orders or events, at most 1000."""

    what: str
    count: int
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """Figures after the end of the traffic."""

    figures: Figures
    sent_before: int
    losses: tuple[Loss, ...]
    applied_twice: int

    @property
    def lost(self) -> int:
        """Orders, events and deliveries that are gone."""
        return sum(loss.count for loss in self.losses)

    @property
    def waiting(self) -> int:
        """What is not lost, and has not arrived either."""
        tables = self.figures.tables
        return tables.unpublished + tables.open + self.figures.queue

    @property
    def good(self) -> bool:
        """Nothing lost, nothing applied twice, nothing stuck."""
        return not self.lost and not self.applied_twice and not self.waiting and not self.figures.problem


def is_empty(figures: Figures) -> bool:
    """Whether nothing is on its way any more."""
    tables = figures.tables
    return not (tables.unpublished or tables.open or figures.queue or figures.problem)


def on_the_way(figures: Figures) -> str:
    """What has not arrived, in words."""
    tables = figures.tables
    return (
        f"{tables.unpublished} events in the outbox, {figures.queue} messages in the queue, "
        f"{tables.pending} deliveries pending, {tables.claimed} claimed"
    )


def run_empty(sampler: Sampler, say: Callable[[str], None], patience: float = PATIENCE) -> Figures:
    """Wait until all that was written has arrived, for as long as there is progress; return the last figures.

    The first signal does not end this wait: it is what the first signal asks for. The second one does.
    """
    last_progress, before = time.monotonic(), None
    tell_at = last_progress + TELL_AFTER
    quiet_since: float | None = None
    while True:
        figures = sampler.take(fresh=True)
        now = time.monotonic()
        quiet_since = (quiet_since or now) if is_empty(figures) else None
        tables = figures.tables
        progress = (tables.published, tables.accepted, tables.open, tables.written, figures.queue)
        if progress != before:
            last_progress, before, quiet_since = now, progress, now if quiet_since else None
        if quiet_since is not None and now - quiet_since >= QUIET:
            return figures
        if now - last_progress >= patience:
            return figures
        if now >= tell_at:
            tell_at = now + TELL_EVERY
            say(f"still on its way: {on_the_way(figures)}")
        time.sleep(0.25)


def draw_up(stack: Stack, sampler: Sampler, figures: Figures) -> Account:
    """Look for what was lost. Raises psycopg.Error."""
    questions = (
        ("orders without an event", sql.ORDERS_WITHOUT_EVENT, ()),
        ("events published, and never applied", sql.PUBLISHED_NOT_APPLIED, (CONSUMER,)),
        ("applied orders without a delivery", sql.APPLIED_WITHOUT_DELIVERY, (CONSUMER,)),
        ("applied events without their effect", sql.APPLIED_NOT_NOTIFIED, (CONSUMER,)),
    )
    losses = []
    for what, statement, arguments in questions:
        ids = tuple(sampler.ids(statement, *arguments))
        # What still stands in the queue was published and is not lost; the queue does not say which it is.
        count = len(ids) - (figures.queue if statement is sql.PUBLISHED_NOT_APPLIED else 0)
        if count > 0:
            losses.append(Loss(what, count, ids))
    sent = figures.tables.sent - stack.sent_before
    arrived = figures.delivered - figures.delivered_again
    if sent > arrived:
        losses.append(Loss("deliveries called sent that no device got", sent - arrived))
    return Account(figures, stack.sent_before, tuple(losses), len(sampler.ids(sql.APPLIED_TWICE)))


def lines(account: Account) -> Iterator[str]:
    """The account in words."""
    figures, tables = account.figures, account.figures.tables
    twice = f"{account.applied_twice} APPLIED TWICE" if account.applied_twice else "none twice"
    yield f"orders         {tables.orders} placed, {tables.notified} notified, {twice}"
    yield (
        f"events         {tables.written} written, {tables.published} published, {tables.quarantined} in quarantine, "
        f"duplicates: {figures.received_again} (the broker handed out {figures.received} messages)"
    )
    yield f"consumer       {tables.accepted} applied, each once; {figures.queue} in the queue"
    yield (
        f"deliveries     {tables.sent} sent, {tables.failed} failed, {tables.expired} expired, "
        f"{tables.superseded} superseded, {tables.open} open"
    )
    yield (
        f"pushes         {figures.pushes} came to APNs, {figures.delivered} to devices, "
        f"doubled: {figures.delivered_again}; fenced writes: {figures.stale}"
    )
    yield f"device tokens  {tables.dead_tokens} found dead, {tables.dead_home} reported home to the shop"
    if account.sent_before:
        yield "               (the tables' figures are those of all runs in this folder)"
    if figures.problem:
        yield f"INCOMPLETE     {figures.problem}"
    if account.waiting:
        yield f"NOT EMPTY      {on_the_way(figures)}: not lost, and not there yet"
    yield f"lost: {account.lost}"
    for loss in account.losses:
        some = f": {', '.join(loss.ids[:3])}{', …' if len(loss.ids) > 3 else ''}" if loss.ids else ""
        yield f"  {loss.count} {loss.what}{some}"
