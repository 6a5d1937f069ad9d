"""Traces 2 and 3: a drain is killed while its pushes are in flight; and one is frozen past its lease."""

from __future__ import annotations

from typing import Any

from deploy.live import sql
from deploy.live.drill import Drill, NotAsPromised
from deploy.live.role import Role, named, start_all
from deploy.live.stack import DRILL_LEASE

ROWS, ANSWERED = 50, 12
ZOMBIE_ROWS = 10
STREAMS = 1000
"""MAX_CONCURRENT_STREAMS of the simulator as it is by default."""
QUIET = 1.0
"""Seconds in which a push too many would show."""
MANY = 1_000_000


def drain_crash(drill: Drill) -> None:
    """a drain dies while its pushes are in flight; the leases run out, and the rows come back."""
    ids, requests = prepare(drill, ROWS)
    control = drill.stack.control
    control.script([{"do": "pass", "times": ANSWERED}, {"do": "hold"}], end="repeat_last")
    victim = drill.stack.drain("drain-victim", DRAIN_CLAIM_SIZE=str(ROWS))
    daemon = victim.start()
    drill.tell(
        f"drain-victim (pid {daemon.pid}) starts; APNs will answer {ANSWERED} of its pushes, then no more"
    )
    drill.until(f"{ROWS} pushes at APNs", lambda: pushes(drill) - requests >= ROWS)
    drill.until(f"{ANSWERED} rows sent", lambda: len(of(rows(drill, ids), "sent")) == ANSWERED)
    drill.expect("rows claimed", ROWS, len([row for row in rows(drill, ids) if row["claim_version"] == 1]))
    drill.expect("pushes that reached APNs", ROWS, pushes(drill) - requests)
    victim.kill()
    drill.expect("SIGKILL; exit code of drain-victim", -9, daemon.returncode)
    before = rows(drill, ids)
    finished, leased = of(before, "sent"), of(before, "claimed")
    drill.expect("rows that were settled before", ANSWERED, len(finished))
    drill.expect("rows that are still claimed", ROWS - ANSWERED, len(leased))
    drill.until("the dead drain's connections are gone", lambda: drill.count(sql.SESSIONS, "drain") == 0)
    drill.expect(
        "rows locked, connections held", (0, 0), (locked(drill, ids), drill.count(sql.SESSIONS, "drain"))
    )
    control.clear_scripts()
    respect_leases(drill, ids, requests + ROWS)
    drill.until("all rows sent", lambda: len(of(rows(drill, ids), "sent")) == ROWS)
    drill.tell(f"the leases ran out, and the {len(leased)} rows were claimed and pushed again")
    drill.rest(QUIET)
    doubled(drill, ids, before, requests)


def respect_leases(drill: Drill, ids: list[str], requests: int) -> None:
    """Start the drains while somebody else's leases hold, and see that they keep away until these run out."""
    start_all(drill.stack.drains)
    left = min((row["left"] for row in of(rows(drill, ids), "claimed")), default=0.0)
    drill.tell(f"other drains start: {named(drill.stack.drains)}; the leases hold for {left:.1f} s more")
    if left <= 1.0:
        drill.tell("they started too late to be tempted (a busy machine)")
        return
    drill.rest(left - 0.5)
    drill.expect("pushes on somebody else's lease", 0, pushes(drill) - requests)


def doubled(drill: Drill, ids: list[str], before: list[dict[str, Any]], requests: int) -> None:
    """Count what came twice: what was in flight, and no row that was finished."""
    finished, leased = of(before, "sent"), of(before, "claimed")
    after = {row["id"]: row for row in rows(drill, ids)}
    drill.expect("pushes in all", ROWS + len(leased), pushes(drill) - requests)
    repeated = drill.stack.control.repeated(MANY)
    flying = {row["notification_id"] for row in leased}
    again = {row["notification_id"] for row in before} & set(repeated)
    drill.expect("notifications pushed twice, of those in flight", len(flying), len(again & flying))
    drill.expect("notifications pushed twice, of those that were settled", 0, len(again - flying))
    shown = [seen for row in leased if (seen := on_screen(drill, row)) != 1]
    drill.expect("doubles that a device shows (apns-collapse-id)", 0, len(shown))
    touched = [row for row in finished if after[row["id"]]["whole"] != row["whole"]]
    drill.expect("finished rows that were touched", 0, len(touched))
    versions = {(after[row["id"]]["attempts"], after[row["id"]]["claim_version"]) for row in leased}
    drill.expect("(attempts, claim_version) of the rows that came back", {(2, 2)}, versions)


def zombie(drill: Drill) -> None:
    """a drain is frozen past its lease and wakes up; the fence drops all that it writes."""
    ids, requests = prepare(drill, ZOMBIE_ROWS)
    control = drill.stack.control
    control.configure(max_concurrent_streams=1)
    control.always("hold")
    frozen = drill.stack.drain("drain-zombie", DRAIN_CONNECTIONS="1")
    daemon = frozen.start()
    drill.until("a push at APNs", lambda: pushes(drill) - requests >= 1)
    mine = [row for row in rows(drill, ids) if row["claimed_by"] == "drain-zombie"]
    drill.expect(f"rows claimed by drain-zombie (pid {daemon.pid})", ZOMBIE_ROWS, len(mine))
    drill.expect("pushes on the wire (APNs allows one stream), the others wait", 1, pushes(drill) - requests)
    daemon.pause()
    left = max((row["left"] for row in rows(drill, ids)), default=0.0)
    drill.tell(f"SIGSTOP: drain-zombie is frozen; its leases end in {left:.1f} s, and nobody tells it")
    control.configure(max_concurrent_streams=STREAMS)
    control.clear_scripts()
    control.release()
    drill.tell("APNs answers the push that is on the wire; the frozen drain does not hear it")
    respect_leases(drill, ids, requests + 1)
    drill.until("all rows sent by another", lambda: len(of(rows(drill, ids), "sent")) == ZOMBIE_ROWS)
    drill.tell("the leases ran out, and another drain claimed the rows, pushed them and wrote the outcomes")
    before = rows(drill, ids)
    names = {role.name for role in drill.stack.drains}
    others = [row for row in before if row["claimed_by"] in names and row["claim_version"] == 2]
    drill.expect("rows that another drain claimed (claim_version 2) and sent", ZOMBIE_ROWS, len(others))
    drill.expect("pushes in all", ZOMBIE_ROWS + 1, pushes(drill) - requests)
    awake(drill, frozen, ids, before, requests)


def awake(drill: Drill, frozen: Role, ids: list[str], before: list[dict[str, Any]], requests: int) -> None:
    """Let the zombie go on, and see what its writes do."""
    daemon = frozen.daemon
    assert daemon is not None
    daemon.resume()
    drill.tell("SIGCONT: drain-zombie wakes up with ten rows in hand that are not its own any more")

    def stale() -> float:
        return daemon.metrics().sum("drain_stale_outcomes_total")

    try:
        drill.until("late writes of the zombie", lambda: stale() >= ZOMBIE_ROWS)
    except OSError as error:
        raise NotAsPromised(f"drain-zombie does not answer: {error}") from None
    drill.rest(QUIET)
    drill.expect("pushes that it started on its dead leases", 0, pushes(drill) - requests - ZOMBIE_ROWS - 1)
    drill.expect("late writes, all to zero rows (drain_stale_outcomes_total)", ZOMBIE_ROWS, int(stale()))
    changed = sum(new["whole"] != old["whole"] for new, old in zip(rows(drill, ids), before, strict=True))
    drill.expect("rows that it changed", 0, changed)
    drill.sampler.count_stale(daemon)
    drill.expect("SIGTERM; exit code of drain-zombie", 0, frozen.stop())


def prepare(drill: Drill, count: int) -> tuple[list[str], int]:
    """Stop the drains and let so many deliveries come into the ledger; return their event ids, and APNs' count."""
    for role in drill.stack.drains:
        role.stop()
    ids = drill.place_orders(count)
    drill.until(f"{count} deliveries", lambda: len(of(rows(drill, ids), "pending")) == count)
    drill.tell(
        f"no drain runs; {count} orders are placed, published and applied: {count} deliveries are pending. "
        f"The lease is {DRILL_LEASE:g} s here, 120 s by default"
    )
    return ids, pushes(drill)


def rows(drill: Drill, ids: list[str]) -> list[dict[str, Any]]:
    """The deliveries of these events as they are now, by id."""
    return drill.sampler.records(sql.DELIVERIES, ids)


def of(found: list[dict[str, Any]], status: str) -> list[dict[str, Any]]:
    """Those in one status."""
    return [row for row in found if row["status"] == status]


def locked(drill: Drill, ids: list[str]) -> int:
    """Rows that somebody holds a lock on."""
    return len(rows(drill, ids)) - drill.count(sql.UNLOCKED_DELIVERIES, ids)


def pushes(drill: Drill) -> int:
    """Pushes that came to APNs since the start."""
    return int(drill.stack.control.stats()["requests"])


def on_screen(drill: Drill, row: dict[str, Any]) -> int:
    """How often the device shows this notification."""
    shown = drill.stack.control.device(row["device_token"])["shown"]
    return sum(entry.get("apns_id") == row["notification_id"] for entry in shown)
