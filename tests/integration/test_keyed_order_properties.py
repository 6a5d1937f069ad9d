"""Random interleavings of three lanes on one database: claims, sends, failures, crashes, releases, passes and none."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import asyncpg
import pytest

from relay.batch import Source
from relay.claim import Claimer
from relay.mark import Marker, RetryPolicy, decide
from relay.model import PUBLISHED, Failed, Left, Nacked, OutboxRow, Verdict

SCHEMA = "relay_drain"
POLICY = RetryPolicy(max_attempts=2, base=0.001, cap=0.001, nack_delay=0.001)


@dataclass
class World:
    """What the broker has, in the order in which it came, and what is claimed now."""

    sent: list[tuple[str, int]] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)

    def first_of(self) -> dict[str, list[int]]:
        seen: set[int] = set()
        first: dict[str, list[int]] = defaultdict(list)
        for key, row_id in self.sent:
            if row_id not in seen:
                seen.add(row_id)
                first[key].append(row_id)
        return first


class Lane:
    """One lane that is advanced by hand: claim, send, end."""

    def __init__(
        self, name: str, world: World, connection: asyncpg.Connection, chance: random.Random
    ) -> None:
        self.name, self.world, self.connection, self.chance = name, world, connection, chance
        self.claimer = Claimer(SCHEMA, 6, 60.0)
        self.claimer.keyed.after = chance.choice(("", "k1", "k3"))
        self.rows: list[OutboxRow] | None = None

    async def step(self) -> None:
        if self.rows is None:
            await self.claim()
        else:
            await self.send_and_end()

    async def claim(self) -> None:
        # Passes come when the test says; else every claim is one of new rows.
        self.claimer.keyed.pass_at = self.chance.choice((0.0, math.inf, math.inf))
        await self.connection.execute("BEGIN")
        batch = await self.claimer.claim(self.connection, Source.KEYED)
        self.rows = [*batch.rows, *batch.suspects]
        for row in self.rows:
            assert row.id not in self.world.held, f"row {row.id} is claimed twice"
            self.world.held[row.id] = self.name
        if not self.rows:
            await self.connection.execute("ROLLBACK")
            self.rows = None

    async def send_and_end(self) -> None:
        assert self.rows is not None
        halted: set[str] = set()
        verdicts: list[Verdict] = []
        dies = self.chance.random() < 0.15
        for row in self.rows:
            key = str(row.ordering_key)
            if key in halted:
                verdicts.append(Left(f"behind a row of {key}"))
                continue
            verdict = self.chance.choices(
                (PUBLISHED, Failed("bad"), Nacked("full"), Left("silent")), weights=(20, 1, 1, 1)
            )[0]
            verdicts.append(verdict)
            if verdict is PUBLISHED or isinstance(verdict, Left):
                self.world.sent.append((key, row.id))  # a row without a confirm may have arrived
            if verdict is not PUBLISHED:
                halted.add(key)
                if isinstance(verdict, Left) and self.chance.random() < 0.5:
                    self.world.sent.pop()
        if dies:
            await self.connection.execute("ROLLBACK")
            self.claimer.forget()
        else:
            await Marker(SCHEMA).write(self.connection, decide(self.rows, verdicts, POLICY))
            await self.connection.execute("COMMIT")
        for row in self.rows:
            del self.world.held[row.id]
        self.rows = None


@pytest.mark.parametrize("seed", range(4))
async def test_no_interleaving_brings_a_row_before_the_one_ahead_of_it(database, seed):
    chance, world = random.Random(seed), World()
    connections = [await database.connect() for _ in range(4)]
    *own, producer = connections
    try:
        lanes = [Lane(f"lane-{n}", world, connection, chance) for n, connection in enumerate(own)]
        for _ in range(250):
            await producer.execute(
                f"SELECT {SCHEMA}.enqueue_event('order', '1', 'e', '{{}}'::jsonb, ordering_key => $1)",
                f"k{chance.randrange(5)}",
            )
            if chance.random() < 0.05:
                await producer.execute(
                    f"UPDATE {SCHEMA}.outbox SET quarantined_at = NULL, attempts = 0, next_attempt_at = now() "
                    "WHERE quarantined_at IS NOT NULL"
                )
            for _ in range(chance.randrange(3)):
                await chance.choice(lanes).step()
        for lane in lanes:
            if lane.rows is not None:
                await lane.send_and_end()
        while await producer.fetchval(f"SELECT count(*) FROM {SCHEMA}.outbox WHERE published_at IS NULL"):
            await producer.execute(
                f"UPDATE {SCHEMA}.outbox SET quarantined_at = NULL WHERE quarantined_at IS NOT NULL"
            )
            await chance.choice(lanes).step()
        for lane in lanes:
            if lane.rows is not None:
                await lane.send_and_end()
    finally:
        for connection in connections:
            await connection.close()
    first = world.first_of()
    assert sum(len(ids) for ids in first.values()) == 250
    for key, ids in first.items():
        wrong = [(a, b) for a, b in itertools.pairwise(ids) if b < a]
        assert not wrong, f"{key}: {wrong}"
