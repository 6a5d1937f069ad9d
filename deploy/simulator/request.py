"""What a client asked (`Request`), and what became of it (`Arrival`)."""

from typing import Final, NamedTuple

from deploy.simulator.hpack import Header

DEVICE_PATH: Final = "/3/device/"


class Request(NamedTuple):
    """One complete HTTP/2 request; header fields are None when absent.

    `device` is the device token as written in the path; when the path has none, `device` is empty and `path` is
    all of it. `duplicates` names every header that came more than once (the last value is kept). A tuple, because
    one is made per push and a frozen dataclass costs five times as much.
    """

    method: str
    path: str
    device: str
    apns_id: str | None
    topic: str | None
    push_type: str | None
    priority: str | None
    expiration: str | None
    collapse_id: bytes | None
    authorization: bytes | None
    body_bytes: int
    duplicates: tuple[str, ...]


_SHARED_VALUES: Final = 4096
_texts: dict[bytes, str] = {}
_tokens: dict[bytes, bytes] = {}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _shared_text(value: bytes | None) -> str | None:
    """For headers with few values: the log then holds one string for all its arrivals."""
    if value is None:
        return None
    text = _texts.get(value)
    if text is None:
        text = value.decode("utf-8", "replace")
        if len(_texts) < _SHARED_VALUES:
            _texts[value] = text
    return text


def _shared_token(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    return _tokens.setdefault(value, value) if len(_tokens) < _SHARED_VALUES else _tokens.get(value, value)


def read_request(headers: list[Header], body_bytes: int) -> Request:
    """Raises KeyError when `:method` or `:path` is missing: a malformed request (RFC 9113, section 8.3.1)."""
    fields = {name: value for name, value, _ in headers}
    duplicates: tuple[str, ...] = ()
    if len(fields) != len(headers):
        names = [name for name, _, _ in headers if name != b"cookie"]
        duplicates = tuple(
            sorted({name.decode("utf-8", "replace") for name in names if names.count(name) > 1})
        )
    get = fields.get
    path = fields[b":path"].decode("utf-8", "replace")
    device = path[len(DEVICE_PATH) :] if path.startswith(DEVICE_PATH) else ""
    return Request(
        _shared_text(fields[b":method"]) or "",
        "" if device else path,
        device,
        _text(get(b"apns-id")),
        _shared_text(get(b"apns-topic")),
        _shared_text(get(b"apns-push-type")),
        _shared_text(get(b"apns-priority")),
        _text(get(b"apns-expiration")),
        get(b"apns-collapse-id"),
        _shared_token(get(b"authorization")),
        body_bytes,
        duplicates,
    )


class Arrival:
    """One request in the arrival log; `outcome` is filled in when the request ends.

    outcome: None while open; then "answered", or why there was no answer: "refused" (over a limit, before it
    was processed), "excluded" (above a GOAWAY's last stream id), "silent", "reset", "lost" (its connection
    ended), "cancelled" (the client reset it).
    """

    __slots__ = (
        "at",
        "body",
        "connection",
        "delivered",
        "outcome",
        "reason",
        "request",
        "sequence",
        "status",
        "stream_id",
    )

    def __init__(
        self, sequence: int, at: float, connection: int, stream_id: int, request: Request, body: bytes
    ) -> None:
        self.sequence = sequence
        self.at = at
        self.connection = connection
        self.stream_id = stream_id
        self.request = request
        self.body: bytes | None = body
        self.delivered = False
        self.outcome: str | None = None
        self.status: int | None = None
        self.reason: str | None = None

    def as_json(self) -> dict[str, object]:
        request = self.request
        return {
            "sequence": self.sequence,
            "at": self.at,
            "connection": self.connection,
            "stream_id": self.stream_id,
            "device": request.device,
            "apns_id": request.apns_id,
            "topic": request.topic,
            "push_type": request.push_type,
            "priority": request.priority,
            "expiration": request.expiration,
            "collapse_id": _text(request.collapse_id),
            "body": _text(self.body),
            "body_bytes": request.body_bytes,
            "delivered": self.delivered,
            "outcome": self.outcome,
            "status": self.status,
            "reason": self.reason,
        }
