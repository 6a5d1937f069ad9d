"""What a claim returns: rows that are locked until the end of the transaction."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from relay.model import OutboxRow

COLUMNS = len(OutboxRow._fields)
SWEEP_SHARE = 20
"""A look from the beginning is due again after so many times the time that the last one wasted: a twentieth of a
lane's time at most."""


class Source(enum.Enum):
    """The ways for a row to be claimed; each has its own index (relay/sql.py)."""

    FRESH = "fresh"
    KEYED = "keyed"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Batch:
    """Claimed rows, locked until the end of the transaction.

    ``suspects`` failed before: they are sent one at a time, so that one that closes the channel harms no other.
    ``more`` says that the source may have more right now.
    """

    source: Source
    rows: list[OutboxRow] = field(default_factory=list)
    suspects: list[OutboxRow] = field(default_factory=list)
    more: bool = False

    def __len__(self) -> int:
        return len(self.rows) + len(self.suspects)


def split(source: Source, rows: list[OutboxRow], more: bool) -> Batch:
    """Set the rows apart that failed before."""
    return Batch(
        source,
        rows=[row for row in rows if row.attempts == 0],
        suspects=[row for row in rows if row.attempts > 0],
        more=more,
    )
