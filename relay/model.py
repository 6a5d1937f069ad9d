"""The values that travel through the relay: one claimed row of the outbox, and what became of it.

`OutboxRow` is what the claim reads and the publisher sends. `Verdict` is the closed union of what can
happen to a row; the mark matches it with `assert_never`. Whose fault each one is, and therefore what is
written on the row, is the last table of the AMQP notes (`docs/relay.md`, "A batch's faults").
"""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias
from uuid import UUID


class OutboxRow(NamedTuple):
    """One claimed row. Field order is the column order of the claim: `OutboxRow(*record)`.

    A named tuple, for one is made for every message: a frozen dataclass of 13 fields takes four times as long,
    which is a twentieth of what a message may cost.
    """

    id: int
    event_id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    exchange: str | None  # None: the configured exchange
    routing_key: str | None  # None: the event type
    ordering_key: str | None  # None: unordered
    body: bytes  # payload as UTF-8 JSON text, or payload_bytes as it is
    content_type: str
    headers: str  # the text of a JSON object, as jsonb prints it; '{}' when there are none
    created_at: datetime  # aware
    attempts: int


@dataclass(frozen=True, slots=True)
class Published:
    """The broker confirmed the message: the row is marked in the claim's transaction."""


@dataclass(frozen=True, slots=True)
class Unroutable:
    """The exchange exists, no queue took the message. The row's fault: attempts + 1, backoff."""

    error: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The broker refused this very message (missing exchange, access, size). The row's fault."""

    error: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Found before anything was sent: this row can never be sent as it is. Quarantined at once."""

    error: str


@dataclass(frozen=True, slots=True)
class Nacked:
    """A queue refused it (full, rejecting). The row backs off and no attempt is burnt."""

    error: str


@dataclass(frozen=True, slots=True)
class Left:
    """Not confirmed, through the fault of the broker or of time. The row is not touched."""

    why: str


Verdict: TypeAlias = Published | Unroutable | Failed | Rejected | Nacked | Left

# One instance serves all rows: a verdict without fields carries nothing of its row.
PUBLISHED = Published()
