"""One run of pruning by hand: the daemon's statement, lock and batches, with a count first and progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import asyncpg

from common.cli import Command, CommandFailed, Step
from common.prune import prune_batch
from common.schema import qualify
from common.text import age, rows

LOCK_PATIENCE = 30.0
"""Seconds to wait for another process that prunes; a daemon holds the lock for one batch only."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """What one run deletes. Both statements take the age in seconds; ``delete`` takes the rows of a batch too."""

    what: str
    count: str
    delete: str
    key: int
    seconds: float


async def prune(command: Command, prunings: list[Pruning], yes: bool, batch: int) -> int:
    """State what is old enough, ask, and delete it."""
    async with command.database() as connection:
        counted = time.monotonic()
        counts = [await connection.fetchval(qualify(p.count, command.schema), p.seconds) for p in prunings]
    for pruning, count in zip(prunings, counts, strict=True):
        command.say(f"delete {rows(count)}: {pruning.what}, older than {age(pruning.seconds)}")
    if not any(counts):
        command.say("nothing to do")
        return 0
    await command.confirm(f"delete {rows(sum(counts))}?", yes)
    for pruning, count in zip(prunings, counts, strict=True):
        if count:
            deleted = await command.write("deleted", count, step(pruning, command.schema, batch, counted))
            command.say(f"deleted {rows(deleted)}: {pruning.what}")
    return 0


def step(pruning: Pruning, schema: str, batch: int, counted: float) -> Step:
    """Return the step that deletes one batch. The bound stays where it was when the rows were counted."""
    delete = qualify(pruning.delete, schema)
    give_up = time.monotonic() + LOCK_PATIENCE

    async def delete_batch(connection: asyncpg.Connection) -> tuple[int, bool]:
        nonlocal give_up
        seconds = pruning.seconds + time.monotonic() - counted
        deleted = await prune_batch(connection, pruning.key, delete, seconds, batch)
        if deleted is not None:
            give_up = time.monotonic() + LOCK_PATIENCE
            return deleted, deleted == batch
        if time.monotonic() > give_up:
            raise CommandFailed(f"another process has been pruning for {LOCK_PATIENCE:g} s: try again later")
        await asyncio.sleep(0.05)
        return 0, True

    return delete_batch
