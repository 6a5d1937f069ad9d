"""What each answer of APNs means for its row: one total function, no I/O.

The table is Apple's ("Handling notification responses from APNs"), in Apple's order, with the class of action
for each line. Names that Apple does not list do appear (APNSwift#229) and are judged by their status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Literal, assert_never

from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Reply

Scope = Literal["row", "device", "app"]


class Class(Enum):
    """What to do. Every member is an action for the row; the session mends connection and token by itself."""

    DEAD = "the token is dead, unless many of this app's are at once: then our environment or topic is wrong"
    DEAD_SINCE = "the token is dead if it was registered before the answer's timestamp"
    ROW = "the row fails, the token is kept"
    CONFIG = "our configuration is wrong: pause the app, attempt back"
    AUTH = "fresh token or connection, attempt back, at once; refused again: CONFIG"
    UPDATES = "pause the app until the token may change again, attempt back"
    CONN = "this connection is over, attempt back"
    CLOSING = "this server is closing: again soon, on another connection"
    DEVICE = "too much for this one device: later, others go on"
    SERVER = "later"
    BUSY = "later, and the whole app slower"


_TABLE: dict[tuple[int, str], Class] = {
    (400, "BadCollapseId"): Class.ROW,
    (400, "BadDeviceToken"): Class.DEAD,
    (400, "BadExpirationDate"): Class.ROW,
    (400, "BadMessageId"): Class.ROW,
    (400, "BadPriority"): Class.ROW,
    (400, "BadTopic"): Class.CONFIG,
    (400, "DeviceTokenNotForTopic"): Class.DEAD,
    (400, "DuplicateHeaders"): Class.ROW,
    (400, "IdleTimeout"): Class.CONN,
    (400, "InvalidPushType"): Class.ROW,
    (400, "MissingDeviceToken"): Class.ROW,
    (400, "MissingTopic"): Class.CONFIG,
    (400, "PayloadEmpty"): Class.ROW,
    (400, "TopicDisallowed"): Class.CONFIG,
    (403, "BadCertificate"): Class.CONFIG,
    (403, "BadCertificateEnvironment"): Class.CONFIG,
    (403, "ExpiredProviderToken"): Class.AUTH,
    (403, "Forbidden"): Class.CONFIG,
    (403, "InvalidProviderToken"): Class.CONFIG,
    (403, "MissingProviderToken"): Class.CONFIG,
    (403, "UnrelatedKeyIdInToken"): Class.AUTH,
    (403, "BadEnvironmentKeyIdInToken"): Class.CONFIG,  # Apple's page
    (403, "BadEnvironmentKeyInToken"): Class.CONFIG,  # Apple's servers
    (404, "BadPath"): Class.ROW,
    (405, "MethodNotAllowed"): Class.ROW,
    (410, "ExpiredToken"): Class.DEAD_SINCE,
    (410, "Unregistered"): Class.DEAD_SINCE,
    (413, "PayloadTooLarge"): Class.ROW,
    (429, "TooManyProviderTokenUpdates"): Class.UPDATES,
    (429, "TooManyRequests"): Class.DEVICE,
    (500, "InternalServerError"): Class.SERVER,
    (503, "ServiceUnavailable"): Class.BUSY,
    (503, "Shutdown"): Class.CLOSING,
}

UNKNOWN_TRIES = 3
"""Attempts after which a 4xx answer that nobody knows fails its row."""
TOKEN_UPDATE_SECONDS = 20 * 60.0
"""Apple: a provider token may change once in 20 minutes."""


@dataclass(frozen=True, slots=True)
class Sent:
    """APNs took it. No proof of display."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal; the device token is kept. `reason` is Apple's, or ours."""

    reason: str


@dataclass(frozen=True, slots=True)
class TokenDead:
    """Terminal, and the device token must not be used again."""

    reason: str
    since: datetime | None
    """Apple's time of death (410); None: now."""
    suspect: bool
    """True: may be our own environment or topic. Many different tokens of one app at once mean ConfigError."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Pending again after `delay` seconds; the attempt counts. `scope`: what else has to wait as well."""

    reason: str
    delay: float
    scope: Scope = "row"


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Pending again after `delay` seconds; the attempt is given back: nothing was tried."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class ConfigError:
    """Pause the app, give the attempt back, alert; probe with one row, at the latest after `probe_within` s."""

    reason: str
    probe_within: float | None = None


@dataclass(frozen=True, slots=True)
class RefreshToken:
    """Pending again at once, attempt given back: the session has replaced token or connection already."""

    reason: str


Outcome = Sent | Failed | TokenDead | Retry | GiveBack | ConfigError | RefreshToken


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of the row when its reply comes."""

    attempts: int
    """This one counted."""
    max_attempts: int
    registered_at: datetime | None = None
    """When the application last registered this device token (aware); None: not known."""
    probe: bool = False
    """The push that tries whether a paused app works again. It kills no token: the pause may be for just that."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds. Delays are uniform in 0 .. min(cap, base * 2^(attempts-1)): full jitter."""

    base: float = 10.0
    cap: float = 900.0
    device_base: float = 120.0
    """TooManyRequests: minutes."""
    soon: float = 1.0
    """Upper bound for what only needs another connection or stream."""
    retry_after_cap: float = 3600.0
    """Retry-After is obeyed up to here; Apple documents none, so a larger one is some proxy's."""


def decide(reply: Reply, row: RowFacts, policy: RetryPolicy, random: Callable[[], float]) -> Outcome:
    """The outcome of one push. `random` gives 0 <= x < 1."""
    match reply:
        case Answered():
            return _answered(reply, row, policy, random)
        case NotSent(why, config):
            return ConfigError(why) if config else GiveBack(why, random() * policy.soon)
        case MaybeDelivered(why):
            return _retry(f"maybe delivered: {why}", row, policy.base, policy, random)
        case NoAnswer(seconds):
            return _retry(f"maybe delivered: no answer in {seconds:.0f} s", row, policy.base, policy, random)
        case _:
            assert_never(reply)


def class_of(status: int, reason: str | None) -> Class | None:
    """The table's line; None for a status or reason that is not in it."""
    return None if reason is None else _TABLE.get((status, reason))


def _answered(answer: Answered, row: RowFacts, policy: RetryPolicy, random: Callable[[], float]) -> Outcome:
    status, reason = answer.status, answer.reason
    if status == 200:
        return Sent()
    name = reason or f"HTTP {status}"
    match class_of(status, reason):
        case Class.DEAD:
            return ConfigError(name) if row.probe else TokenDead(name, None, suspect=True)
        case Class.DEAD_SINCE:
            since = _moment(answer.timestamp_ms)
            newer = since is not None and row.registered_at is not None and row.registered_at > since
            return Failed(name) if newer else TokenDead(name, since, suspect=False)
        case Class.ROW:
            return Failed(name)
        case Class.CONFIG:
            return ConfigError(name)
        case Class.AUTH:
            return ConfigError(name) if answer.renewed else RefreshToken(name)
        case Class.UPDATES:
            return ConfigError(name, probe_within=TOKEN_UPDATE_SECONDS)
        case Class.CONN:
            return GiveBack(name, random() * policy.soon)
        case Class.CLOSING:
            return _retry(name, row, policy.soon, policy, random, answer.retry_after)
        case Class.DEVICE:
            return _retry(name, row, policy.device_base, policy, random, answer.retry_after, "device")
        case Class.SERVER:
            return _retry(name, row, policy.base, policy, random, answer.retry_after)
        case Class.BUSY:
            return _retry(name, row, policy.base, policy, random, answer.retry_after, "app")
        case None:
            if status == 403:
                return ConfigError(name)
            if 400 <= status < 500 and row.attempts >= UNKNOWN_TRIES:
                return Failed(name)
            return _retry(name, row, policy.base, policy, random, answer.retry_after)
        case other:
            assert_never(other)


def _retry(
    reason: str,
    row: RowFacts,
    base: float,
    policy: RetryPolicy,
    random: Callable[[], float],
    retry_after: float | None = None,
    scope: Scope = "row",
) -> Outcome:
    if row.attempts >= row.max_attempts:
        return Failed(reason)
    ceiling = min(policy.cap, base * 2.0 ** min(max(row.attempts, 1) - 1, 30))
    delay = random() * ceiling
    if retry_after is not None:
        # On top, so that all those that were told the same second do not come back in it.
        delay += min(max(retry_after, 0.0), policy.retry_after_cap)
    return Retry(reason, delay, scope)


def _moment(milliseconds: int | None) -> datetime | None:
    if milliseconds is None:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def reason_class(reply: Reply) -> str:
    """A bounded label for metrics (REASON_CLASSES)."""
    match reply:
        case NotSent():
            return "not_sent"
        case MaybeDelivered():
            return "maybe_delivered"
        case NoAnswer():
            return "no_answer"
        case Answered(status=200):
            return "sent"
        case Answered(status=status, reason=reason):
            return _LABELS[class_of(status, reason)]
        case _:
            assert_never(reply)


_LABELS: dict[Class | None, str] = {
    Class.DEAD: "token_dead",
    Class.DEAD_SINCE: "token_dead",
    Class.ROW: "bad_request",
    Class.CONFIG: "config",
    Class.AUTH: "auth",
    Class.UPDATES: "auth",
    Class.CONN: "server",
    Class.CLOSING: "server",
    Class.DEVICE: "throttled",
    Class.SERVER: "server",
    Class.BUSY: "server",
    None: "other",
}
REASON_CLASSES = (
    "sent",
    *dict.fromkeys(_LABELS.values()),
    "not_sent",
    "maybe_delivered",
    "no_answer",
)
