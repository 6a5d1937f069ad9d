"""The labels of an outcome, which rules of Prometheus select by."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from drain.apns.answers import reason_class
from drain.apns.model import Answered
from drain.decide import before_push
from drain.metrics import REASON_CLASSES
from drain.model import Delivery

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def delivery(token_dead_since: datetime | None) -> Delivery:
    return Delivery(
        id=1,
        claim_version=1,
        notification_id=uuid4(),
        event_id=uuid4(),
        app="shop",
        device_token="ab" * 32,
        registered_at=None,
        push_type="alert",
        priority=None,
        collapse_id=None,
        expires_at=None,
        payload="{}",
        coalesce_key=None,
        headers="{}",
        attempts=1,
        created_at=NOW,
        last_reason=None,
        claimed_at=NOW,
        due_at=NOW,
        reclaimed=False,
        token_dead_since=token_dead_since,
    )


def test_a_row_to_a_dead_token_counts_as_the_answer_that_killed_the_token() -> None:
    """DeadNotificationsGrowing leaves these out: people uninstall apps."""
    known = before_push(delivery(NOW), max_attempts=8, superseded=False, sibling_in_flight=False)
    told = reason_class(Answered(410, "Unregistered", None, None, 0.1))
    assert known is not None
    assert known.reason_class == told == "token_dead"
    assert known.reason_class in REASON_CLASSES
