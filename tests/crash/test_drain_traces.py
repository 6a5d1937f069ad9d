"""Traces 2 and 3 of the design: drain killed mid-send, and the zombie. Real processes, SIGKILL and SIGSTOP."""

from __future__ import annotations

import asyncio

ROWS, PUSHED = 50, 12
# A lease short enough to be outlived for real; the smallest that the settings' own rules allow here.
SHORT_LEASE = {
    "DRAIN_LEASE": 8,
    "DRAIN_GRACE": 7,
    "DRAIN_DRAIN_DEADLINE": 0.7,
    "DRAIN_FLUSH_DEADLINE": 0.7,
    "DRAIN_PUSH_TIMEOUT": 3,
    "DRAIN_SETTLE_MARGIN": 3,
    "DATABASE_COMMAND_TIMEOUT": 3,
}


async def expire_leases(database) -> None:
    """Move the lease instead of sleeping through it."""
    await database.fetch(
        "UPDATE {schema}.notification_deliveries SET next_attempt_at = now() WHERE status = 'claimed'"
    )


async def test_drain_killed_mid_send_doubles_at_most_what_was_in_flight(database, simulator, drain):
    control = simulator.control
    control.script([{"do": "pass", "times": PUSHED}, {"do": "hold"}], end="repeat_last")
    await database.enqueue_deliveries(ROWS, more="collapse_id => 'c' || n")
    victim = drain(DRAIN_CLAIM_SIZE=ROWS)
    await control.until(requests=ROWS, timeout=20)
    await database.until(
        "SELECT count(*) = $1 FROM {schema}.notification_deliveries WHERE status = 'sent'", PUSHED
    )
    before = await database.fetch(
        "SELECT * FROM {schema}.notification_deliveries WHERE status = 'sent' ORDER BY id"
    )
    victim.kill()

    claimed = await database.fetch("SELECT * FROM {schema}.notification_deliveries WHERE status = 'claimed'")
    assert len(claimed) == ROWS - PUSHED
    assert await database.fetchval(
        "SELECT min(next_attempt_at) > now() + interval '60 seconds' FROM {schema}.notification_deliveries "
        "WHERE status = 'claimed'"
    )
    async with asyncio.timeout(10):
        while database.sessions("drain"):
            await asyncio.sleep(0.05)
    await database.fetch("SELECT FROM {schema}.notification_deliveries FOR UPDATE NOWAIT")

    control.clear_scripts()
    survivor = drain()
    await survivor.seen("started")
    await asyncio.sleep(1.0)
    assert control.stats()["requests"] == ROWS, "a live lease was not respected"
    await expire_leases(database)
    await database.until(
        "SELECT count(*) = $1 FROM {schema}.notification_deliveries WHERE status = 'sent'", ROWS
    )
    assert survivor.stop() == 0

    stats = control.stats()
    assert stats["requests"] == ROWS + (ROWS - PUSHED)
    assert set(control.repeated()) == {str(row["notification_id"]) for row in claimed}
    assert all(row["requests"] == 2 for row in control.repeated().values())
    after = await database.fetch(
        "SELECT * FROM {schema}.notification_deliveries WHERE id = ANY($1::bigint[]) ORDER BY id",
        [row["id"] for row in before],
    )
    assert after == before, "rows that were terminal were touched"
    for row in claimed:
        assert len(control.device(row["device_token"])["shown"]) == 1, "the double is visible on the device"
    attempts = await database.fetch(
        "SELECT DISTINCT attempts, claim_version FROM {schema}.notification_deliveries WHERE id = ANY($1::bigint[])",
        [row["id"] for row in claimed],
    )
    assert [tuple(row) for row in attempts] == [(2, 2)]


async def test_zombies_late_outcome_matches_no_row_and_is_counted(database, simulator, drain):
    control = simulator.control
    control.always("hold")
    await database.enqueue_deliveries(1)
    zombie = drain(INSTANCE="zombie")
    await control.until(requests=1)
    zombie.pause()
    await expire_leases(database)
    control.clear_scripts()
    second = drain(INSTANCE="second")
    await database.until("SELECT status = 'sent' FROM {schema}.notification_deliveries")
    row = (await database.fetch("SELECT * FROM {schema}.notification_deliveries"))[0]
    assert (row["claimed_by"], row["claim_version"], row["attempts"]) == ("second", 2, 2)
    assert second.metrics().sum("drain_reclaimed_total") == 1

    control.release()  # the answer to the zombie's push
    zombie.resume()
    await zombie.seen("outcomes_stale")
    assert zombie.metrics().value("drain_stale_outcomes_total") == 1
    assert (await database.fetch("SELECT * FROM {schema}.notification_deliveries"))[0] == row
    assert zombie.stop() == 0
    assert second.stop() == 0


async def test_a_drain_that_outlived_its_lease_starts_no_push_on_it(database, simulator_factory, drain):
    """One stream: one push is on the wire, nine wait in the process. Then it is frozen past the lease."""
    simulator = simulator_factory("--set", "max_concurrent_streams=1")
    control = simulator.control
    control.always("hold")
    await database.enqueue_deliveries(10)
    zombie = drain(simulator=simulator, INSTANCE="zombie", DRAIN_CONNECTIONS=1, **SHORT_LEASE)
    await control.until(requests=1)
    zombie.pause()
    await database.until(
        "SELECT count(*) = 10 FROM {schema}.notification_deliveries "
        "WHERE status = 'claimed' AND next_attempt_at < now()"
    )
    assert control.stats()["requests"] == 1

    control.clear_scripts()
    control.release()
    second = drain(simulator=simulator, INSTANCE="second", **SHORT_LEASE)
    await database.until("SELECT count(*) = 10 FROM {schema}.notification_deliveries WHERE status = 'sent'")
    assert control.stats()["requests"] == 11
    zombie.resume()
    await zombie.seen("outcomes_stale")
    await asyncio.sleep(0.5)
    assert control.stats()["requests"] == 11, "the zombie pushed on a dead lease"
    # All ten of its late writes, nine of them giving rows back, matched nothing.
    assert zombie.metrics().value("drain_stale_outcomes_total") == 10
    owners = await database.fetch(
        "SELECT DISTINCT claimed_by, status, attempts FROM {schema}.notification_deliveries"
    )
    assert [tuple(row) for row in owners] == [("second", "sent", 2)]
    assert zombie.stop() == 0
    assert second.stop() == 0
