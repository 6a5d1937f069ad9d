"""SimulatorClient: the control API from Python, for tests and for the board.

Every method is one HTTP call on loopback, well under a millisecond, and may be called from any thread. Async code
may call them as they are; only `wait` blocks for long, and has the async twin `until`.
"""

import asyncio
import http.client
import json
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlencode, urlsplit

P = ParamSpec("P")
T = TypeVar("T")
Json = dict[str, Any]


class SimulatorError(Exception):
    """The simulator refused the call; the message is its own."""


class NotInTime(Exception):
    """`wait` ended without its figures being reached; the message names them and what they were."""


class SimulatorClient:
    """`url`: the READY line's control_url. Raises SimulatorError for a refused call, OSError when nobody answers."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._timeout = timeout

    def call(self, method: str, path: str, body: Json | None = None, timeout: float | None = None) -> Json:
        """One call of the control API."""
        wait = self._timeout if timeout is None else timeout
        connection = http.client.HTTPConnection(*self._address, timeout=wait)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Connection": "close"}
            )
            response = connection.getresponse()
            answer: Json = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise SimulatorError(f"{method} {path}: {answer.get('error')}")
        return answer

    @staticmethod
    async def off_loop(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Any method in a thread: `await client.off_loop(client.arrivals, device=token)`."""
        return await asyncio.to_thread(call, *args, **kwargs)

    # What happened

    def stats(self) -> Json:
        """All counters, flat; README.md lists them."""
        return self.call("GET", "/stats")

    def wait(self, timeout: float = 10.0, at_most: dict[str, float] | None = None, **at_least: float) -> Json:
        """Blocks until the figures of `stats` are reached, returns the stats: `wait(requests=12, timeout=5)`.

        Raises NotInTime.
        """
        wanted = {"at_least": at_least, "at_most": at_most or {}, "timeout": timeout}
        answer = self.call("POST", "/wait", wanted, timeout + self._timeout)
        stats: Json = answer["stats"]
        if not answer["met"]:
            names = [*at_least, *(at_most or {})]
            raise NotInTime(f"wanted {wanted}, have { ({name: stats.get(name) for name in names}) }")
        return stats

    async def until(
        self, timeout: float = 10.0, at_most: dict[str, float] | None = None, **at_least: float
    ) -> Json:
        """`wait` without blocking the loop."""
        return await asyncio.to_thread(self.wait, timeout, at_most, **at_least)

    def arrivals(
        self, device: str | None = None, connection: int | None = None, after: int = 0, limit: int = 100_000
    ) -> list[Json]:
        """Logged requests, oldest first; `after` is a `sequence`."""
        query: dict[str, object] = {"after": after, "limit": limit}
        if device is not None:
            query["device"] = device
        if connection is not None:
            query["connection"] = connection
        arrivals: list[Json] = self.call("GET", f"/arrivals?{urlencode(query)}")["arrivals"]
        return arrivals

    def push(self, apns_id: str) -> Json:
        """{"requests", "delivered", "arrivals"} of one apns-id."""
        return self.call("GET", f"/ids/{quote(apns_id, safe='')}")

    def repeated(self, limit: int = 1000) -> dict[str, Json]:
        """apns-id -> {"requests", "delivered"} of those that came or were delivered more than once."""
        ids: dict[str, Json] = self.call("GET", f"/repeated?limit={limit}")["ids"]
        return ids

    def device(self, token: str) -> Json:
        """{"requests", "delivered", "background", "rule", "shown"}; `shown` after collapse, oldest first."""
        return self.call("GET", f"/devices/{quote(token, safe='')}")

    def devices(self, offset: int = 0, limit: int = 1_000_000) -> dict[str, Json]:
        """token -> {"requests", "delivered"}."""
        found: dict[str, Json] = self.call("GET", f"/devices?offset={offset}&limit={limit}")["devices"]
        return found

    def connections(self) -> list[Json]:
        """Figures of the open connections, oldest first."""
        found: list[Json] = self.call("GET", "/connections")["open"]
        return found

    def ended_connections(self) -> list[Json]:
        """Figures of the newest 500 connections that ended."""
        found: list[Json] = self.call("GET", "/connections")["ended"]
        return found

    def tokens(self) -> list[Json]:
        """Every distinct provider token: sha256 (16 digits), key_id, team_id, issued_at, refusal, uses."""
        found: list[Json] = self.call("GET", "/tokens")["tokens"]
        return found

    # What shall happen

    def config(self) -> Json:
        return self.call("GET", "/config")

    def configure(self, **changes: object) -> Json:
        """Change fields of the configuration; returns all of it."""
        return self.call("PATCH", "/config", changes)

    def reset(self, *what: str) -> None:
        """`traffic`, `devices`, `scripts`, `config`; none named: these four. `connections` drops the open ones."""
        self.call("POST", "/reset", {"what": what} if what else {})

    def script(
        self,
        steps: Sequence[Json],
        device: str | None = None,
        end: str = "pass",
        scope: str = "all",
        before_checks: bool = False,
    ) -> None:
        """Replace the script of one device, or (None) the one for all. Build steps with `step`."""
        self.call(
            "POST",
            "/scripts",
            {
                "device": device,
                "steps": list(steps),
                "end": end,
                "scope": scope,
                "before_checks": before_checks,
            },
        )

    def always(self, do: str, device: str | None = None, **fields: object) -> None:
        """A script of one step for ever: `always("answer", reason="ServiceUnavailable")`."""
        self.script([step(do, **fields)], device, end="repeat_last")

    def next_requests(self, count: int, do: str, device: str | None = None, **fields: object) -> None:
        """One step for the next `count` requests: `next_requests(3, "silence")`."""
        self.script([step(do, times=count, **fields)], device)

    def scripts(self) -> Json:
        return self.call("GET", "/scripts")

    def clear_scripts(self, device: str | None = None) -> None:
        """All scripts, or one device's. A connection that a step has wedged stays so."""
        self.call("DELETE", "/scripts" if device is None else f"/scripts?{urlencode({'device': device})}")

    def release(self, limit: int | None = None) -> int:
        """Answer held requests, oldest first; how many were."""
        released: int = self.call("POST", "/release", {"limit": limit})["released"]
        return released

    def act(self, do: str, connections: str | Sequence[int] = "all", **fields: object) -> list[int]:
        """On connections, now: `act("goaway", code="ENHANCE_YOUR_CALM")`; the numbers of those it was done to."""
        chosen = connections if isinstance(connections, str) else list(connections)
        body = {"connections": chosen, "action": step(do, **fields)}
        done: list[int] = self.call("POST", "/connections/act", body)["connections"]
        return done

    def unregister(self, *tokens: str, since_ms: int) -> None:
        """410 Unregistered from that time on."""
        self.call("POST", "/devices", {"devices": tokens, "rule": {"unregistered_since": since_ms}})

    def rule(self, *tokens: str, **rule: object) -> None:
        """Any rule: unregistered_since, expired_since, topics, reason."""
        self.call("POST", "/devices", {"devices": tokens, "rule": rule})

    def register(self, token: str) -> None:
        """The device is like any other again."""
        self.call("DELETE", f"/devices/{quote(token, safe='')}")

    def add_key(
        self,
        key_id: str,
        team_id: str,
        key_file: str | None = None,
        topics: Sequence[str] | None = None,
        refusal: str | None = None,
    ) -> str:
        """Path of the .p8 (generated without `key_file`)."""
        body: Json = {"key_id": key_id, "team_id": team_id, "key_file": key_file, "refusal": refusal}
        body["topics"] = None if topics is None else list(topics)
        path: str = self.call("POST", "/keys", body)["key_file"]
        return path

    def revoke_key(self, key_id: str) -> None:
        self.call("DELETE", f"/keys/{key_id}")


def step(do: str, **fields: object) -> Json:
    """One action as the control API reads it."""
    return {"do": do, **fields}
