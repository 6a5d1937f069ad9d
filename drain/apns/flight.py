"""One push on its way: what is known of it between `submit` and its reply, and its form on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import orjson

from drain.apns.frames import Header
from drain.apns.model import Answered, Push, Reply

OnReply = Callable[[Push, Reply], None]

MAX_ANSWER = 16_384
"""Bytes of an answer's body that are kept. Apple's have about 30; a proxy's error page may have any number."""
MAX_REASON = 64

_METHOD = (b":method", b"POST", False)
_SCHEME = (b":scheme", b"https", False)


@dataclass(slots=True, eq=False)
class Flight:
    """A push in the queue (`started` is 0) or on a stream. Times are the loop's."""

    push: Push
    start_by: float
    on_reply: OnReply
    started: float = 0.0
    authorization: bytes | None = None
    renewed: bool = False
    status: int = 0
    """Of the answer; 0 until its headers came."""
    retry_after: float | None = None
    body: bytes = b""

    def read_headers(self, headers: list[Header]) -> None:
        """Take status and Retry-After. Informational answers (1xx) and trailers change nothing."""
        if self.status:
            return
        for name, value, _ in headers:
            if name == b":status" and value.isdigit() and not value.startswith(b"1"):
                self.status = int(value)
            elif name == b"retry-after" and value.isdigit() and len(value) < 10:
                self.retry_after = float(value)

    def answer(self, now: float) -> Answered:
        """The reply, once the status is known; a body that is not Apple's JSON is no reason."""
        reason, timestamp = (None, None) if self.status == 200 else read_reason(self.body)
        return Answered(self.status, reason, timestamp, self.retry_after, now - self.started, self.renewed)


def read_reason(body: bytes) -> tuple[str | None, int | None]:
    """`reason` and `timestamp` (UNIX milliseconds) of an error body, or of GOAWAY's debug data."""
    try:
        answer = orjson.loads(body)
    except ValueError:
        return None, None
    if not isinstance(answer, dict):
        return None, None
    reason, timestamp = answer.get("reason"), answer.get("timestamp")
    if not isinstance(reason, str) or not reason.isascii() or not reason.isprintable() or not reason:
        return None, None
    return reason[:MAX_REASON], timestamp if type(timestamp) is int else None


def request_headers(push: Push, authority: bytes, authorization: bytes | None) -> list[Header]:
    """The header list of one push.

    Never indexed are secrets (token, device) and what differs in each request: indexed, it would push out of
    HPACK's table what is the same in all of them.
    """
    headers: list[Header] = [
        _METHOD,
        _SCHEME,
        (b":path", b"/3/device/" + push.device_token.encode(), True),
        (b":authority", authority, False),
        (b"apns-id", push.notification_id.encode(), True),
        (b"apns-topic", push.topic.encode(), False),
        (b"apns-push-type", push.push_type.encode(), False),
    ]
    if push.priority is not None:
        headers.append((b"apns-priority", b"%d" % push.priority, False))
    if push.expiration is not None:
        headers.append((b"apns-expiration", b"%d" % push.expiration, True))
    if push.collapse_id is not None:
        headers.append((b"apns-collapse-id", push.collapse_id.encode(), True))
    if authorization is not None:
        headers.append((b"authorization", authorization, True))
    return headers


class Sign(Enum):
    """What an answer says about the connection that gave it."""

    GOOD = auto()
    """Token and server are sound."""
    NEUTRAL = auto()
    STRIKE = auto()
    """Bad when repeated: a connection can answer 500 for ever (pushy#529, #408)."""
    LEAVE = auto()
    """Do not use this connection for another push."""


LEAVE_REASONS = frozenset({"Shutdown", "IdleTimeout", "TooManyProviderTokenUpdates"})
TOKEN_REASONS = frozenset({"ExpiredProviderToken", "UnrelatedKeyIdInToken", "TooManyProviderTokenUpdates"})
CONFIG_REASONS = frozenset({"BadCertificate", "BadCertificateEnvironment", "Forbidden"})
"""Reasons that GOAWAY may carry and waiting does not mend."""


def sign_of(status: int, reason: str | None) -> Sign:
    """403 always leaves: the connection stays wedged after an expired token (pushy#783, #732), is bound to the
    first key and environment it saw, and only a new one presents a certificate that was replaced."""
    if status == 403 or reason in LEAVE_REASONS:
        return Sign.LEAVE
    if status == 500:
        return Sign.STRIKE
    if status == 200 or (400 <= status < 500 and reason is not None):
        return Sign.GOOD
    return Sign.NEUTRAL
