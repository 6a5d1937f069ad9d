"""An Answer as bytes: the header block and the body's chunks, by the answer's own wishes and the configuration's."""

import json
import uuid
from functools import lru_cache
from typing import Final

from deploy.simulator.actions import Answer
from deploy.simulator.config import Config
from deploy.simulator.hpack import literal_field, status_field
from deploy.simulator.request import Request

_HTML: Final = (
    b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"
)
_ID_PREFIX: Final = status_field(200) + literal_field(b"apns-id", b"x" * 36)[:-36]


def debug_data(reason: str | None, timestamp: int | None) -> bytes:
    """The JSON that APNs puts into bodies and into GOAWAY's debug data; empty without a reason."""
    if reason is None:
        return b""
    return json.dumps(
        {"reason": reason} if timestamp is None else {"reason": reason, "timestamp": timestamp},
        separators=(",", ":"),
    ).encode()


_debug_data = lru_cache(maxsize=4096)(debug_data)


def accepted(apns_id: bytes) -> bytes:
    """The block of a plain 200 with a 36-byte apns-id."""
    return _ID_PREFIX + apns_id


def new_apns_id() -> str:
    return str(uuid.uuid4())


def encode(answer: Answer, request: Request, apns_id: str, config: Config) -> tuple[bytes, list[bytes]]:
    """`apns_id` is the one to echo: the request's, or the one made up for it. An empty list: no DATA frame at all."""
    status = answer.code
    block = status_field(status)
    mode = answer.apns_id if answer.apns_id is not None else config.answer_apns_id
    if mode != "missing":
        shown = {"echo": apns_id, "upper": apns_id.upper(), "random": new_apns_id()}.get(mode, mode)
        block += literal_field(b"apns-id", shown.encode())
    for name, value in (answer.headers or {}).items():
        block += literal_field(name.lower().encode(), value.encode())
    body = _body(answer, status, config)
    pieces = answer.body_frames if answer.body_frames is not None else config.answer_body_frames
    chunks = _split(body, pieces)
    if status == 200 and (answer.empty_data or config.empty_data_after_200):
        chunks.append(b"")
    return block, chunks


def _body(answer: Answer, status: int, config: Config) -> bytes:
    if answer.no_body:
        return b""
    if answer.body is not None:
        return answer.body.encode()
    if status == 200 or config.answer_body == "none":
        return b""
    if config.answer_body == "html":
        return _HTML
    return _debug_data(answer.reason, answer.timestamp)


def _split(body: bytes, pieces: int) -> list[bytes]:
    pieces = min(pieces, len(body))
    return [body[len(body) * at // pieces : len(body) * (at + 1) // pieces] for at in range(pieces)]
