"""Trace 1: a relay is killed in the middle of a batch."""

from __future__ import annotations

from deploy.live import sql
from deploy.live.drill import Drill, NotAsPromised
from deploy.live.role import named, start_all
from deploy.live.stack import CONSUMER, EXCHANGE
from deploy.local.amqp_gate import PublishGate
from deploy.local.proxy import SilentProxy

BATCH, PASSED = 100, 40
QUIET = 0.5
"""Seconds in which a message too many would show."""


def relay_crash(drill: Drill) -> None:
    """a relay dies in the middle of a batch; its transaction dies with it, and nothing is lost."""
    stack = drill.stack
    for role in stack.relays:
        role.stop()
    ids = drill.place_orders(BATCH)
    stack.tap.watch(ids)
    drill.tell(
        f"no relay runs; {BATCH} orders are placed in one transaction: {len(ids)} events in the outbox"
    )
    crash(drill, ids)
    recover(drill, ids)


def crash(drill: Drill, ids: list[str]) -> None:
    """Let one relay claim the rows, publish a part of them, and die."""
    stack = drill.stack
    gate = PublishGate(PASSED, EXCHANGE)
    with SilentProxy(stack.rabbit.port) as way:
        way.change("to_server", gate)
        victim = stack.relay("relay-victim", RELAY_AMQP_URL=way.rewrite(stack.rabbit.url), RELAY_LANES="1")
        daemon = victim.start()
        drill.tell(
            f"relay-victim (pid {daemon.pid}) starts; its way to the broker lets {PASSED} publishes through, "
            "then no byte more"
        )
        drill.until(f"{PASSED} publishes at the gate", gate.reached.is_set)
        drill.until(f"{PASSED} messages at the broker", lambda: received(drill) >= PASSED)
        drill.expect("rows claimed", BATCH, BATCH - drill.count(sql.UNLOCKED_EVENTS, ids))
        drill.expect("messages that reached the broker", PASSED, received(drill))
        victim.kill()
        drill.expect("SIGKILL; exit code of relay-victim", -9, daemon.returncode)
    drill.expect("rows with published_at", 0, drill.count(sql.PUBLISHED, ids))
    drill.until(
        "the locks of the dead relay are gone", lambda: drill.count(sql.UNLOCKED_EVENTS, ids) == BATCH
    )
    drill.tell(f"PostgreSQL rolled back: all {BATCH} rows are free again, no lease and nobody to clean up")
    drill.until(
        f"the consumer applied what arrived: {PASSED}",
        lambda: drill.count(sql.APPLIED, ids, CONSUMER) == PASSED,
    )
    drill.tell(f"the consumer has applied the {PASSED} events that arrived")


def recover(drill: Drill, ids: list[str]) -> None:
    """Start the relays again, and count what came of the batch."""
    stack = drill.stack
    start_all(stack.relays)
    drill.tell(f"the next relay: {named(stack.relays)}, on the way as it is")
    drill.until("all rows published", lambda: drill.count(sql.PUBLISHED, ids) == BATCH)
    drill.tell(f"it published all {BATCH}: each row has published_at now")
    drill.until("all events applied", lambda: drill.count(sql.APPLIED, ids, CONSUMER) == BATCH)
    drill.until("the second copies too", lambda: received(drill) >= BATCH + PASSED)
    drill.until("the queue is empty", lambda: stack.queue_depth() == 0)
    drill.rest(QUIET)
    watched = dict(stack.tap.watched)
    drill.expect("messages that the broker received", BATCH + PASSED, sum(watched.values()))
    drill.expect("distinct event_ids among them", BATCH, len(watched))
    drill.expect("events that the consumer applied", BATCH, drill.count(sql.APPLIED, ids, CONSUMER))
    times, orders = drill.sampler.rows(sql.TIMES_APPLIED, ids)[0]
    drill.expect("orders that were notified", BATCH, orders)
    drill.expect("times that each was applied", 1, times)
    rows = drill.sampler.rows(sql.DELIVERIES, ids)
    drill.expect("deliveries in the ledger, one for each order", BATCH, len(rows))
    if not rows:
        raise NotAsPromised("no delivery at all")


def received(drill: Drill) -> int:
    """Messages of this drill's events that the broker handed out."""
    return sum(dict(drill.stack.tap.watched).values())
