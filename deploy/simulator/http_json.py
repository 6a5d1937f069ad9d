"""Just enough HTTP/1.1 for the control API: one JSON object in, one JSON object out, connections kept alive."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import ValidationError

_BODY_LIMIT: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the parts of the path its route left open, the query, and the JSON body ({} when empty)."""

    parts: tuple[str, ...]
    query: dict[str, str]
    body: dict[str, object]

    def number(self, name: str, default: int) -> int:
        """Raises Refused for anything but a number."""
        try:
            return int(self.query.get(name, default))
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{name}: not a number") from None


class Refused(Exception):
    """The answer to a call that cannot be served."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


Route = Callable[[Call], dict[str, object] | Awaitable[dict[str, object]]]


def _object(raw: bytes) -> dict[str, object]:
    body = json.loads(raw) if raw else {}
    if not isinstance(body, dict):
        raise Refused(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return body


class Router:
    """Routes by method and path; `{}` in a path matches one segment."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, re.Pattern[str], Route]] = []

    def add(self, method: str, path: str, route: Route) -> None:
        self._routes.append((method, re.compile(path.replace("{}", "([^/]+)")), route))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client connection, until either side closes it."""
        try:
            while head := await reader.readline():
                method, target, _ = head.decode("latin-1").split(" ", 2)
                length, keep = 0, True
                while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                    elif name.lower() == "connection":
                        keep = value.strip().lower() != "close"
                if length > _BODY_LIMIT:
                    break
                status, answer = await self._answer(method, target, await reader.readexactly(length))
                body = json.dumps(answer).encode() + b"\n"
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
                if not keep:
                    break
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # whatever it was, it does not speak HTTP or is gone
        finally:
            writer.close()

    async def _answer(self, method: str, target: str, raw: bytes) -> tuple[HTTPStatus, dict[str, object]]:
        url = urlsplit(target)
        try:
            body = _object(raw)
            parts, route = self._find(method, url.path)
            outcome = route(Call(parts, dict(parse_qsl(url.query)), body))
            return HTTPStatus.OK, outcome if isinstance(outcome, dict) else await outcome
        except Refused as refused:
            return refused.status, {"error": str(refused)}
        except ValidationError as error:
            return HTTPStatus.BAD_REQUEST, {
                "error": "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            }
        except (ValueError, OSError) as error:  # a file or a port that was named
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}

    def _find(self, method: str, path: str) -> tuple[tuple[str, ...], Route]:
        others: list[str] = []
        for its_method, pattern, route in self._routes:
            if (match := pattern.fullmatch(path)) is not None:
                if its_method == method:
                    return tuple(unquote(part) for part in match.groups()), route
                others.append(its_method)
        if others:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {', '.join(others)}")
        raise Refused(HTTPStatus.NOT_FOUND, f"no such path: {path}")
