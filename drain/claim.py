"""Claims: the one UPDATE that takes a lease on due rows, and the look at their siblings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from common.database import Database
from common.schema import qualify
from drain import sql
from drain.model import Delivery

BEGINNING = datetime.min.replace(tzinfo=UTC)
"""asyncpg sends this as -infinity."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Claimed rows with the local end of their lease.

    ``until`` is loop time, measured from before the claim was sent: it can only be earlier than the database's.
    """

    deliveries: list[Delivery]
    until: float


class Claimer:
    """Claims for all apps in one statement. Its cursors are hints that save work; losing them loses nothing.

    Args:
        lease: seconds.
        claimed_by: name of this process, for people.
        sweep_interval: seconds after which an app's rows are read from the earliest again, for rows that became
            due below the cursor and committed late.
    """

    def __init__(
        self, database: Database, schema: str, lease: float, claimed_by: str, sweep_interval: float
    ) -> None:
        self._database = database
        self._claim = qualify(sql.CLAIM, schema)
        self._check = qualify(sql.CHECK_SIBLINGS, schema)
        self._lease = lease
        self._claimed_by = claimed_by
        self._sweep_interval = sweep_interval
        self._cursors: dict[str, datetime] = {}
        self._sweep_at: dict[str, float] = {}

    async def claim(self, slots: Mapping[str, int]) -> Lease:
        """Claim up to so many due rows of each app. Committed when it returns; holds no connection after.

        A crash after the commit leaves the rows claimed until their lease runs out.
        """
        now = asyncio.get_running_loop().time()
        for app in slots:
            if now >= self._sweep_at.get(app, 0.0):
                self._sweep_at[app] = now + self._sweep_interval
                self._cursors.pop(app, None)
        async with self._database.connection() as connection:
            records = await connection.fetch(
                self._claim,
                list(slots),
                list(slots.values()),
                [self._cursors.get(app, BEGINNING) for app in slots],
                self._lease,
                self._claimed_by,
            )
        deliveries = sorted((Delivery(*record) for record in records), key=lambda row: (row.due_at, row.id))
        for delivery in deliveries:
            self._cursors[delivery.app] = delivery.due_at
        return Lease(deliveries, until=now + self._lease)

    async def check_siblings(self, deliveries: Sequence[Delivery]) -> tuple[set[int], set[int]]:
        """Look at the other rows with the same coalesce_key on the same device.

        Returns:
            ids that a newer row supersedes, and ids that must wait for an older row in flight.
        """
        keyed = [delivery for delivery in deliveries if delivery.coalesce_key is not None]
        if not keyed:
            return set(), set()
        async with self._database.connection() as connection:
            records = await connection.fetch(
                self._check,
                [delivery.id for delivery in keyed],
                [delivery.app for delivery in keyed],
                [delivery.device_token for delivery in keyed],
                [delivery.coalesce_key for delivery in keyed],
            )
        superseded = {record["id"] for record in records if record["superseded"]}
        waiting = {record["id"] for record in records if record["sibling_in_flight"]}
        return superseded, waiting - superseded
