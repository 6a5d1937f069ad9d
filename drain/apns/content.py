"""From a row of the ledger to the request that is written, or to the reason why it never can be.

Sources of the rules: Apple, "Sending notification requests to APNs", "Generating a remote notification".
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NoReturn, Protocol
from uuid import UUID

import orjson

from drain.apns.model import Push

TOPIC_SUFFIX = {
    "alert": "",
    "background": "",
    "complication": ".complication",
    "controls": ".push-type.controls",
    "fileprovider": ".pushkit.fileprovider",
    "liveactivity": ".push-type.liveactivity",
    "location": ".location-query",
    "mdm": "",
    "pushtotalk": ".voip-ptt",
    "voip": ".voip",
    "widgets": ".push-type.widgets",
}
"""By push type: what follows the bundle id in apns-topic. For mdm the topic is the certificate's own."""
PRIORITIES = (1, 5, 10)
PAYLOAD_LIMIT = 4096
PAYLOAD_LIMIT_VOIP = 5120
COLLAPSE_ID_LIMIT = 64
DEVICE_TOKEN_LIMIT = 200
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SECOND = timedelta(seconds=1)

_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+")
_COLLAPSE_ID = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_INEXACT = re.compile(r"\d(?:\.|[eE]|\d{17})")
"""A number that orjson might write differently than it was read (or some text that looks like one)."""
_SPACE_OR_STRING = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")|[ \t\n\r]+')


class Content(Protocol):
    """The fields of a ledger row that become a request; a claimed row has them and is not copied for it."""

    @property
    def notification_id(self) -> UUID: ...
    @property
    def device_token(self) -> str: ...
    @property
    def push_type(self) -> str: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def collapse_id(self) -> str | None: ...
    @property
    def expires_at(self) -> datetime | None: ...
    @property
    def payload(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """The fields alone, for a push that has no row."""

    notification_id: UUID
    device_token: str
    push_type: str
    priority: int | None
    collapse_id: str | None
    expires_at: datetime | None
    """Aware. None: no apns-expiration; the epoch (or before): 0; else that second."""
    payload: str
    """JSON text, as PostgreSQL's jsonb gives it."""


@dataclass(frozen=True, slots=True)
class InvalidDelivery:
    """It can never be sent. The reason names the value and the bound; no device token, no payload."""

    reason: str


class _Invalid(Exception):
    pass


def make_push(delivery: Content, topic: str) -> Push | InvalidDelivery:
    """The request for one delivery to the app with that topic (bundle id)."""
    limit = PAYLOAD_LIMIT_VOIP if delivery.push_type == "voip" else PAYLOAD_LIMIT
    try:
        return Push(
            notification_id=str(delivery.notification_id),
            device_token=_device_token(delivery.device_token),
            topic=topic_for(topic, delivery.push_type),
            push_type=delivery.push_type,
            priority=_priority(delivery.priority, delivery.push_type),
            expiration=_expiration(delivery.expires_at),
            collapse_id=_collapse_id(delivery.collapse_id),
            body=_body(delivery.payload, limit),
        )
    except _Invalid as invalid:
        return InvalidDelivery(str(invalid))


def topic_for(topic: str, push_type: str) -> str:
    """apns-topic: the bundle id with the suffix of the push type, once."""
    suffix = TOPIC_SUFFIX.get(push_type)
    if suffix is None:
        raise _Invalid(f"push_type {push_type[:40]!r} is none of {', '.join(TOPIC_SUFFIX)}")
    return topic if topic.endswith(suffix) else topic + suffix


def _device_token(token: str) -> str:
    # Apple: its length must not be assumed. The bound keeps :path a header of sane size.
    if len(token) > DEVICE_TOKEN_LIMIT or len(token) % 2 or not _HEXADECIMAL.fullmatch(token):
        raise _Invalid(
            f"device_token of {len(token)} characters is not 2 to {DEVICE_TOKEN_LIMIT} hexadecimal digits, in pairs"
        )
    return token


def _priority(priority: int | None, push_type: str) -> int | None:
    if push_type == "background":
        # Absent means 10, which APNs refuses for background.
        if priority not in (None, 5):
            raise _Invalid(f"priority {priority} with push_type background, which must be 5")
        return 5
    if priority is not None and priority not in PRIORITIES:
        raise _Invalid(f"priority {priority} is none of 1, 5, 10")
    return priority


def _expiration(expires_at: datetime | None) -> int | None:
    if expires_at is None:
        return None
    # PostgreSQL's infinity and -infinity, as asyncpg gives them: without a zone.
    if expires_at.replace(tzinfo=UTC) == datetime.max.replace(tzinfo=UTC):
        return None
    if expires_at.replace(tzinfo=UTC) == datetime.min.replace(tzinfo=UTC):
        return 0
    if expires_at.tzinfo is None:
        raise _Invalid(f"expires_at {expires_at} has no time zone")
    return max(0, (expires_at - EPOCH) // _SECOND)


def _collapse_id(collapse_id: str | None) -> str | None:
    if collapse_id is None:
        return None
    size = len(collapse_id.encode("utf-8", "surrogatepass"))
    if size > COLLAPSE_ID_LIMIT:
        raise _Invalid(f"collapse_id is {size} bytes, limit {COLLAPSE_ID_LIMIT}")
    if not _COLLAPSE_ID.fullmatch(collapse_id):
        raise _Invalid(f"collapse_id {collapse_id!r} is not printable ASCII without outer spaces")
    return collapse_id


def _body(payload: str, limit: int) -> bytes:
    body = compact(payload)
    if len(body) > limit:
        raise _Invalid(f"payload is {len(body)} bytes, limit {limit}")
    return body


def compact(payload: str) -> bytes:
    """A JSON object's text without insignificant spaces, as UTF-8; every number stays exactly as it is written."""
    try:
        if not _INEXACT.search(payload):
            value = orjson.loads(payload)
            body = orjson.dumps(value)
        else:
            value = json.loads(payload, parse_constant=_no_constant, parse_int=str, parse_float=str)
            body = _SPACE_OR_STRING.sub(r"\1", payload).encode()
    except (ValueError, RecursionError) as error:
        raise _Invalid(f"payload is not JSON: {_where(error)}") from None
    if not isinstance(value, dict):
        raise _Invalid(f"payload is a JSON {type(value).__name__}, not an object")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _where(error: Exception) -> str:
    # The message of a decoder, without the document that hangs on it.
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:100] or type(error).__name__
