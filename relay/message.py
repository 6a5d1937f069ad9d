"""From a row to the bytes of its message, or to the reason why it can never be sent. Pure.

Every bound of the protocol is checked here, in bytes, before anything of a batch is written: one oversized
header would cost the whole connection (rabbitmq/rabbitmq-java-client#362), one unencodable value the batch.

A message carries: message_id = event_id, type = event_type, timestamp = created_at, content_type, app_id,
delivery mode 2 (persistent: both libraries leave it unset, which is transient), the row's own headers
untouched, and the relay's headers `x-aggregate-type`, `x-aggregate-id` and `x-outbox-id`. The last one is
unique for each publish in flight, which message_id need not be: it is what a returned message is matched by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC
from struct import Struct
from typing import Any, NamedTuple

import orjson

from relay.amqp import FRAME_OVERHEAD, UNLIMITED_FRAME, Unencodable, field, publish_method, shortstr, table
from relay.model import OutboxRow, Rejected

AGGREGATE_TYPE = "x-aggregate-type"
AGGREGATE_ID = "x-aggregate-id"
OUTBOX_ID = "x-outbox-id"

# Flags of the properties that are sent, AMQP 0-9-1 section 4.2.6.1.
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 0x8000, 0x2000, 0x1000
_MESSAGE_ID, _TIMESTAMP, _TYPE, _APP_ID = 0x0080, 0x0040, 0x0020, 0x0008
_PERSISTENT_UUID = b"\x02\x24"  # delivery mode 2, then the length of a UUID's text

_BASIC_SIZE_FLAGS = Struct(">HxxQH").pack  # class 60, weight 0, body size, property flags
_U32 = Struct(">I").pack
_I64 = Struct(">q").pack
_U64 = Struct(">Q").pack
_AGGREGATE_ID_HEAD = b"\x0e" + AGGREGATE_ID.encode() + b"S"
_OUTBOX_ID_HEAD = b"\x0b" + OUTBOX_ID.encode() + b"l"

# Route parts repeat from row to row; what does not repeat (an id in the routing key) must not fill memory.
_REMEMBERED_ROUTES = 2048


@dataclass(frozen=True, slots=True)
class MessageConfig:
    """What of a message is not the row's own choice."""

    exchange: str = "events"  # for rows that name none
    app_id: str = "relay"
    max_body_bytes: int = 16 * 1024 * 1024  # RabbitMQ 4's max_message_size; 3.x takes 128 MiB
    cloud_events: bool = False  # add the attributes of CloudEvents 1.0, binary mode for AMQP
    cloud_events_source: str = ""  # URI-reference of attribute "source"; empty: "/" + aggregate type
    # AMQP Protocol Binding for CloudEvents 1.0.3, section 3.1.3.1: "_" is preferred, ":" is the older form.
    cloud_events_prefix: str = "cloudEvents_"


class Message(NamedTuple):
    """One row, ready to be framed: payloads of the method and header frames, and the body."""

    row_id: int
    exchange: str
    method: bytes
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class _Route:
    """What rows of one kind have in common, encoded once."""

    exchange: str
    method: bytes
    flags: int
    content_type: bytes
    own_fields: bytes  # the relay's header fields up to the value of x-outbox-id, which comes last
    own_size: int  # of all the relay's header fields, less the aggregate id
    tail: bytes  # properties type and app_id
    check: str  # "json", "utf-8" or "": what the content type promises about the body


class Encoder:
    """Turns rows into messages; remembers nothing but the encoded parts that rows share."""

    def __init__(self, config: MessageConfig) -> None:
        self._config = config
        self._routes: dict[tuple[str | None, str | None, str, str, str], _Route] = {}
        prefix = config.cloud_events_prefix
        self._own = {AGGREGATE_TYPE, AGGREGATE_ID, OUTBOX_ID}
        if config.cloud_events:
            names = ("specversion", "id", "source", "type", "time", "subject", "partitionkey")
            self._own |= {prefix + name for name in names}

    def encode(self, row: OutboxRow, frame_max: int) -> Message | Rejected:
        """Return the message, or what makes it impossible to send, with the value and the bound.

        Args:
            frame_max: size of a frame as negotiated with the broker; 0 is no limit.
        """
        try:
            return self._encode(row, frame_max or UNLIMITED_FRAME)
        except Unencodable as error:
            return Rejected(str(error))

    def _encode(self, row: OutboxRow, frame_max: int) -> Message:
        # In one piece, for it is run for every message: what can be shared is in the route.
        kind = (row.exchange, row.routing_key, row.event_type, row.aggregate_type, row.content_type)
        route = self._routes.get(kind) or self._remember(kind)
        body = row.body
        if len(body) > self._config.max_body_bytes:
            raise Unencodable(f"body has {len(body)} bytes, the bound is {self._config.max_body_bytes}")
        if route.check:
            _check_body(body, route.check, row.content_type)
        extra = b"" if row.headers == "{}" else _row_headers(row.headers, self._own)
        if self._config.cloud_events:
            extra += self._cloud_event(row)
        try:
            aggregate_id = row.aggregate_id.encode()
        except UnicodeEncodeError:
            raise Unencodable("aggregate_id is not valid Unicode") from None
        moment = row.created_at.timestamp()
        if moment < 0:
            raise Unencodable(f"created_at is {row.created_at}, the bound is 1970")
        header = b"".join(
            (
                _BASIC_SIZE_FLAGS(60, len(body), route.flags),
                route.content_type,
                _U32(len(extra) + route.own_size + len(aggregate_id)),
                extra,
                _AGGREGATE_ID_HEAD,
                _U32(len(aggregate_id)),
                aggregate_id,
                route.own_fields,
                _I64(row.id),
                _PERSISTENT_UUID,
                str(row.event_id).encode(),
                _U64(int(moment)),
                route.tail,
            )
        )
        if len(header) > frame_max - FRAME_OVERHEAD:
            raise Unencodable(
                f"headers and properties have {len(header)} bytes, "
                f"the bound is a frame of {frame_max} bytes less {FRAME_OVERHEAD}"
            )
        return Message(row.id, route.exchange, route.method, header, body)

    def _cloud_event(self, row: OutboxRow) -> bytes:
        """The attributes as header fields; a time keeps its fraction as text, AMQP's type has none."""
        prefix = self._config.cloud_events_prefix
        attributes: dict[str, Any] = {
            prefix + "specversion": "1.0",
            prefix + "source": self._config.cloud_events_source or f"/{row.aggregate_type}",
            prefix + "type": row.event_type,
            prefix + "id": str(row.event_id),
            prefix + "time": row.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        }
        if row.aggregate_id:
            attributes[prefix + "subject"] = row.aggregate_id
        if row.ordering_key:
            attributes[prefix + "partitionkey"] = row.ordering_key  # CloudEvents extension "Partitioning"
        return table(attributes)

    def _remember(self, kind: tuple[str | None, str | None, str, str, str]) -> _Route:
        exchange, routing_key, event_type, aggregate_type, content_type = kind
        config = self._config
        exchange = config.exchange if exchange is None else exchange
        flags = _HEADERS | _DELIVERY_MODE | _MESSAGE_ID | _TIMESTAMP
        tail = b""
        if event_type:
            flags |= _TYPE
            tail += shortstr(event_type, f"event_type {event_type[:40]!r}")
        if config.app_id:
            flags |= _APP_ID
            tail += shortstr(config.app_id, f"app_id {config.app_id[:40]!r}")
        if content_type:
            flags |= _CONTENT_TYPE
        own_fields = field(AGGREGATE_TYPE, aggregate_type) + _OUTBOX_ID_HEAD
        route = _Route(
            exchange=exchange,
            method=publish_method(exchange, event_type if routing_key is None else routing_key),
            flags=flags,
            content_type=shortstr(content_type, f"content_type {content_type[:40]!r}")
            if content_type
            else b"",
            own_fields=own_fields,
            own_size=len(_AGGREGATE_ID_HEAD) + 4 + len(own_fields) + 8,
            tail=tail,
            check=_promise(content_type),
        )
        if len(self._routes) >= _REMEMBERED_ROUTES:
            self._routes.clear()
        self._routes[kind] = route
        return route


def _promise(content_type: str) -> str:
    """Say what a content type promises about the bytes: RFC 8259 for JSON, a charset of UTF-8 for text."""
    kind, *parameters = [part.strip().lower() for part in content_type.split(";")]
    if kind in ("application/json", "text/json") or kind.endswith("+json"):
        return "json"
    return "utf-8" if any(p.replace('"', "") in ("charset=utf-8", "charset=utf8") for p in parameters) else ""


def _check_body(body: bytes, promise: str, content_type: str) -> None:
    """Refuse a body that is not what its content type says.

    orjson is strict and fast but has limits of its own (nesting, size of numbers) that JSON has not, so the
    standard library has the last word on what orjson refuses.
    """
    if promise == "utf-8":
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise Unencodable(
                f"body is not UTF-8 as its content type {content_type!r} says: {error}"
            ) from None
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            json.loads(body.decode(), parse_constant=_no_constant, parse_int=str, parse_float=str)
        except RecursionError:
            return  # deeper than this process can look; PostgreSQL or the producer has looked
        except ValueError:
            raise Unencodable(
                f"body of {len(body)} bytes is not JSON as its content type {content_type!r} says: {error}"
            ) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _row_headers(text: str, own: set[str]) -> bytes:
    """Encode the row's headers, less the names that are the relay's (a producer copied them from a message).

    Raises:
        Unencodable: no JSON object, or a value that AMQP or RabbitMQ can not take.
    """
    try:
        headers = orjson.loads(text)
        exact = isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())
    except orjson.JSONDecodeError:
        exact = False
    if not exact:
        # orjson turns an integer over 64 bits into a float and refuses larger ones: nothing may change silently.
        try:
            headers = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise Unencodable(f"headers are not JSON that can be read: {error}") from None
    if not isinstance(headers, dict):
        raise Unencodable(f"headers are a JSON {type(headers).__name__}, not an object")
    for name in own & headers.keys():
        del headers[name]
    for name in ("CC", "BCC"):  # sender-selected distribution: any other type closes the channel with 406
        routes = headers.get(name, [])
        if not (isinstance(routes, list) and all(isinstance(route, str) for route in routes)):
            raise Unencodable(f"header {name!r} is to RabbitMQ a list of routing keys, not {routes!r:.60}")
    try:
        return table(headers)
    except RecursionError:
        raise Unencodable("headers are nested too deep to be encoded") from None
