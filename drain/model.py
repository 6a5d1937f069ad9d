"""The values that travel through drain: a claimed row, and what is written about it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

Status = Literal["pending", "sent", "failed", "expired", "superseded"]

NO_EXPIRY_STORAGE = 0
"""expires_at at the epoch: apns-expiration 0, one attempt by APNs, nothing stored; it does not expire the row."""


class Delivery(NamedTuple):
    """One claimed row. Field order is the order of the claim's RETURNING; a tuple, for it is made for every push."""

    id: int
    claim_version: int
    notification_id: UUID
    event_id: UUID
    app: str
    device_token: str
    registered_at: datetime | None
    push_type: str
    priority: int | None
    collapse_id: str | None
    expires_at: datetime | None
    payload: str
    coalesce_key: str | None
    headers: str
    attempts: int
    created_at: datetime
    last_reason: str | None
    claimed_at: datetime
    """The database's clock at the claim."""
    due_at: datetime
    reclaimed: bool
    """The row was claimed before and its lease ran out: somebody died or froze."""
    token_dead_since: datetime | None


class Settlement(NamedTuple):
    """What is written about one claimed row, under its fencing token. A tuple, as Delivery is."""

    delivery: Delivery
    status: Status
    label: str
    """Outcome for metrics, one of drain.metrics.OUTCOMES."""
    reason_class: str
    reason: str | None = None
    http_status: int | None = None
    delay: float | None = None
    """Seconds until due again, for pending; None leaves next_attempt_at."""
    give_back: bool = False
    """The attempt is not counted: nothing was tried, or it was not the row's fault."""
    token_dead: bool = False
    dead_since: datetime | None = None
