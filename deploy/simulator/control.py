"""The control API: what may be asked of the simulator and told to it (README.md has the examples)."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from deploy.simulator.actions import read_connection_action, read_steps
from deploy.simulator.certificates import Authority, public_key_of
from deploy.simulator.connection import Connection
from deploy.simulator.devices import read_rule
from deploy.simulator.http_json import Call, Refused, Route, Router
from deploy.simulator.listener import Listener
from deploy.simulator.scripts import End, Scope, Script
from deploy.simulator.simulator import Simulator
from deploy.simulator.tokens import SigningKey
from deploy.simulator.wire_faults import act

_POLL_SECONDS: Final = 0.005
_RESETTABLE: Final = ["traffic", "devices", "scripts", "config", "connections"]
_SCOPE: TypeAdapter[Scope] = TypeAdapter(Scope)
_END: TypeAdapter[End] = TypeAdapter(End)
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[str])
_NUMBERS: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, float])
_TIMEOUT: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=3600)])


class Control:
    def __init__(self, simulator: Simulator, listener: Listener, authority: Authority) -> None:
        self._simulator = simulator
        self._listener = listener
        self._authority = authority
        self._started = time.monotonic()

    def router(self) -> Router:
        router = Router()
        routes: tuple[tuple[str, str, Route], ...] = (
            ("GET", "/health", self._health),
            ("GET", "/stats", lambda call: self.stats()),
            ("POST", "/wait", self._wait),
            ("POST", "/reset", self._reset),
            ("GET", "/config", lambda call: self._simulator.config.as_json()),
            ("PATCH", "/config", self._patch_config),
            ("PUT", "/config", self._put_config),
            ("GET", "/connections", self._connections),
            ("POST", "/connections/act", self._act),
            ("GET", "/scripts", lambda call: self._simulator.scripts.as_json()),
            ("POST", "/scripts", self._post_script),
            ("DELETE", "/scripts", self._delete_scripts),
            ("POST", "/release", self._release),
            ("GET", "/devices", self._devices),
            ("POST", "/devices", self._post_devices),
            ("GET", "/devices/{}", self._device),
            ("PUT", "/devices/{}", self._put_device),
            ("DELETE", "/devices/{}", self._delete_device),
            ("GET", "/arrivals", self._arrivals),
            ("GET", "/repeated", self._repeated),
            ("GET", "/ids/{}", lambda call: self._simulator.ledger.of_id(call.parts[0])),
            ("GET", "/tokens", self._tokens),
            ("GET", "/keys", self._get_keys),
            ("POST", "/keys", self._post_key),
            ("DELETE", "/keys/{}", self._delete_key),
        )
        for method, path, route in routes:
            router.add(method, path, route)
        return router

    def _health(self, call: Call) -> dict[str, object]:
        return {"ok": True}

    def stats(self) -> dict[str, object]:
        """Every counter. Costs grow with the open connections, never with the arrivals."""
        simulator, ledger = self._simulator, self._simulator.ledger
        open_now = simulator.connections.values()
        return {
            **asdict(ledger.totals),
            "pending": ledger.totals.requests - ledger.totals.answered - ledger.totals.never_answered,
            "held": len(simulator.held),
            "distinct_ids": ledger.distinct_ids,
            "distinct_devices": len(simulator.devices),
            "distinct_tokens": simulator.desk.distinct,
            "uptime_seconds": time.monotonic() - self._started,
            "cpu_seconds": time.process_time(),
            "connections_opened": simulator.connections_opened,
            "connections_open": len(simulator.connections),
            "tcp_accepted": self._listener.tcp_accepted,
            "handshakes_failed": self._listener.handshakes_failed,
            "last_handshake_error": self._listener.last_handshake_error,
            "listening": self._listener.listening,
            "streams_open": sum(len(one.streams) for one in open_now),
            "pings": simulator.pings_ended + sum(one.pings for one in open_now),
            "protocol_errors": simulator.protocol_error_count,
            "last_protocol_errors": list(simulator.protocol_errors),
            "answers": dict(ledger.answers),
            "outcomes": dict(ledger.outcomes),
        }

    async def _wait(self, call: Call) -> dict[str, object]:
        """Until every named figure is at least / at most what was asked, or the timeout has passed."""
        least = _NUMBERS.validate_python(call.body.get("at_least", {}))
        most = _NUMBERS.validate_python(call.body.get("at_most", {}))
        timeout = _TIMEOUT.validate_python(call.body.get("timeout", 10.0))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            stats = self.stats()
            met = all(_figure(stats, name) >= value for name, value in least.items()) and all(
                _figure(stats, name) <= value for name, value in most.items()
            )
            if met or loop.time() >= deadline:
                return {"met": met, "stats": stats}
            await asyncio.sleep(_POLL_SECONDS)

    async def _reset(self, call: Call) -> dict[str, object]:
        """`what`: some of _RESETTABLE; absent: all but the connections, which stay open."""
        what = _TEXTS.validate_python(call.body.get("what", _RESETTABLE[:-1]))
        if unknown := set(what).difference(_RESETTABLE):
            raise Refused(HTTPStatus.BAD_REQUEST, f"nothing called {', '.join(sorted(unknown))} to reset")
        if "connections" in what:
            await self._drop_all()
        simulator = self._simulator
        if "scripts" in what:
            simulator.scripts.clear()
            simulator.wedges.clear()
        if "config" in what:
            simulator.configure(simulator.start_config)
            await self._listener.apply()
        if "traffic" in what:
            simulator.forget_traffic(rules_too="devices" in what)
            self._listener.forget_traffic()
        elif "devices" in what:
            simulator.devices.forget_rules()
        return {"reset": what}

    async def _drop_all(self) -> None:
        connections = self._simulator.connections
        while connections:
            for connection in list(connections.values()):
                connection.drop(rst=True)
            await asyncio.sleep(0.001)

    async def _patch_config(self, call: Call) -> dict[str, object]:
        self._simulator.configure(self._simulator.config.changed(call.body))
        await self._listener.apply()
        return self._simulator.config.as_json()

    async def _put_config(self, call: Call) -> dict[str, object]:
        """Back to the configuration of the start, with these changes."""
        self._simulator.configure(self._simulator.start_config.changed(call.body))
        await self._listener.apply()
        return self._simulator.config.as_json()

    def _connections(self, call: Call) -> dict[str, object]:
        simulator = self._simulator
        return {
            "open": [one.as_json() for one in simulator.connections.values()],
            "ended": list(simulator.ended_connections),
        }

    def _act(self, call: Call) -> dict[str, object]:
        action = read_connection_action(call.body.get("action"))
        chosen = list(self._chosen(call.body.get("connections", "all")))
        for connection in chosen:
            act(self._simulator, connection, action)
        return {"connections": [one.number for one in chosen]}

    def _chosen(self, which: object) -> Iterable[Connection]:
        connections = self._simulator.connections
        if which == "all":
            return connections.values()
        if which in ("newest", "oldest"):
            numbers = [] if not connections else [max(connections) if which == "newest" else min(connections)]
        elif isinstance(which, list):
            numbers = which
        else:
            raise Refused(HTTPStatus.BAD_REQUEST, "connections: all, newest, oldest or a list of numbers")
        return [connections[number] for number in numbers if number in connections]

    def _post_script(self, call: Call) -> dict[str, object]:
        body = dict(call.body)
        device = body.pop("device", None)
        script = Script(
            steps=read_steps(body.pop("steps", None)),
            end=_END.validate_python(body.pop("end", "pass")),
            scope=_SCOPE.validate_python(body.pop("scope", "all")),
            before_checks=bool(body.pop("before_checks", False)),
        )
        if body:
            raise Refused(HTTPStatus.BAD_REQUEST, f"unknown: {', '.join(body)}")
        self._simulator.scripts.put(None if device is None else str(device), script)
        return self._simulator.scripts.as_json()

    def _delete_scripts(self, call: Call) -> dict[str, object]:
        """?device=… one device's, ?all_devices=1 the shared one, neither: all. Wedged connections stay wedged."""
        if "device" in call.query:
            self._simulator.scripts.clear(call.query["device"], everything=False)
        else:
            self._simulator.scripts.clear(everything="all_devices" not in call.query)
        return self._simulator.scripts.as_json()

    def _release(self, call: Call) -> dict[str, object]:
        limit = call.body.get("limit")
        if limit is not None and type(limit) is not int:
            raise Refused(HTTPStatus.BAD_REQUEST, "limit: a number or null")
        return {"released": self._simulator.release(limit)}

    def _devices(self, call: Call) -> dict[str, object]:
        listed = self._simulator.devices.listed(call.number("offset", 0), call.number("limit", 1000))
        return {"total": len(self._simulator.devices), "devices": listed}

    def _post_devices(self, call: Call) -> dict[str, object]:
        tokens = _TEXTS.validate_python(call.body.get("devices"))
        rule = read_rule(call.body.get("rule"))
        for token in tokens:
            self._simulator.devices.put_rule(token, rule)
        return {"devices": len(tokens)}

    def _device(self, call: Call) -> dict[str, object]:
        device = self._simulator.devices.find(call.parts[0])
        if device is None:
            return {"requests": 0, "delivered": 0, "background": 0, "rule": None, "shown": []}
        return device.as_json()

    def _put_device(self, call: Call) -> dict[str, object]:
        self._simulator.devices.put_rule(call.parts[0], read_rule(call.body))
        return self._device(call)

    def _delete_device(self, call: Call) -> dict[str, object]:
        """The device is like any other again; its counters stay."""
        self._simulator.devices.put_rule(call.parts[0], None)
        return self._device(call)

    def _arrivals(self, call: Call) -> dict[str, object]:
        chosen = self._simulator.ledger.arrivals(
            device=call.query.get("device"),
            connection=call.number("connection", 0) or None,
            after=call.number("after", 0),
            limit=call.number("limit", 1000),
        )
        return {"arrivals": [one.as_json() for one in chosen]}

    def _repeated(self, call: Call) -> dict[str, object]:
        return {"ids": self._simulator.ledger.repeated(call.number("limit", 1000))}

    def _tokens(self, call: Call) -> dict[str, object]:
        desk = self._simulator.desk
        return {"distinct": desk.distinct, "tokens": [use.as_json() for use in desk.uses()]}

    def _get_keys(self, call: Call) -> dict[str, object]:
        return {"keys": self._keys()}

    def _keys(self) -> list[dict[str, object]]:
        return [
            {
                "key_id": key.key_id,
                "team_id": key.team_id,
                "topics": None if key.topics is None else sorted(key.topics),
                "refusal": key.refusal,
            }
            for key in self._simulator.desk.keys.values()
        ]

    def _post_key(self, call: Call) -> dict[str, object]:
        """Adds or replaces a key; without `key_file` a new .p8 is made, and its path is in the answer."""
        key_id, team_id = str(call.body.get("key_id", "")), str(call.body.get("team_id", ""))
        if not (key_id.isalnum() and team_id.isalnum()):
            raise Refused(HTTPStatus.BAD_REQUEST, "key_id, team_id: letters and digits")
        given, topics, refusal = call.body.get("key_file"), call.body.get("topics"), call.body.get("refusal")
        path = self._authority.auth_key(key_id) if given is None else Path(str(given))
        key = SigningKey(
            key_id,
            team_id,
            public_key_of(path),
            None if topics is None else frozenset(_TEXTS.validate_python(topics)),
            None if refusal is None else str(refusal),
        )
        desk = self._simulator.desk
        desk.replace_keys({**desk.keys, key_id: key}.values())
        return {"key_file": str(path), "keys": self._keys()}

    def _delete_key(self, call: Call) -> dict[str, object]:
        """Revoked: its tokens are InvalidProviderToken from now on."""
        desk = self._simulator.desk
        desk.replace_keys(key for key in list(desk.keys.values()) if key.key_id != call.parts[0])
        return {"keys": self._keys()}


def _figure(stats: dict[str, object], name: str) -> float:
    value = stats.get(name)
    if not isinstance(value, int | float):
        raise Refused(HTTPStatus.BAD_REQUEST, f"no figure called {name}")
    return value
