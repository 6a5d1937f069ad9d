"""The rows that a command will touch: read once, stated, and then written by their ids.

What is written is what was stated: rows that come meanwhile are not touched, rows that changed meanwhile fail the
check in the write.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg

from common.cli import Step

FETCH = 5000
"""Rows of one round trip."""


class Selection:
    """The rows that a command will touch: their ids, and how many there are of each group."""

    def __init__(self) -> None:
        self.ids: array[int] = array("q")
        self.groups: Counter[tuple[Any, ...]] = Counter()
        self.left = 0
        """Rows that fit and must not be touched now."""

    def __len__(self) -> int:
        return len(self.ids)

    def steps(self, statement: str, size: int, *arguments: Any) -> Step:
        """Return the step that writes them in id order. ``statement`` takes a list of ids as $1, checks again that
        a row is as it was selected, and returns one number: the rows written."""
        ids = array("q", sorted(self.ids))
        position = 0

        async def step(connection: asyncpg.Connection) -> tuple[int, bool]:
            nonlocal position
            part = ids[position : position + size].tolist()
            written = await connection.fetchval(statement, part, *arguments)
            position += size
            return int(written), position < len(ids)

        return step


async def select(
    connection: asyncpg.Connection,
    statement: str,
    arguments: Sequence[Any],
    group: Callable[..., tuple[Any, ...]],
) -> Selection:
    """Read the id (first column) and the group of every row that a statement returns, 8 bytes for each row.

    A row without an id must not be touched now: it is counted in ``left`` alone.

    Args:
        group: makes the group of the other columns; all rows of a group are counted together.
    """
    selection = Selection()
    async with connection.transaction(readonly=True):
        # SQL's cursor, not the driver's: that one needs a named prepared statement, which stays behind in a session
        # of pgbouncer's in transaction mode. It is planned for these parameters (conditions on null ones fold away),
        # and for all rows instead of the first tenth.
        await connection.execute("SET LOCAL cursor_tuple_fraction = 1")
        await connection.execute(f"DECLARE selection NO SCROLL CURSOR FOR {statement}", *arguments)
        while records := await connection.fetch(f"FETCH {FETCH} FROM selection"):
            chosen = [record for record in records if record[0] is not None]
            selection.left += len(records) - len(chosen)
            selection.ids.extend(record[0] for record in chosen)
            selection.groups.update(group(*list(record)[1:]) for record in chosen)
    return selection
