"""Everything APNs rejects a request for by its own content: pure functions in one table, first fault wins.

Source: Apple, "Sending notification requests to APNs" and "Handling notification responses from APNs". Apple does
not document the order of its checks; ours goes from the outside in (headers, path, topic, values, payload). The
provider token has state (age, connection, update floor) and is checked in tokens.py, between path and topic.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from deploy.simulator.request import DEVICE_PATH, Request

TOPIC_SUFFIX: Final = MappingProxyType(
    {
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
)
"""Push type -> what its topic has after the bundle id."""

_SUFFIXES: Final = tuple(sorted(filter(None, TOPIC_SUFFIX.values()), key=len, reverse=True))
_TOPIC: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEX: Final = re.compile(r"(?:[0-9A-Fa-f]{2})+")
_PLAIN_SEGMENT: Final = re.compile(r"[A-Za-z0-9._~-]+")
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
_SECONDS: Final = re.compile(r"[0-9]{1,19}")
_COLLAPSE_ID_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """The configurable part of the checks; `default_topic` serves certificates of a single topic."""

    topics: frozenset[str]
    default_topic: str | None = None
    device_token_lengths: frozenset[int] = frozenset()  # in hex digits; empty: any even number
    require_push_type: bool = False
    check_topic_suffix: bool = True
    payload_limit: int = 4096
    payload_limit_voip: int = 5120


Check = Callable[[Request, Rules], str | None]


def _headers(request: Request, rules: Rules) -> str | None:
    return "DuplicateHeaders" if request.duplicates else None


def _method(request: Request, rules: Rules) -> str | None:
    return None if request.method == "POST" else "MethodNotAllowed"


def _path(request: Request, rules: Rules) -> str | None:
    device = request.device
    if not _HEX.fullmatch(device):
        if request.path in (DEVICE_PATH, DEVICE_PATH[:-1]):
            return "MissingDeviceToken"
        return "BadDeviceToken" if _PLAIN_SEGMENT.fullmatch(device) else "BadPath"
    if rules.device_token_lengths and len(device) not in rules.device_token_lengths:
        return "BadDeviceToken"
    return None


def _push_type(request: Request, rules: Rules) -> str | None:
    if request.push_type is None:
        return "InvalidPushType" if rules.require_push_type else None
    return None if request.push_type in TOPIC_SUFFIX else "InvalidPushType"


def bundle_of(topic: str) -> str:
    """The topic without the suffix of a push type."""
    for suffix in _SUFFIXES:
        if topic.endswith(suffix):
            return topic[: -len(suffix)]
    return topic


def _topic(request: Request, rules: Rules) -> str | None:
    topic = request.topic if request.topic is not None else rules.default_topic
    if topic is None:
        return "MissingTopic"
    if not _TOPIC.fullmatch(topic):
        return "BadTopic"
    if topic not in rules.topics and bundle_of(topic) not in rules.topics:
        return "TopicDisallowed"
    if not rules.check_topic_suffix or request.push_type is None:
        return None
    suffix = TOPIC_SUFFIX[request.push_type]
    if topic in rules.topics and topic.endswith(suffix):
        return None
    return None if suffix and topic.endswith(suffix) and topic[: -len(suffix)] in rules.topics else "BadTopic"


def _priority(request: Request, rules: Rules) -> str | None:
    if request.priority is None:
        return None
    if request.priority not in ("10", "5", "1"):
        return "BadPriority"
    return "BadPriority" if request.priority == "10" and request.push_type == "background" else None


def _expiration(request: Request, rules: Rules) -> str | None:
    return (
        None if request.expiration is None or _SECONDS.fullmatch(request.expiration) else "BadExpirationDate"
    )


def _apns_id(request: Request, rules: Rules) -> str | None:
    return None if request.apns_id is None or _UUID.fullmatch(request.apns_id) else "BadMessageId"


def _collapse_id(request: Request, rules: Rules) -> str | None:
    return (
        "BadCollapseId"
        if request.collapse_id is not None and len(request.collapse_id) > _COLLAPSE_ID_BYTES
        else None
    )


def _payload(request: Request, rules: Rules) -> str | None:
    if not request.body_bytes:
        return "PayloadEmpty"
    limit = rules.payload_limit_voip if request.push_type == "voip" else rules.payload_limit
    return "PayloadTooLarge" if request.body_bytes > limit else None


BEFORE_TOKEN: Final[tuple[Check, ...]] = (_headers, _method, _path)
AFTER_TOKEN: Final[tuple[Check, ...]] = (
    _push_type,
    _topic,
    _priority,
    _expiration,
    _apns_id,
    _collapse_id,
    _payload,
)


def first_fault(checks: tuple[Check, ...], request: Request, rules: Rules) -> str | None:
    """Reason of the first check that fails, or None."""
    for check in checks:
        if (reason := check(request, rules)) is not None:
            return reason
    return None


def well_formed_id(apns_id: str | None) -> bool:
    return apns_id is not None and _UUID.fullmatch(apns_id) is not None
