"""No push at or past expires_at: not after a wait for a stream, and not after a slow claim."""

from __future__ import annotations

from collections import deque

import pytest

from drain.apns.flight import Flight
from drain.apns.model import NotSent, Push, Reply, SessionLimits
from drain.apns.streams import Streams

ENQUEUE = "SELECT {schema}.enqueue_delivery('shop', $1, '{\"aps\": {}}'::jsonb"
ROW = "SELECT * FROM {schema}.notification_deliveries WHERE device_token = $1"


def token(n: int) -> str:
    return f"{n:064x}"


async def ended(database, device: str) -> tuple[object, ...]:
    await database.until(
        "SELECT finished_at IS NOT NULL FROM {schema}.notification_deliveries WHERE device_token = $1", device
    )
    row = (await database.fetch(ROW, device))[0]
    return row["status"], row["attempts"], row["last_reason"]


async def test_a_row_that_expires_while_it_waits_for_a_stream_is_not_pushed(
    database, simulator_factory, drain
):
    """It ends as expired by the drain that holds it; given back, it would be claimed once more to learn that."""
    apns = simulator_factory("--set", "max_concurrent_streams=1")
    apns.control.next_requests(1, "hold")
    daemon = drain(DRAIN_CONNECTIONS=1, simulator=apns)
    await database.fetch(ENQUEUE + ")", token(1))
    await apns.control.until(requests=1)
    await database.fetch(ENQUEUE + ", expires_at => now() + interval '1.5 seconds')", token(2))
    assert await ended(database, token(2)) == ("expired", 0, "Expired")
    assert await database.fetchval(
        "SELECT finished_at >= expires_at - interval '0.3 seconds' FROM {schema}.notification_deliveries WHERE id = 2"
    ), "ended long before it was late"
    version = await database.fetchval(
        "SELECT claim_version FROM {schema}.notification_deliveries WHERE id = 2"
    )
    assert version == 1
    apns.control.release()
    assert await ended(database, token(1)) == ("sent", 1, None)
    assert apns.control.stats()["requests"] == 1
    assert (
        daemon.metrics().value("drain_outcomes_total", app="shop", outcome="expired", reason_class="drain")
        == 1
    )
    assert daemon.stop() == 0


async def test_a_row_that_expires_between_its_claim_and_its_push_is_not_pushed(
    database, simulator, drain, proxy
):
    """A slow database: what was left at the claim is not what is left when the look at the siblings came back."""
    way = proxy(database.admin.port)
    daemon = drain(DATABASE_URL=database.through(way.port))
    way.delay(0.3, "to_client")
    await database.fetch(
        ENQUEUE + ", expires_at => now() + interval '4 seconds', coalesce_key => 'k')", token(1)
    )
    await database.until("SELECT status = 'claimed' FROM {schema}.notification_deliveries")
    way.stall("to_client")
    assert await database.fetchval("SELECT expires_at > now() FROM {schema}.notification_deliveries")
    await database.until("SELECT now() > expires_at FROM {schema}.notification_deliveries")
    way.forward()
    assert await ended(database, token(1)) == ("expired", 0, "Expired")
    assert simulator.control.stats()["requests"] == 0
    assert daemon.stop() == 0


class Told:
    """The session and the connection of a Streams: remembers the replies."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def finished(self, flight: Flight, reply: Reply) -> None:
        self.replies.append(reply)


@pytest.mark.parametrize(("start_by", "taken"), [(99.999, 0), (100.0, 0), (100.001, 1)])
def test_a_push_starts_before_its_time_and_not_at_it(start_by: float, taken: int) -> None:
    told = Told()
    streams = Streams(told, told, "localhost", SessionLimits(), 0.0)  # type: ignore[arg-type]
    push = Push("6f1c2a3b-0000-4000-8000-abcdef012345", "ab" * 32, "t", "alert", None, None, None, b"{}")
    queue = deque([Flight(push, start_by, lambda *_: None)])
    assert streams.take_from(queue, 1, 100.0, None, False) == taken
    assert not queue
    assert told.replies == ([] if taken else [NotSent("no free stream in time")])
